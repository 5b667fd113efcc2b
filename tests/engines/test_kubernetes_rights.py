"""What the identities of `deploy/kubernetes` may do on a real API server, and what `dtrain doctor` says of
it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.kubernetes.engine import RIGHTS
from harness.engines.kubernetes_access import NAMESPACE, deploy, read_token
from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_image import IMAGE
from tests.dtrain_dagster.told_json import TOLD, fields_in, printed

pytestmark = [pytest.mark.slow, pytest.mark.long]
CHECK = "dtrain doctor"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
ROLE = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/dtrain"
Right = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def access(kubernetes: KubernetesCluster) -> Path:
    return deploy(kubernetes)


@pytest.fixture(autouse=True)
def settings(access: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user of the page sets."""
    monkeypatch.setenv("DTRAIN_CLUSTER", "kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(access))
    monkeypatch.setenv("DTRAIN_KUBERNETES_IMAGE", IMAGE)


def granted(cluster: KubernetesCluster, account: str, namespace: str) -> set[Right]:
    """What an account may do in a namespace, in the words of the API server: as `RIGHTS`."""
    cluster._tokens[account] = read_token(cluster, account)
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    status = cluster.ask("POST", REVIEWS, body, token=account)["status"]
    assert not status["incomplete"], status
    assert not [rule for rule in status["resourceRules"] if rule.get("resourceNames")], "a right over some objects only"
    return {
        (group, resource.partition("/")[0], resource.partition("/")[2], verb)
        for rule in status["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_who_submits_has_the_rights_that_are_checked_and_nodes_have_none(kubernetes: KubernetesCluster) -> None:
    everybodys = granted(kubernetes, "default", NAMESPACE)
    assert {group for group, *_ in everybodys} == {"authorization.k8s.io"}, "to ask for one's own rights"
    assert granted(kubernetes, "dtrain", NAMESPACE) - everybodys == set(RIGHTS)
    assert granted(kubernetes, "dtrain", "kube-system") == everybodys
    assert granted(kubernetes, "dtrain-node", NAMESPACE) == everybodys


def test_a_cluster_that_takes_nodes_is_told_with_its_namespace(access: Path) -> None:
    document = printed(CHECK)
    assert fields_in(CHECK, [document]) <= set(TOLD[CHECK])
    line = document["lines"][0]
    assert (line["verdict"], line["seen"]) == ("ok", f"namespace {NAMESPACE} takes nodes from this identity")


def test_a_right_that_is_missing_is_named(kubernetes: KubernetesCluster) -> None:
    right = ("", "pods", "log", "get")
    role = kubernetes.ask("GET", ROLE)
    del role["metadata"]["resourceVersion"]
    assert printed(CHECK)["counts"]["ok"]
    kubernetes.ask("PUT", ROLE, without(role, right))
    try:
        kubernetes.wait(lambda: right not in granted(kubernetes, "dtrain", NAMESPACE), "a smaller role")
        document = printed(CHECK, code=1)
    finally:
        kubernetes.ask("PUT", ROLE, role)
        kubernetes.wait(lambda: right in granted(kubernetes, "dtrain", NAMESPACE), "the role as it was")
    _, resource, part, verb = right
    [line] = document["lines"]
    assert line["verdict"] == "missing"
    assert verb in line["seen"]
    assert "/".join(filter(None, (resource, part))) in line["seen"]
    assert "deploy/kubernetes has the rights" in line["seen"]


def without(role: dict[str, Any], right: Right) -> dict[str, Any]:
    """A role with one right less."""
    smaller = copy.deepcopy(role)
    group, resource, part, verb = right
    for rule in smaller["rules"]:
        if group in rule["apiGroups"] and "/".join(filter(None, (resource, part))) in rule["resources"]:
            rule["verbs"].remove(verb)
    smaller["rules"] = [rule for rule in smaller["rules"] if rule["verbs"]]
    return smaller

from __future__ import annotations

import re
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

from dtrain_dagster.clusters.kubernetes import objects
from dtrain_dagster.settings.kubernetes import KubernetesSettings, read_volumes

VERSIONS = ("1.33", "1.37")
LAUNCH = {"job_id": "prices/of stocks", "token": "a" * 48, "launch": 3, "env": {}}
PLAIN = KubernetesSettings.of({"image": "registry.example/dtrain:1"})
TEMPLATE = {
    "metadata": {"labels": {"team": "research", "dtrain/node": "9"}, "annotations": {"a.example/b": "c"}},
    "spec": {
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "low",
        "nodeSelector": {"gpu": "a100"},
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "tolerations": [
            {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
            {
                "key": "node.kubernetes.io/not-ready",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 5,
            },
        ],
        "affinity": {},
        "containers": [
            {
                "name": "node",
                "imagePullPolicy": "Always",
                "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "HOME", "value": "/home/own"}],
                "envFrom": [{"secretRef": {"name": "storage"}}],
                "resources": {"limits": {"rdma/hca": "1"}},
                "volumeMounts": [{"name": "ssd", "mountPath": "/tmp"}, {"name": "ssd", "mountPath": "/ssd"}],
            }
        ],
        "volumes": [{"name": "ssd", "emptyDir": {}}],
    },
}
FULL = KubernetesSettings.of({
    "image": "registry.example/dtrain:1", "gpus": 4, "queue": "research",
    "volumes": read_volumes("pvc:shared:/data,nfs:files.example:/export:/nfs:ro,host:/mnt/disk:/disk"),
    "pod_template": TEMPLATE,
})  # fmt: skip


def job(options: KubernetesSettings = PLAIN, **changes: Any) -> dict[str, Any]:
    given = {"node_id": 1, "incarnation": 2, "command": ["python3"], "grace_seconds": 20.0}
    return objects.node_object(options, LAUNCH, **{**given, **changes})


def pod(options: KubernetesSettings) -> dict[str, Any]:
    return job(options)["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_objects_are_what_kubernetes_takes(options: KubernetesSettings, version: str):
    schemas.validate(job(options), version, strict=True)


def test_a_job_runs_its_pod_once_and_is_found_with_its_launch():
    made = job()
    assert made["spec"]["backoffLimit"] == 0
    assert pod(PLAIN)["restartPolicy"] == "Never"
    labels = {"dtrain/job": "prices_of_stocks", "dtrain/launch": objects.name_launch(LAUNCH), "dtrain/node": "1",
              "dtrain/incarnation": "2"}  # fmt: skip
    assert labels.items() <= made["metadata"]["labels"].items()
    assert labels.items() <= made["spec"]["template"]["metadata"]["labels"].items()


def test_names_differ_by_launch_node_and_incarnation_and_are_short_enough():
    others = [LAUNCH, {**LAUNCH, "launch": 4}, {**LAUNCH, "token": "b" * 48}]
    names = {objects.name_job(launch, node, number) for launch in others for node in (0, 1) for number in (1, 2)}
    assert len(names) == 12
    assert len(objects.name_job({**LAUNCH, "launch": 999}, 999, 999)) <= 63
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


@pytest.mark.parametrize("text", ["a" * 90, "-a-", "é/ü", "…x…"])
def test_labels_hold_any_job_id(text: str):
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", objects.label_of(text))


def test_a_pod_has_no_rights_that_it_does_not_need():
    spec = pod(PLAIN)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    own = spec["containers"][0]["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert "hostNetwork" not in spec


def test_what_the_settings_and_the_template_ask_for_is_in_the_pod():
    spec = pod(FULL)
    [container] = spec["containers"]
    assert container["resources"]["limits"] == {"memory": "4096Mi", "nvidia.com/gpu": "4", "rdma/hca": "1"}
    assert container["envFrom"] == [{"secretRef": {"name": "storage"}}]
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert (variables["NCCL_DEBUG"], variables["HOME"]) == ("INFO", "/home/own")
    assert "DTRAIN_HOST" in variables
    assert (container["command"], container["imagePullPolicy"]) == (["python3"], "Always")
    mounts = {mount["mountPath"]: (mount["name"], mount.get("readOnly")) for mount in container["volumeMounts"]}
    assert mounts == {
        "/data": ("storage-0", False), "/nfs": ("storage-1", True), "/disk": ("storage-2", False),
        "/dev/shm": ("shared-memory", None), "/tmp": ("ssd", None), "/ssd": ("ssd", None),
    }  # fmt: skip
    assert len(container["volumeMounts"]) == len(mounts)
    assert {volume["name"] for volume in spec["volumes"]} == {name for name, _ in mounts.values()}
    user = spec["securityContext"]
    assert (user["runAsUser"], user["runAsGroup"], user["runAsNonRoot"]) == (0, 1000, False)
    assert (spec["nodeSelector"], spec["hostNetwork"], spec["affinity"]) == ({"gpu": "a100"}, True, {})
    seconds = {item["key"]: item.get("tolerationSeconds") for item in spec["tolerations"]}
    assert seconds == {"gpu": None, "node.kubernetes.io/not-ready": 5, "node.kubernetes.io/unreachable": 20}
    made = job(FULL)
    assert made["metadata"]["labels"][objects.QUEUE] == "research"
    assert made["spec"]["suspend"] is True
    about = made["spec"]["template"]["metadata"]
    assert (about["labels"]["team"], about["labels"]["dtrain/node"]) == ("research", "1")
    assert about["annotations"].keys() >= {"a.example/b", "karpenter.sh/do-not-disrupt"}


@pytest.mark.parametrize("mount", ["/tmp", "/tmp/", "/dev/shm"])
def test_a_volume_of_the_users_takes_the_place_of_one_of_ours(mount: str):
    made = pod(KubernetesSettings.of({"image": "x", "volumes": read_volumes(f"pvc:shared:{mount}")}))
    mounts = [item["mountPath"].rstrip("/") for item in made["containers"][0]["volumeMounts"]]
    assert sorted(mounts) == ["/dev/shm", "/tmp"]
    assert {item["name"] for item in made["volumes"]} == {
        item["name"] for item in made["containers"][0]["volumeMounts"]
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_a_pod_is_not_placed_on_excluded_machines(options: KubernetesSettings, version: str):
    made = job(options, excluded=["m1", "m2"])
    schemas.validate(made, version, strict=True)
    affinity = made["spec"]["template"]["spec"]["affinity"]
    assert _fields(affinity) == [["m1", "m2"]]
    assert {**affinity, "nodeAffinity": None} == {**pod(options)["affinity"], "nodeAffinity": None}


def test_each_of_a_templates_own_terms_leaves_out_the_excluded_machines():
    names = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["m0"]}]}
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    preferred = [{"weight": 1, "preference": zone}]
    own = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone, names]},
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    template = {"spec": {"affinity": {"nodeAffinity": own}}}
    made = job(KubernetesSettings.of({"image": "x", "pod_template": template}), excluded=["m1"])
    affinity = made["spec"]["template"]["spec"]["affinity"]
    assert _fields(affinity) == [["m1"], ["m0", "m1"]]
    first, _ = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert first["matchExpressions"] == zone["matchExpressions"]
    assert affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred


def _fields(affinity: Any) -> list[list[str]]:
    """The machines that each term leaves out."""
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    fields = [term["matchFields"] for term in terms]
    assert all((each["key"], each["operator"]) == ("metadata.name", "NotIn") for term in fields for each in term)
    return [[host for each in term for host in each["values"]] for term in fields]


def test_a_machine_is_given_up_after_the_stated_time_only():
    seconds = {item["key"]: item.get("tolerationSeconds") for item in pod(PLAIN)["tolerations"]}
    assert seconds == {"node.kubernetes.io/not-ready": 20, "node.kubernetes.io/unreachable": 20}

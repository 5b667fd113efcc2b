"""The test cluster itself: what the tests of the Kubernetes engine rely on holds, and nothing of it is left behind."""

from __future__ import annotations

import urllib.error
from pathlib import Path

import pytest

from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_parts import CGROUPS, missing

pytestmark = [pytest.mark.slow, pytest.mark.long]
PODS = "/api/v1/namespaces/default/pods"


def test_only_who_has_a_token_is_answered(kubernetes: KubernetesCluster) -> None:
    kubernetes._tokens["nobody"] = "not-a-token"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        kubernetes.ask("GET", PODS, token="nobody")


def test_nothing_is_left_of_a_cluster() -> None:
    if why := missing():
        pytest.skip(why)
    with KubernetesCluster(nodes=1) as cluster:
        assert len(cluster.processes("")) > 6
        groups, folder = cluster._cgroup, cluster.folder
    assert not cluster.processes("")
    assert not list(CGROUPS.glob(f"*/{groups}"))
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()

"""The test cluster itself: what the tests of the Kubernetes engine rely on holds, and nothing of it is left behind."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_image import IMAGE, host_volumes
from harness.engines.kubernetes_init import NETWORK
from harness.engines.kubernetes_parts import CGROUPS, missing

pytestmark = [pytest.mark.slow, pytest.mark.long]
PODS = "/api/v1/namespaces/default/pods"


def pod(name: str, node: str, folder: Path, program: str) -> dict[str, Any]:
    volumes = host_volumes(folder)
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [{
                "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", f"cd {folder}; exec python3 -P -c \"$0\"", program],
                "volumeMounts": [{"name": f"v{index}", "mountPath": path, "readOnly": read_only}
                                 for index, (path, read_only) in enumerate(volumes)],
            }],
            "volumes": [{"name": f"v{index}", "hostPath": {"path": path}} for index, (path, _) in enumerate(volumes)],
        },
    }  # fmt: skip


def test_pods_of_two_machines_share_a_folder_and_a_network(kubernetes: KubernetesCluster, tmp_path: Path) -> None:
    serve = (
        "import socket, os; s = socket.create_server(('', 4000)); open('address', 'w').write(socket.gethostbyname("
        "socket.gethostname())); c, a = s.accept(); c.sendall(a[0].encode())"
    )
    call = (
        "import socket, os, time, json\n"
        "while not (os.path.exists('address') and (server := open('address').read())): time.sleep(0.1)\n"
        "c = socket.create_connection((server, 4000)); print(json.dumps([server, c.recv(99).decode()]))"
    )
    kubernetes.ask("POST", PODS, pod("server", "node-0", tmp_path, serve))
    kubernetes.ask("POST", PODS, pod("caller", "node-1", tmp_path, call))
    kubernetes.wait(lambda: kubernetes.ask("GET", f"{PODS}/caller")["status"]["phase"] == "Succeeded", "the call")
    said = kubernetes.ask("GET", f"{PODS}/caller/log")
    server, caller = said if isinstance(said, list) else json.loads(said)
    assert server.startswith(f"{NETWORK}.1.")
    assert caller.startswith(f"{NETWORK}.2.")


def test_a_machine_that_is_killed_takes_its_pods_along_and_comes_back(
    kubernetes: KubernetesCluster, tmp_path: Path
) -> None:
    kubernetes.ask("POST", PODS, pod("sleeper", "node-1", tmp_path, "import time; 'a sleeper'; time.sleep(1000)"))
    kubernetes.wait(lambda: bool(kubernetes.processes("a sleeper")), "the pod's process")
    kubernetes.kill("node-1")
    assert not kubernetes.processes("a sleeper")
    kubernetes.wait_for_node("node-1", ready=False)
    assert kubernetes.node_is_ready("node-0")
    kubernetes.start("node-1")
    kubernetes.wait_for_node("node-1")


def test_the_api_server_comes_back_with_all_that_it_knew(kubernetes: KubernetesCluster) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"a": "b"}}
    kubernetes.ask("POST", "/api/v1/namespaces/default/configmaps", body)
    kubernetes.kill("kube-apiserver")
    with pytest.raises(OSError, match=r".+"):
        kubernetes.ask("GET", "/readyz")
    kubernetes.start("kube-apiserver")
    kubernetes.wait_for_api()
    assert kubernetes.ask("GET", "/api/v1/namespaces/default/configmaps/kept")["data"] == {"a": "b"}


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

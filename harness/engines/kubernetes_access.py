"""The namespace and the rights of `deploy/kubernetes` on the test cluster, and the engine as that service account."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.kubernetes.objects import LOST_MACHINE
from dtrain_dagster.settings.kubernetes import CONTAINER, KubernetesSettings
from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_image import IMAGE

NAMESPACE = "dtrain"
DEPLOYED = Path(__file__).parents[2] / "deploy" / "kubernetes"


def deploy(cluster: KubernetesCluster) -> Path:
    """Apply `deploy/kubernetes` as its first line says. Return a kubeconfig of its service account."""
    command = [cluster.programs / "bin" / "kubectl", f"--kubeconfig={cluster.kubeconfig}", "apply", "-k", DEPLOYED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return log_in(cluster)


def log_in(cluster: KubernetesCluster) -> Path:
    """Return a kubeconfig of the service account `dtrain`, as soon as it and the others have their tokens."""
    for account in ("dtrain", "dtrain-node", "default"):
        read_token(cluster, account)
    path = cluster.folder / "dtrain.yaml"
    path.write_text(cluster.write_kubeconfig(read_token(cluster, "dtrain"), cluster.url))
    return path


def provide_claim(cluster: KubernetesCluster, name: str, folder: Path) -> None:
    """Make a claim of a storage that all nodes may mount: a folder of this machine, as all machines are here."""
    about = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**about, "hostPath": {"path": str(folder)}, "claimRef": {"namespace": NAMESPACE, "name": name}}
    claim = {
        "accessModes": about["accessModes"], "storageClassName": "", "volumeName": name,
        "resources": {"requests": about["capacity"]},
    }  # fmt: skip
    claims = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"
    for path, kind, spec in (
        ("/api/v1/persistentvolumes", "PersistentVolume", volume),
        (claims, "PersistentVolumeClaim", claim),
    ):
        cluster.ask("POST", path, {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
    cluster.wait(lambda: cluster.ask("GET", f"{claims}/{name}")["status"].get("phase") == "Bound", f"the claim {name}")


def read_token(cluster: KubernetesCluster, account: str) -> str:
    """Return the token of a service account of the namespace, as soon as it has one."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}"
    cluster.wait(lambda: cluster.ask("GET", path).get("secrets"), f"a token of {account}")
    name = cluster.ask("GET", path)["secrets"][0]["name"]
    secret = cluster.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")
    return base64.b64decode(secret["data"]["token"]).decode()


def pod_template(spec: Mapping[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    """A pod template with this specification, and these fields of the nodes' container. A machine that does not answer
    is given up after a second."""
    soon = [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1} for key in LOST_MACHINE]
    return {"spec": {"tolerations": soon, **(spec or {}), "containers": [{"name": CONTAINER, **container}]}}


def make_options(kubeconfig: Path, **changes: Any) -> KubernetesSettings:
    """The options of quick, small nodes."""
    given = {
        "kubeconfig": str(kubeconfig), "namespace": NAMESPACE, "image": IMAGE, "cpus": 0.1, "memory_gib": 0.0625,
        "pod_template": pod_template(imagePullPolicy="Never"),
    }  # fmt: skip
    return KubernetesSettings.of(json.loads(json.dumps(given | changes)))


def make_engine(options: KubernetesSettings, script: str = "exit 0") -> KubernetesEngine:
    """An engine whose nodes run a line of shell, with ``$NODE`` and ``$INCARNATION``."""

    def command(launch: Mapping[str, Any], node_id: int, incarnation: int) -> Sequence[str]:
        return ["/bin/sh", "-c", f"NODE={node_id}; INCARNATION={incarnation}; {script}"]

    return KubernetesEngine(options, "/data/jobs/one", command)

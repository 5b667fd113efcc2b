"""The options of a Kubernetes cluster, as manifests and the engine take them.

`dtrain_dagster.settings.kubernetes` reads and checks them; nothing is asked of a cluster here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A storage that all nodes mount."""

    mount: str
    """The folder in the pods; the same path on every node."""
    source: Mapping[str, Any]
    """The volume's source, as Kubernetes' pod specification has it."""
    read_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """The options of `dtrain_dagster.settings.kubernetes.KubernetesSettings`, whose descriptions hold here."""

    image: str
    kubeconfig: str | None = None
    context: str | None = None
    namespace: str = "dtrain"
    python: str = "python3"
    service_account: str | None = None
    cpu: str = "1"
    memory: str = "4Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    volumes: tuple[Volume, ...] = ()
    queue: str | None = None
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    lost_seconds: int = 20
    """Seconds after which a machine that does not answer is given up for lost."""
    poll_seconds: float = 2.0
    """Seconds between two looks at the nodes."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> KubernetesOptions:
        """Return the options of `KubernetesSettings.options`, which are in JSON's types."""
        return cls(**{**given, "volumes": tuple(Volume(**volume) for volume in given.get("volumes", ()))})

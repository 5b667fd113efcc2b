"""The options of a Kubernetes cluster, as manifests and the engine take them.

`dtrain_dagster.settings.kubernetes` reads and checks them; nothing is asked of a cluster here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    python: str = "python3"
    service_account: str | None = None
    env_secrets: tuple[str, ...] = ()
    cpu: str = "1"
    memory: str = "4Gi"
    shared_memory: str = "1Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    volumes: tuple[Volume, ...] = ()
    user: int = 1000
    spread: Literal["prefer", "require", "none"] = "prefer"
    host_network: bool = False
    priority_class: str | None = None
    queue: str | None = None
    lost_seconds: int = 20
    keep_seconds: int = 3600
    poll_seconds: float = 2.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> KubernetesOptions:
        """Return the options of `KubernetesSettings.options`, which are in JSON's types."""
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        own["volumes"] = tuple(Volume(**volume) for volume in given.get("volumes", ()))
        return cls(**own)

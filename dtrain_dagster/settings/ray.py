"""The settings of ``DTRAIN_CLUSTER=ray``: ``DTRAIN_RAY_*`` environment variables. None of them is a secret.

What is asked of a Ray cluster belongs in `dtrain_dagster.clusters.ray`.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import EnvironmentSettings

PREFIX = "DTRAIN_RAY_"
_RESOURCE = re.compile(r"(?P<name>[A-Za-z][\w:.-]*)=(?P<amount>\d+(\.\d+)?)")
_FIXED = {"CPU": "CPUS", "GPU": "GPUS", "memory": "MEMORY_GIB"}


class RaySettings(EnvironmentSettings):
    """The settings of a Ray cluster. Every field is the environment variable of that name in capitals after
    ``DTRAIN_RAY_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    address: str = Field(
        default="auto",
        pattern=r"^(auto|(ray://)?[A-Za-z0-9.\[\]:_-]+:\d{1,5})$",
        description="Address of the cluster: auto for the one that this machine belongs to, host:port of its head, or "
        "ray://host:10001 through Ray Client from outside of it",
    )
    dashboard: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@?#]+$",
        description="Address of the head's dashboard, http://host:8265, which is asked how nodes stand; unset: the "
        "cluster knows it",
    )
    cluster: str | None = Field(
        default=None,
        pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/)?[a-z]([a-z0-9-]{0,39}[a-z0-9])?$",
        description="RayCluster of KubeRay, as name or namespace/name: the address and the dashboard are those of its "
        "head's service; instead of DTRAIN_RAY_ADDRESS",
    )
    namespace: str = Field(
        default="dtrain", pattern=r"^[A-Za-z0-9_-]{1,63}$", description="Ray's namespace of all that is created"
    )
    cpus: float = Field(default=1.0, gt=0, le=4096, description="CPUs of a node")
    gpus: int = Field(default=0, ge=0, le=64, description="GPUs of a node")
    memory_gib: float | None = Field(default=None, gt=0, description="Memory of a node in GiB, as Ray counts it")
    resources: str = Field(
        default="", description="Further resources of Ray that a node needs: name=amount, separated by commas"
    )
    python: str | None = Field(
        default=None,
        pattern=r"^/\S+$",
        description="Interpreter on the nodes, a full path; unset: the one that submits",
    )
    poll_seconds: float = Field(default=1.0, gt=0, le=60, description="Seconds between two looks at the nodes")

    @field_validator("resources")
    @classmethod
    def _resources(cls, text: str) -> str:
        read_resources(text)
        return text

    def options(self) -> dict[str, Any]:
        """Return the arguments of `dtrain_dagster.clusters.ray.options.RayOptions`, in JSON's types."""
        own = self.model_dump(exclude_none=True, exclude={"cluster"})
        return {**own, **self._of_cluster(), "resources": read_resources(self.resources)}

    @model_validator(mode="after")
    def _one_address(self) -> RaySettings:
        if self.cluster and self.address != "auto":
            raise ValueError(
                f"{PREFIX}CLUSTER={self.cluster!r} and {PREFIX}ADDRESS={self.address!r} cannot be combined: unset one"
            )
        return self

    def _of_cluster(self) -> dict[str, str]:
        """Return the addresses of the RayCluster that is named, as KubeRay makes them."""
        if self.cluster is None:
            return {}
        namespace, _, name = self.cluster.rpartition("/")
        head = f"{name}-head-svc{f'.{namespace}.svc' if namespace else ''}"
        return {"address": f"ray://{head}:10001", "dashboard": self.dashboard or f"http://{head}:8265"}


def read_ray_options() -> dict[str, Any]:
    """Return the environment's options for Ray. Raise `SettingsError` for unusable values."""
    return RaySettings.read().options()


def read_resources(text: str) -> dict[str, float]:
    """Return ``name=amount,…`` as a mapping. Raise `ValueError` for other text, and for what has a setting of its
    own."""
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        match = _RESOURCE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not a resource: give name=amount, separated by commas")
        if match["name"] in _FIXED:
            raise ValueError(f"{match['name']} has a setting of its own: {PREFIX}{_FIXED[match['name']]}")
        found[match["name"]] = float(match["amount"])
    return found

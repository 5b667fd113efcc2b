"""The options of a Ray cluster, as the driver and the engine take them.

`dtrain_dagster.settings.ray` reads and checks them; nothing is asked of a cluster here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """The options of `dtrain_dagster.settings.ray.RaySettings`, whose descriptions hold here."""

    address: str = "auto"
    dashboard: str | None = None
    namespace: str = "dtrain"
    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    python: str | None = None
    poll_seconds: float = 1.0

    def demand(self) -> dict[str, float]:
        """Return what a node asks for, by Ray's names of resources."""
        memory = {"memory": self.memory_gib * 2**30} if self.memory_gib else {}
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": self.cpus, **gpus, **memory, **self.resources}

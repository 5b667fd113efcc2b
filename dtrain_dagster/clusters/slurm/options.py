"""The options of a SLURM cluster, as the commands and the engine take them.

`dtrain_dagster.settings.slurm` reads and checks them; nothing is asked of a cluster here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """The options of `dtrain_dagster.settings.slurm.SlurmSettings`, whose descriptions hold here."""

    host: str | None = None
    partition: str | None = None
    gpus: int = 0
    cpus: int = 1
    memory: str | None = None
    time_limit_minutes: int | None = None
    successor_lead_seconds: float = 600.0
    python: str | None = None
    setup: str = ""
    export: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    poll_seconds: float = 2.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SlurmOptions:
        """Return the options of `SlurmSettings.options`, which are in JSON's types."""
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        return cls(**own)

"""What every engine (SLURM, Kubernetes, Ray) is asked for with each node: ``DTRAIN_NODE_*`` environment variables. What
is particular to an engine is in its own settings, which inherit these."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import EnvironmentSettings, SettingsError

NODE = "DTRAIN_NODE_"
_BEFORE = {"CPU": "CPUS", "CPUS": "CPUS", "GPUS": "GPUS", "MEMORY": "MEMORY_GIB", "PYTHON": "PYTHON"}
"""The end of the name that a variable of each engine had before → that of the one that took its place."""


def node_field(name: str, default: Any, description: str, **bounds: Any) -> Any:
    """Return the field of ``DTRAIN_NODE_<name>``."""
    return Field(default=default, validation_alias=f"{NODE}{name}", description=description, **bounds)


class EngineSettings(EnvironmentSettings):
    """The settings of an engine. A field is a variable of its name in capitals after the engine's prefix; those of a
    node are the same for all engines."""

    model_config = SettingsConfigDict(populate_by_name=True)

    cpus: float = node_field("CPUS", 1.0, "CPUs of a node", gt=0, le=4096)
    memory_gib: float | None = node_field(
        "MEMORY_GIB", None, "GiB of memory of a node; unset: 4 on Kubernetes, else what the cluster gives", gt=0
    )
    gpus: int = node_field("GPUS", 0, "GPUs of a node", ge=0, le=64)
    python: str | None = node_field(
        "PYTHON",
        None,
        "Interpreter on the nodes, a full path; unset: the one that submits, on Kubernetes `python3` of the image",
        pattern=r"^/\S+$",
    )

    @classmethod
    def read(cls, **given: Any) -> Self:
        prefix = cls.model_config["env_prefix"]
        for old, new in _BEFORE.items():
            if os.environ.get(f"{prefix}{old}"):
                raise SettingsError(f"{prefix}{old} is {NODE}{new} now, on every engine: set that, and unset this")
        return super().read(**given)

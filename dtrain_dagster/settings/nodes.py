"""What every engine (SLURM, Kubernetes, Ray) is asked for with each node: ``DTRAIN_NODE_*`` environment variables. What
is particular to an engine is in its own settings, which inherit these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import EnvironmentSettings

NODE = "DTRAIN_NODE_"


def node_field(name: str, default: Any, description: str, **bounds: Any) -> Any:
    """Return the field of ``DTRAIN_NODE_<name>``."""
    return Field(default=default, validation_alias=f"{NODE}{name}", description=description, **bounds)


class EngineSettings(EnvironmentSettings):
    """The settings of an engine. A field is a variable of its name in capitals after the engine's prefix; those of a
    node are the same for all engines."""

    model_config = SettingsConfigDict(populate_by_name=True)
    RETIRED: ClassVar[Mapping[str, str]] = {
        "CPU": f"is {NODE}CPUS now: set that",
        "CPUS": f"is {NODE}CPUS now: set that",
        "GPUS": f"is {NODE}GPUS now: set that",
        "MEMORY": f"is {NODE}MEMORY_GIB now: set that",
        "PYTHON": f"is {NODE}PYTHON now: set that",
    }

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

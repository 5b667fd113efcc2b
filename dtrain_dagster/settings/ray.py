"""The settings of ``DTRAIN_CLUSTER=ray``: ``DTRAIN_RAY_*`` environment variables. None of them is a secret.

What is asked of a Ray cluster belongs in `dtrain_dagster.clusters.ray`.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from dtrain_dagster.settings.nodes import NODE, EngineSettings

PREFIX = "DTRAIN_RAY_"
_RESOURCE = re.compile(r"(?P<name>[A-Za-z][\w:.-]*)=(?P<amount>\d+(\.\d+)?)")
FIXED = {"CPU": f"{NODE}CPUS", "GPU": f"{NODE}GPUS", "memory": f"{NODE}MEMORY_GIB"}
"""Ray's names of resources → the settings that they have."""


def read_resources(value: object) -> object:
    """Return ``name=amount,…`` as a mapping; anything else as it is. Raise `ValueError` for other text, and for what
    has a setting of its own."""
    if not isinstance(value, str):
        return value
    found = {}
    for word in filter(None, (word.strip() for word in value.split(","))):
        match = _RESOURCE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not a resource: give name=amount, separated by commas")
        if match["name"] in FIXED:
            raise ValueError(f"{match['name']} has a setting of its own: {FIXED[match['name']]}")
        found[match["name"]] = float(match["amount"])
    return found


class RaySettings(EngineSettings):
    """The settings of a Ray cluster. Every field is the environment variable of that name in capitals after
    ``DTRAIN_RAY_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)
    OPTIONS = ("dashboard", "resources")

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
    resources: Annotated[dict[str, float], NoDecode, BeforeValidator(read_resources)] = Field(
        default={},
        description="Further resources of Ray that a node needs: name=amount, separated by commas",
    )

    def demand(self) -> dict[str, float]:
        """Return what a node asks for, by Ray's names of resources."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        memory = {"memory": self.memory_gib * 2**30} if self.memory_gib else {}
        return {"CPU": self.cpus, **gpus, **memory, **self.resources}

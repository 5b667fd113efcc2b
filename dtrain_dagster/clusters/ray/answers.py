"""What a Ray cluster's answers mean: an actor → the state of a node, with the reason and the remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dtrain_dagster.clusters.supervision.engine import EngineJob

S = "DTRAIN_RAY_"
_OWN = re.compile(r"dtrain-[0-9a-z]+-l\d+-n(?P<node>\d+)-s(?P<incarnation>\d+)")
_SETTINGS = {"CPU": f"{S}CPUS", "GPU": f"{S}GPUS", "memory": f"{S}MEMORY_GIB"}


def read_actor(
    actor: Mapping[str, Any], largest: Sequence[Mapping[str, float]], code: int | None, demand: Mapping[str, float]
) -> EngineJob | None:
    """Return the state of a node; None for an actor that is no node of ours.

    ``largest``: the resources of each machine of the cluster. ``code``: the exit code of the agent, where it has
    written one. ``demand``: what a node asks for.
    """
    match = _OWN.fullmatch(actor["name"])
    if match is None:
        return None
    state: Literal["pending", "running", "ended"] = "running"
    reason, lost = "", False
    if actor["state"] in ("DEPENDENCIES_UNREADY", "PENDING_CREATION"):
        state, reason = "pending", explain_waiting(demand, largest)
    elif actor["state"] == "DEAD":
        state, lost = "ended", code is None
        reason = " ".join(str(actor["why"]).split())[:300] if lost else ""
    return EngineJob(
        id=actor["name"],
        node_id=int(match["node"]),
        incarnation=int(match["incarnation"]),
        state=state,
        reason=reason,
        host=actor["host"],
        exit_code=code if state == "ended" else None,
        lost=lost,
    )


def explain_waiting(demand: Mapping[str, float], largest: Sequence[Mapping[str, float]]) -> str:
    """Return why a node waits: no machine is as large, or others hold the place."""
    for name, amount in demand.items():
        most = max((machine.get(name, 0.0) for machine in largest), default=0.0)
        if amount > most:
            setting = _SETTINGS.get(name, f"{S}RESOURCES")
            said = f"no machine is large enough ({name} {amount:g}, the largest has {most:g})"
            return f"{said}: lower {setting}, or add one"
    return "no machine is free"

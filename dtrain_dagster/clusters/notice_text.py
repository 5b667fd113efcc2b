"""The words of notices about jobs: which notice an end is worth, its title and text, and where a job goes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.settings.tiers import tier_in_words
from dtrain_dagster.support.formatting import format_duration

NoticeKind = Literal["finished", "failed", "budget", "goes_on", "waits", "kept"]
UNTOLD = ("probe-",)
"""The first letters of jobs that no person started."""
PART_OF = "DTRAIN_PART_OF"
"""The variable in a launch's environment that says of what its job is a part; unset for a job that stands alone."""
FLEET, SEARCH = "fleet", "search"
_OF_PARTS: Mapping[str, frozenset[NoticeKind]] = {
    FLEET: frozenset({"finished", "failed", "waits", "kept"}),
    SEARCH: frozenset(),
}
"""What is told of jobs that are parts: a fleet moves its jobs and gives them budgets all the time, and of a search its
end is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFigures:
    """What a notice says of a job, over all its launches."""

    launch: int
    place: str = ""
    """Where it runs, see `describe_place`."""
    steps: int | None = None
    node_seconds: float = 0.0
    cost: str = ""
    """Dollars with their meaning; why they are not known."""
    reason: str = ""
    """Why it failed, was started again, or waits."""
    kept: Sequence[str] = ()
    """How to enter the nodes that are left in place."""
    links: tuple[str, ...] = ()
    """Addresses of pages about it."""


def kind_of_end(state: JobState, result: Mapping[str, Any], launch: int) -> NoticeKind | None:
    """Return the notice for a job that has ended so; None for one that was cancelled, since somebody wanted that, and
    for one that runs."""
    if state is JobState.SUCCEEDED:
        return "finished"
    if state is not JobState.FAILED:
        return None
    return "budget" if result.get("status") == "budget" and result.get("launch") in (None, launch) else "failed"


def is_told(kind: NoticeKind, job_id: str, env: Mapping[str, Any]) -> bool:
    """Return whether people want this notice of a job. ``env``: the environment of its launch."""
    return not job_id.startswith(UNTOLD) and kind in _OF_PARTS.get(str(env.get(PART_OF, "")), {kind})


def write_notice(kind: NoticeKind, job_id: str, figures: JobFigures) -> tuple[str, str]:
    """Return the title and the text of a notice."""
    titles: Mapping[NoticeKind, str] = {
        "finished": "has finished",
        "failed": "has failed",
        "budget": "was stopped by its budget",
        "goes_on": f"goes on: launch {figures.launch}",
        "waits": "waits for nodes",
        "kept": "has failed, and its nodes are kept",
    }
    steps = "" if figures.steps is None else f"{figures.steps:,} steps; "
    launches = f" in {figures.launch} launches" if figures.launch > 1 else ""
    paid = f"{steps}{format_duration(figures.node_seconds)} of nodes{launches}, {figures.cost}"
    if kind == "goes_on":
        where = f"on {figures.place}, from the latest checkpoint"
        lines = [where, f"so far: {paid}", f"dtrain logs --follow {job_id}", f"dtrain cancel {job_id}"]
    elif kind == "waits":
        so_far = f"so far: {paid}" if figures.node_seconds else ""
        lines = [figures.reason, so_far, f"dtrain status {job_id} --follow", f"dtrain cancel {job_id}"]
    elif kind == "kept":
        lines = [figures.reason, *figures.kept, paid, f"dtrain cancel {job_id}"]
    else:
        lines = [figures.reason, paid, f"dtrain logs {job_id}"]
    return f"dtrain: {job_id} {titles[kind]}", "\n".join(filter(None, [*lines, *figures.links]))


def describe_kept(kept: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each node that is left in place, as ``status.json`` has them: until when, and how to enter
    it."""
    lines = []
    for node in kept:
        until = "" if node.get("until") is None else f" until {datetime.fromtimestamp(node['until'], UTC):%H:%M} UTC"
        lines.append(f"node {node['node_id']} is kept{until}: {node.get('how') or 'its engine tells no way in'}")
    return lines


def describe_place(launch: Mapping[str, Any]) -> str:
    """Return where a launch runs, such as ``3 x Standard_NC6s_v3 (Spot) of azure_ml train``."""
    tier = f" ({tier_in_words(str(launch['tier']))})" if launch.get("tier") else ""
    cluster = (
        f" of {launch['engine']} {launch.get('cluster_name', '')}" if launch.get("engine", "local") != "local" else ""
    )
    return f"{launch.get('node_count', '?')} x {launch.get('sku', 'nodes')}{tier}{cluster}".rstrip()

"""Notices to people about a job that they started: that it has ended, goes on in another launch, waits for nodes, or
has nodes that are kept for them; their words, and when they are due. Each is sent once for each launch.

Any process that sees it may tell it: the reaper of the local cluster, the process that follows a job on Azure, a later
one that finds a supervisor dead. `notice_claims` sees to it that one does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import OWNER, JobState
from dtrain_dagster.clusters.notice_claims import ONCE, Write, is_claimed, send_once
from dtrain_dagster.settings.tiers import tier_in_words, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.secrets import redact
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, STATUS, RunDir
from trainer.runtime.retry import RetryPolicy

WAIT_SECONDS = 300.0
"""Seconds that a job waits for nodes before people are told."""
MOST_REASON = 600
"""The most characters of the reason for a failure."""
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Wanted = Literal["end", "goes_on", "waits", "kept"]
"""What is to be told; of an end, `kind_of_end` says how it is told."""
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


def tell(rundir: RunDir, of: Wanted = "end", launch: int | None = None, retries: RetryPolicy = ONCE) -> None:
    """Tell people of a launch (None: of the last one), once: that the job has ended, as its ``status.json`` says; goes
    on in this launch; waits for nodes, and why; or has failed, and how to enter the nodes that are kept. It never
    raises: what is wrong is logged."""
    send_once(rundir, lambda: _find_notice(rundir, of, launch), retries)


def was_told(rundir: RunDir, of: Wanted, launch: int | None = None) -> bool:
    """Return whether people have been told this of a launch (None: of the last one), or are being told; False where
    that cannot be read."""
    try:
        number = launch or int((rundir.read_json(LAUNCH) or {}).get("launch") or 1)
        return is_claimed(rundir, f"l{number}-{of}")
    except (DamagedError, OSError):
        return False


def _find_notice(rundir: RunDir, of: Wanted, launch: int | None) -> tuple[str, Write] | None:
    """Return the key and the words of a notice that is due; None where nothing is to be told."""
    found = rundir.read_json(LAUNCH) or {}
    job_id, number = str(found.get("job_id", "")), int(found.get("launch") or 1)
    if launch not in (None, number):  # another launch has followed, and is told
        return None
    kind: NoticeKind | None = None if of == "end" else of
    if of == "end":
        state = JobState((rundir.read_json(STATUS) or {}).get("state", JobState.QUEUED))
        kind = kind_of_end(state, rundir.read_result() or {}, number)
    if kind is None or not is_told(kind, job_id, found.get("env") or {}):
        return None
    return f"l{number}-{of}", lambda: write_notice(kind, job_id, _figures(rundir, kind, found))


def find_links(rundir: RunDir, launch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the addresses of pages about a job: on the dashboard, in Azure's studio, of the Dagster run that wants it.
    Nodes can write the run directory, so only addresses that can be nothing else are taken from it."""
    from dtrain_dagster.settings.environment import setting
    from dtrain_dagster.settings.notices import job_page, notice_settings_or_defaults, studio_url

    links = [job_page(notice_settings_or_defaults().dashboard_url, str(launch.get("job_id", "")))]
    owner = rundir.read_json(OWNER) or {}
    if studio := studio_url(launch.get("studio_url")):
        links.append(studio)
    run_id = owner.get("dagster_run_id")
    if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id):
        links.append(f"{setting('dagster_url').rstrip('/')}/runs/{run_id}")
    return tuple(links)


def _figures(rundir: RunDir, kind: NoticeKind, launch: Mapping[str, Any]) -> JobFigures:
    from dtrain_dagster.costs.prices import PriceError, price_words
    from dtrain_dagster.costs.tracker import CostTracker

    status, result = rundir.read_json(STATUS) or {}, rundir.read_result() or {}
    state, number = JobState(status.get("state", JobState.QUEUED)), int(launch.get("launch") or 1)
    nodes = rundir.nodes()
    usage = presences.usage(nodes, str(launch.get("sku", "")), not state.is_final, time.time())
    words = price_words(str(launch.get("sku", "")), "tier" in launch)  # only nodes that are bought have one
    try:
        tracker = CostTracker("", usage, tier_of(str(launch.get("tier") or "dedicated")))
        cost = f"{dollars(tracker.total_usd)} ({words})"
    except PriceError as error:
        cost = f"cost not known: {error}"
    first = next(iter(str(status.get("message") or "").splitlines()), "")
    reason = str(result.get("error") or "") if state is JobState.FAILED else ""
    reason = reason if result.get("launch") in (None, number) and reason else first
    steps = result.get("steps")
    reason = redact(reason)[:MOST_REASON]
    return JobFigures(
        launch=number,
        place=describe_place(launch),
        steps=steps if isinstance(steps, int) else None,
        node_seconds=sum(item.ended_at - item.started_at for item in usage),
        cost=cost,
        reason=reason if state is not JobState.SUCCEEDED else "",
        kept=describe_kept(status.get("kept") or ()),
        links=find_links(rundir, launch),
    )

"""Notices to people about a job that they started: that it has ended, goes on in another launch, or waits for nodes.
Each is sent once for each launch.

Any process that sees it may tell it: the reaper of the local cluster, the process that follows a job on Azure, a later
one that finds a supervisor dead. `notice_claims` sees to it that one does.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import OWNER, JobState
from dtrain_dagster.clusters.notice_claims import ONCE, Write, is_claimed, notice_addresses, send_once
from dtrain_dagster.clusters.notice_text import (
    JobFigures,
    NoticeKind,
    describe_kept,
    describe_place,
    is_told,
    kind_of_end,
    write_notice,
)
from dtrain_dagster.settings.tiers import tier_of
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.secrets import redact
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, STATUS, RunDir
from trainer.runtime.retry import RetryPolicy

MOST_REASON = 600
"""The most characters of the reason for a failure."""
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Wanted = Literal["end", "goes_on", "waits", "kept"]
"""What is to be told; of an end, `kind_of_end` says how it is told."""


def tell_of_end(rundir: RunDir, retries: RetryPolicy = ONCE) -> None:
    """Tell people that the job of this run directory has ended, as its ``status.json`` says; once for each launch. It
    never raises: what is wrong is logged."""
    send_once(rundir, lambda: _find_notice(rundir, "end", None), retries)


def tell(rundir: RunDir, of: Wanted, launch: int, retries: RetryPolicy = ONCE) -> None:
    """Tell people of a launch, once: that the job goes on in it, that it waits for nodes, with the reason of
    ``status.json`` and however often it waits, or that it has failed, and how to enter the nodes that are kept. It
    never raises, as `tell_of_end`."""
    send_once(rundir, lambda: _find_notice(rundir, of, launch), retries)


def wait_patience_seconds() -> float:
    """Return how long a job waits for nodes before people are told; infinite where nobody is to be told."""
    if not notice_addresses():
        return math.inf
    from dtrain_dagster.settings.notices import notice_settings_or_defaults  # not above: a supervisor starts at once

    return 60 * notice_settings_or_defaults().notify_wait_minutes


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

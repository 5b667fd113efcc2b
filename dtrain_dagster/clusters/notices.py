"""Notices to people about a job that they started: that it has ended, goes on in another launch, waits for nodes, or
has nodes that are kept for them. Each is sent once for each launch, whoever sees first that it is due: a supervisor,
the process that follows a job on Azure, a later one that finds a supervisor dead.

A file that can be created only once claims a notice. A claim whose sender died is never repeated, since its message may
have arrived. It is given back only where each address has refused the message, so that certainly nobody was told.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import OWNER, JobState
from dtrain_dagster.settings.cluster_kinds import tier_in_words, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.notify import notify
from dtrain_dagster.support.secrets import redact
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import LAUNCH, STATUS, RunDir
from trainer.runtime.launch import GivenOrder
from trainer.runtime.retry import RetryPolicy

NOTIFY = "DTRAIN_NOTIFY"
NOTICES = "notices"
"""The folder of a run directory, or of a search, with a file for each notice that was sent."""
WAIT_SECONDS = 300.0
"""Seconds that a job waits for nodes before people are told."""
REFUSED_WITHIN_SECONDS = 3.0
"""A failure within this time is a refusal, and nobody was told. A later one may be an answer that did not come in time:
Apprise waits four seconds for it."""
RETRIES = RetryPolicy(first_pause_seconds=6.0, max_attempts=4)
"""The attempts of a process that has time: after 0, 6, 18 and 42 s."""
ONCE = RetryPolicy(first_pause_seconds=0.0, max_attempts=1)
MOST_REASON = 600
"""The most characters of the reason for a failure."""
UNTOLD = ("probe-",)
"""The first letters of jobs that no person started."""
FLEET, SEARCH = "fleet", "search"
"""Of what a job may be a part (`trainer.runtime.launch.GivenOrder`)."""
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_log = logging.getLogger(__name__)

Announcement = Literal["end", "goes_on", "waits", "kept"]
"""What is to be told; of an end, `kind_of_end` says how it is told."""
NoticeKind = Literal["finished", "failed", "budget", "goes_on", "waits", "kept"]
_OF_PARTS: Mapping[str, frozenset[NoticeKind]] = {
    FLEET: frozenset({"finished", "failed", "waits", "kept"}),
    SEARCH: frozenset(),
}
"""What is told of jobs that are parts: a fleet moves its jobs and gives them budgets all the time, and of a search its
end is told."""
_TITLES: Mapping[NoticeKind, str] = {
    "finished": "has finished",
    "failed": "has failed",
    "budget": "was stopped by its budget",
    "goes_on": "goes on: launch {launch}",
    "waits": "waits for nodes",
    "kept": "has failed, and its nodes are kept",
}


def tell(rundir: RunDir, of: Announcement = "end", launch: int | None = None, retries: RetryPolicy = ONCE) -> None:
    """Tell people of a launch (None: of the last one), once: that the job has ended, as its ``status.json`` says; goes
    on in this launch; waits for nodes, and why; or has failed, and how to enter the nodes that are kept. It never
    raises: what is wrong is logged."""
    send_once(rundir, lambda: _find_notice(rundir, of, launch), retries)


def was_told(rundir: RunDir, of: Announcement) -> bool:
    """Return whether people have been told this of the last launch, or are being told; False where that cannot be
    read."""
    try:
        number = int((rundir.read_json(LAUNCH) or {}).get("launch") or 1)
        return rundir.storage.exists(f"{NOTICES}/l{number}-{of}.json")
    except (DamagedError, OSError):
        return False


def notice_addresses() -> tuple[str, ...]:
    """Return the addresses that `NOTIFY` names in the environment, or references to them."""
    return tuple(os.environ.get(NOTIFY, "").split())


def send_once(folder: RunDir, find: Callable[[], tuple[str, str, str] | None], retries: RetryPolicy = ONCE) -> None:
    """Send a notice to the addresses of `NOTIFY`, unless it was sent before. ``find`` returns its key, title and text;
    None where nothing is to be told. It never raises: what is wrong is logged."""
    urls = notice_addresses()
    if not urls:
        return
    try:
        if (found := find()) is None:
            return
        key, title, text = found
        claim = f"{NOTICES}/{key}.json"
        try:
            folder.storage.create(claim, b"{}")
        except FileExistsError:  # another process was quicker
            return
        if not _send(urls, title, visible(text, keep_lines=True), retries):
            folder.storage.delete(claim)
    except Exception as error:  # of any kind: a notice must not stop the work that it tells of
        _log.warning("nobody could be notified of %s: %s: %s", folder.uri, type(error).__name__, redact(str(error)))


def _send(urls: Sequence[str], title: str, text: str, retries: RetryPolicy) -> bool:
    """Send a message to each address, again where it was refused; return whether somebody was told, or may have
    been."""
    refused = list(urls)

    def send() -> None:
        for url in tuple(refused):
            began = time.monotonic()
            is_told = not notify([url], title, text)
            is_late = not is_told and time.monotonic() - began >= REFUSED_WITHIN_SECONDS
            if is_late:
                _log.warning("%s did not answer in time to '%s': it is not sent again", url.partition(":")[0], title)
            if is_told or is_late:
                refused.remove(url)
        if refused:
            raise ConnectionRefusedError

    try:
        retries.call("a notice", send, lambda error: isinstance(error, ConnectionRefusedError))
    except ConnectionRefusedError:
        kinds = ", ".join(url.partition(":")[0] for url in refused)
        _log.warning("nobody could be notified by %s: %s; see %s", kinds, title, NOTIFY)
    return len(refused) < len(urls)


def _find_notice(rundir: RunDir, of: Announcement, launch: int | None) -> tuple[str, str, str] | None:
    """Return the key, title and text of a notice that is due; None where nothing is to be told."""
    found = rundir.read_json(LAUNCH) or {}
    job_id, number = str(found.get("job_id", "")), int(found.get("launch") or 1)
    if launch not in (None, number) or was_told(rundir, of):  # another launch has followed, and is told
        return None
    kind: NoticeKind | None = None if of == "end" else of
    if of == "end":
        state = JobState((rundir.read_json(STATUS) or {}).get("state", JobState.QUEUED))
        kind = kind_of_end(state, rundir.read_result() or {}, number)
    if kind is None or not is_told(kind, job_id, found.get("env") or {}):
        return None
    return f"l{number}-{of}", *write_notice(rundir, kind, found)


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
    return not job_id.startswith(UNTOLD) and kind in _OF_PARTS.get(GivenOrder.read(env).part_of, {kind})


def write_notice(rundir: RunDir, kind: NoticeKind, launch: Mapping[str, Any]) -> tuple[str, str]:
    """Return the title and the text of a notice. ``launch``: the last one, as in ``launch.json``."""
    status, result = rundir.read_json(STATUS) or {}, rundir.read_result() or {}
    state, number = JobState(status.get("state", JobState.QUEUED)), int(launch.get("launch") or 1)
    job_id, reason = launch.get("job_id", ""), ""
    if state is not JobState.SUCCEEDED:
        is_of_launch = state is JobState.FAILED and result.get("launch") in (None, number)
        said = (is_of_launch and result.get("error")) or next(iter(str(status.get("message") or "").splitlines()), "")
        reason = redact(str(said))[:MOST_REASON]
    seconds, paid = _describe_bill(rundir, launch, not state.is_final)
    if isinstance(steps := result.get("steps"), int):
        paid = f"{steps:,} steps; {paid}"
    if kind == "goes_on":
        where = f"on {describe_place(launch)}, from the latest checkpoint"
        lines = [where, f"so far: {paid}", f"dtrain logs --follow {job_id}", f"dtrain cancel {job_id}"]
    elif kind == "waits":
        so_far = f"so far: {paid}" if seconds else ""
        lines = [reason, so_far, f"dtrain status {job_id} --follow", f"dtrain cancel {job_id}"]
    elif kind == "kept":
        lines = [reason, *describe_kept(status.get("kept") or ()), paid, f"dtrain cancel {job_id}"]
    else:
        lines = [reason, paid, f"dtrain logs {job_id}"]
    title = f"dtrain: {job_id} {_TITLES[kind].format(launch=number)}"
    return title, "\n".join(filter(None, [*lines, *_find_links(rundir, launch)]))


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


def _describe_bill(rundir: RunDir, launch: Mapping[str, Any], runs: bool) -> tuple[float, str]:
    """Return the node-seconds of all launches of a job, and what was paid for in words; why the dollars are not
    known."""
    from dtrain_dagster.costs.prices import PriceError, price_words  # not above: a supervisor starts in a moment
    from dtrain_dagster.costs.tracker import CostTracker

    sku, number = str(launch.get("sku", "")), int(launch.get("launch") or 1)
    usage = presences.usage(rundir.nodes(), sku, runs, time.time())
    seconds = sum(item.ended_at - item.started_at for item in usage)
    words = price_words(sku, "tier" in launch)  # only nodes that are bought have one
    try:
        tracker = CostTracker("", usage, tier_of(str(launch.get("tier") or "dedicated")))
        cost = f"{dollars(tracker.total_usd)} ({words})"
    except PriceError as error:
        cost = f"cost not known: {error}"
    launches = f" in {number} launches" if number > 1 else ""
    return seconds, f"{format_duration(seconds)} of nodes{launches}, {cost}"


def _find_links(rundir: RunDir, launch: Mapping[str, Any]) -> list[str]:
    """Return the addresses of pages about a job: on the dashboard, in Azure's studio, of the Dagster run that wants it.
    Nodes can write the run directory, so only addresses that can be nothing else are taken from it."""
    from dtrain_dagster.settings.environment import setting
    from dtrain_dagster.settings.links import job_page, studio_url

    links = [job_page(setting("dashboard_url"), str(launch.get("job_id", "")))]
    if studio := studio_url(launch.get("studio_url")):
        links.append(studio)
    run_id = (rundir.read_json(OWNER) or {}).get("dagster_run_id")
    if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id):
        links.append(f"{setting('dagster_url').rstrip('/')}/runs/{run_id}")
    return links

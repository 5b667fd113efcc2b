"""Notices to people about a job that they started: that it has ended, or goes on in another launch. Each is sent once.

Any process that sees the end may tell of it: the reaper of the local cluster, the process that follows a job on Azure,
a later one that finds a supervisor dead. Each notice is claimed first by a file in the run directory that can be
created only once. A claim without an outcome is never repeated, since its message may have arrived; only a refusal that
certainly reached nobody is tried again, for the addresses that missed it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.secrets import redact
from trainer.documents.reader import MARK_BYTES, parse_document
from trainer.documents.schemas import count, many, record, text
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import LAUNCH, STATUS, RunDir
from trainer.runtime.retry import RetryPolicy

NOTIFY = "DTRAIN_NOTIFY"
NOTICES = "notices"
"""The folder of a run directory with a file for each attempt to send a notice."""
RETRIES = RetryPolicy(first_pause_seconds=2.0, growth=4.0, max_attempts=4)
"""The attempts of a process that has time: after 0, 2, 10 and 42 s."""
MOST_ATTEMPTS = 8
REFUSED_WITHIN_SECONDS = 3.0
"""A failure within this time is a refusal, and nobody was told. A later one may be an answer that did not come in time:
Apprise waits four seconds for it."""
UNTOLD = ("probe-",)
"""The first letters of jobs that no person started."""
MOST_REASON = 600
"""The most characters of the reason for a failure."""
_CLAIM = record(state=text, by=text, at=count, missed=many(text))
_log = logging.getLogger(__name__)

NoticeKind = Literal["finished", "failed", "budget", "goes_on"]


class NotToldError(RuntimeError):
    """Some addresses have refused a notice; sending it to them again may help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFigures:
    """What a notice says of a job, over all its launches."""

    launch: int
    nodes: int
    steps: int | None = None
    node_seconds: float = 0.0
    cost: str = ""
    """Dollars with their meaning; why they are not known."""
    reason: str = ""
    """Why it failed, or was started again."""


def kind_of_end(state: JobState, result: Mapping[str, Any], launch: int) -> NoticeKind | None:
    """Return the notice for a job that has ended so; None for one that was cancelled, since somebody wanted that, and
    for one that runs. Pure."""
    if state is JobState.SUCCEEDED:
        return "finished"
    if state is not JobState.FAILED:
        return None
    return "budget" if result.get("status") == "budget" and result.get("launch") in (None, launch) else "failed"


def write_notice(kind: NoticeKind, job_id: str, figures: JobFigures) -> tuple[str, str]:
    """Return the title and the text of a notice. Pure."""
    titles = {
        "finished": "has finished",
        "failed": "has failed",
        "budget": "was stopped by its budget",
        "goes_on": f"goes on: launch {figures.launch}",
    }
    steps = "" if figures.steps is None else f"{figures.steps:,} steps; "
    launches = f" in {figures.launch} launches" if figures.launch > 1 else ""
    paid = f"{steps}{format_duration(figures.node_seconds)} of nodes{launches}, {figures.cost}"
    if kind == "goes_on":
        nodes = f"on {figures.nodes} node{'s' if figures.nodes > 1 else ''}, from the latest checkpoint"
        lines = [nodes, f"so far: {paid}", f"dtrain logs --follow {job_id}", f"dtrain cancel {job_id}"]
    else:
        lines = [figures.reason, paid, f"dtrain logs {job_id}"]
    return f"dtrain: {job_id} {titles[kind]}", "\n".join(filter(None, lines))


def notice_addresses() -> tuple[str, ...]:
    """Return the addresses that `NOTIFY` names in the environment, or references to them."""
    return tuple(os.environ.get(NOTIFY, "").split())


def has_end_to_tell(rundir: RunDir) -> bool:
    """Return whether `tell_of_end` would send something, or has."""
    try:
        return bool(notice_addresses()) and _end_of(rundir) is not None
    except (DamagedError, OSError):
        return False


def tell_of_end(rundir: RunDir, retries: RetryPolicy | None = None) -> None:
    """Tell people that the job of this run directory has ended, as its ``status.json`` says; once for each launch.
    ``retries``: None for one attempt. It never raises: what is wrong is logged."""
    _tell_safely(rundir, None, retries)


def tell_of_launch(rundir: RunDir, launch: int, retries: RetryPolicy | None = None) -> None:
    """Tell people that the job goes on in this launch; once. It never raises, as `tell_of_end`."""
    _tell_safely(rundir, launch, retries)


def was_told_of_end(rundir: RunDir, launch: int) -> bool:
    """Return whether people have been told, or are being told, of the end of this launch."""
    names = rundir.storage.list(NOTICES)
    return any(name.startswith(f"l{launch}-end.") for name in names)


def _tell_safely(rundir: RunDir, launch: int | None, retries: RetryPolicy | None) -> None:
    urls = notice_addresses()
    if not urls:
        return
    try:
        if retries is None:
            _tell(rundir, launch, urls)
        else:
            retries.call("a notice", lambda: _tell(rundir, launch, urls), lambda error: isinstance(error, NotToldError))
    except NotToldError as error:
        _log.warning("%s; see DTRAIN_NOTIFY", error)
    except Exception as error:  # of any kind: a notice must not stop the work that it tells of
        _log.warning("nobody could be told of %s: %s: %s", rundir.uri, type(error).__name__, redact(str(error)))


def _tell(rundir: RunDir, launch: int | None, urls: Sequence[str]) -> None:
    record_ = rundir.read_json(LAUNCH) or {}
    job_id, number = str(record_.get("job_id", "")), int(record_.get("launch") or 1)
    again: NoticeKind | None = "goes_on" if launch == number else None  # else another has followed, and is told
    kind = _end_of(rundir) if launch is None else again
    if kind is None:
        return
    key = f"l{number}-{'launch' if kind == 'goes_on' else 'end'}"
    claimed = claim_notice(rundir, key, urls)
    if claimed is None:
        return
    name, addresses = claimed
    title, body = write_notice(kind, job_id, _figures(rundir, record_))
    from dtrain_dagster.support.notify import notify  # not above: a supervisor has to start in a moment

    refused: list[str] = []
    lost: list[str] = []
    for url in addresses:
        began = time.monotonic()
        if notify([url], title, visible(body, keep_lines=True)):
            (refused if time.monotonic() - began < REFUSED_WITHIN_SECONDS else lost).append(url)
    _write(rundir, name, "refused" if refused else "unknown" if lost else "sent", [_digest(url) for url in refused])
    if lost:
        _log.warning("no answer came in time by %s to «%s»: it is not sent again", _kinds(lost), title)
    if refused:
        raise NotToldError(f"nobody could be told by {_kinds(refused)}: {title}")


def claim_notice(rundir: RunDir, key: str, urls: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the file of an attempt that is this process's alone, and the addresses that it has to reach; None where
    another process has sent the notice, or may have."""
    left = tuple(urls)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        name = f"{NOTICES}/{key}.{attempt}.json"
        claim = {"state": "claimed", "by": f"{os.getpid()}@{socket.gethostname()}", "at": int(time.time())}
        try:
            rundir.storage.create(name, json.dumps(claim).encode())
        except FileExistsError:
            found = _read(rundir, name)
            if found.get("state") != "refused":
                return None
            left = tuple(url for url in urls if _digest(url) in found.get("missed", ()))
            if not left:
                return None
            continue
        return name, left
    return None


def _read(rundir: RunDir, name: str) -> dict[str, Any]:
    """Return the record of an attempt; an empty one where it is damaged, so that nothing is sent twice."""
    try:
        found: dict[str, Any] = parse_document(rundir.storage.read_bounded(name, MARK_BYTES), name, _CLAIM)
    except (DamagedError, FileNotFoundError):
        return {}
    return found


def _write(rundir: RunDir, name: str, state: str, missed: Sequence[str]) -> None:
    outcome = {"state": state, "by": f"{os.getpid()}@{socket.gethostname()}", "at": int(time.time())}
    rundir.storage.write(name, json.dumps({**outcome, "missed": list(missed)}).encode())


def _kinds(urls: Sequence[str]) -> str:
    return ", ".join(url.partition(":")[0] for url in urls)


def _digest(url: str) -> str:
    """Return a name for an address that does not tell it."""
    return hashlib.sha256(url.encode()).hexdigest()[:12]


def _end_of(rundir: RunDir) -> NoticeKind | None:
    """Return the notice that the end of this job is worth; None for no notice."""
    launch, status = rundir.read_json(LAUNCH) or {}, rundir.read_json(STATUS) or {}
    if str(launch.get("job_id", "")).startswith(UNTOLD):
        return None
    state = JobState(status.get("state", JobState.QUEUED))
    return kind_of_end(state, rundir.read_result() or {}, int(launch.get("launch") or 1))


def _figures(rundir: RunDir, launch: Mapping[str, Any]) -> JobFigures:
    from dtrain_dagster.costs.prices import PriceError, price_words, tier_of
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
    return JobFigures(
        launch=number,
        nodes=int(launch.get("node_count") or 1),
        steps=steps if isinstance(steps, int) else None,
        node_seconds=sum(item.ended_at - item.started_at for item in usage),
        cost=cost,
        reason=redact(reason)[:MOST_REASON] if state is not JobState.SUCCEEDED else "",
    )

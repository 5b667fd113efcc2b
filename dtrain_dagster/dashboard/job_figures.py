"""The figures of a job's row that cost more to read than its state: verdict, losses, dollars.

`read_figures` reads a run directory's newest events only, however long the job is. The verdict is decided by
`verdict_of`, which is pure; it is that of the job's report where there is one, so that no two pages contradict each
other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.notice_text import describe_kept
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.dashboard.failure import describe_failure
from dtrain_dagster.dashboard.job_board import CANNOT_READ, cost_so_far
from dtrain_dagster.dashboard.job_index import DAMAGED, JobRow
from dtrain_dagster.dashboard.judged_result import score_in_row
from dtrain_dagster.dashboard.tracks import is_number
from dtrain_dagster.jobs.progress import PERFORMANCE_REPORT
from dtrain_dagster.jobs.view import JobView, fold
from dtrain_dagster.monitoring.alerts import LiveVerdict, settle_verdict
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose
from dtrain_dagster.monitoring.windows import KEPT_WINDOWS
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.secrets import redact
from trainer.documents.presences import NodePresence
from trainer.documents.reader import EVENTS_BYTES, parse_events
from trainer.printable import visible
from trainer.rundir import EVALUATION, EVENTS, LAUNCH, RESULT, STATUS, RunDir

MOST_FILES = 40
"""The most files of events, the newest first, that a row is read from."""
EVALUATION_FILES, REMOTE_EVALUATION_FILES = 10_000, 200
"""The most files that the first look at a running job goes back through for its latest evaluation, which may be hours
ago; later looks have that of the look before. Each file of remote storage is paid for."""
ENDED_WINDOWS = 200
"""The most timings of an ended job without a report that its diagnosis rests on: all of most jobs, as on its page."""
MOST_RANKS = 8
"""The most ranks besides 0 whose newest file is read."""
_OF_RANK = re.compile(r"g\d+-r(\d+)-\d+\.jsonl")
MOST_WORDS = 300
"""The most characters of a verdict."""

Tone = Literal["", "good", "wait", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What holds a job up, or why it ended, in words."""

    words: str = ""
    tone: Tone = ""
    """How it is meant: fine, worth a look, or broken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFigures:
    """What the table of all jobs shows of a job, beside `JobRow`. Figures are None where they are not known."""

    verdict: Verdict = Verdict()
    valid_loss: float | None = None
    """The best validation loss; of a job that runs, the latest."""
    usd: float | None = None
    """The dollars so far."""
    usd_at_end: float | None = None
    """The dollars at the end: projected, or those that were paid."""
    price_words: str = ""
    """The basis of the dollars."""
    score: float | None = None
    """The model's figure on the test split; None where it was not judged."""
    metric: str = ""
    """The words of that figure, such as NLL."""
    is_passed: bool | None = None
    """Whether the gate was passed; None where none was asked."""
    node_count: int | None = None
    """The nodes that it was launched on last."""
    total_steps: int | None = None
    is_failed: bool = False
    """Whether they could not be read, which may be so for a moment only."""
    live: LiveVerdict | None = None
    """What the next look at a running job settles its verdict with."""


def read_figures(
    rundir: RunDir,
    row: JobRow,
    tier: Tier,
    now: float,
    before: JobFigures | None = None,
    shown: LiveVerdict | None = None,
) -> JobFigures:
    """Return a job's figures. It does not raise: a damaged job has none.

    ``before``: those of the look before, None at the first. ``shown``: the verdict on a running job that another page
    shows now; it is shown here, too.
    """
    if row.state == DAMAGED:
        return JobFigures(verdict=Verdict(words=row.reason[:MOST_WORDS], tone="bad"))
    try:
        return _read(rundir, row, tier, now, shown, before)
    except CANNOT_READ as error:
        words = f"its figures cannot be read: {visible(str(error))}"[:MOST_WORDS]
        return JobFigures(verdict=Verdict(words=words, tone="bad"), is_failed=True)


def _read(
    rundir: RunDir,
    row: JobRow,
    tier: Tier,
    now: float,
    shown: LiveVerdict | None,
    before: JobFigures | None,
) -> JobFigures:
    status, launch = rundir.read_json(STATUS) or {}, rundir.read_json(LAUNCH) or {}
    result, plan = rundir.read_json(RESULT) or {}, rundir.read_json(PLAN)
    report = None if row.running else rundir.read_json(PERFORMANCE_REPORT)
    reported = _diagnosis_of(report)
    is_first_of_running = row.running and before is None
    windows = 0 if reported else KEPT_WINDOWS if row.running else ENDED_WINDOWS
    events = _newest(rundir, windows, wants_evaluation=is_first_of_running)
    if row.running:
        events = sorted([*events, *_hangs_of_others(rundir)], key=lambda event: event["time"])
    view = fold(JobView(), events)
    live = None
    if row.running:
        last = before.live if before else None
        live = shown or settle_verdict(last, diagnose([*view.recent, *view.hang]))
    found = live.shown if live else reported or diagnose(events)
    nodes = rundir.nodes()
    cost = cost_so_far(rundir, nodes, row.running, tier, now, view)
    planned = ((plan or {}).get("work") or {}).get("steps")
    evaluation = rundir.read_json(EVALUATION) if row.state == JobState.SUCCEEDED else None
    metric, score, is_passed = score_in_row(evaluation or {})
    node_count = launch.get("node_count")
    return JobFigures(
        verdict=verdict_of(row, status, result, launch, nodes, found),
        valid_loss=_number(result.get("best_valid_loss"), view.valid_loss, before.valid_loss if before else None),
        usd=cost.usd if cost else None,
        usd_at_end=(cost.usd_at_end if row.running else cost.usd) if cost else None,
        price_words=cost.words if cost else "",
        score=score,
        metric=metric,
        is_passed=is_passed,
        node_count=node_count if isinstance(node_count, int) else None,
        total_steps=planned if isinstance(planned, int) else view.total_steps if row.running else None,
        live=live,
    )


def _newest(rundir: RunDir, windows: int, wants_evaluation: bool = False) -> list[dict[str, Any]]:
    """Return the newest events in order of time: back to so many timings and to a step's loss, as far as there are.
    With ``wants_evaluation`` also the latest evaluation of the validation split, however far back it is."""
    found: list[dict[str, Any]] = []
    has_all, evaluation = False, not wants_evaluation
    most = EVALUATION_FILES if rundir.storage.is_local else REMOTE_EVALUATION_FILES
    for number, events in enumerate(rundir.newest_events(most if wants_evaluation else MOST_FILES), start=1):
        judged = [event for event in events if event["kind"] == "evaluation" and event.get("split") == "valid"]
        found += judged[-1:] if has_all and not evaluation else [] if has_all else events
        evaluation = evaluation or bool(judged)
        timings = sum(event["kind"] == "timing" for event in found)
        is_enough = timings >= windows and any(event["kind"] == "step" for event in found)
        has_all = has_all or is_enough or number >= MOST_FILES
        if has_all and evaluation:
            break
    return sorted((event for event in found if event["kind"] != "node"), key=lambda event: event["time"])


def _hangs_of_others(rundir: RunDir) -> list[dict[str, Any]]:
    """Return what ranks other than 0 have reported last of a hang: rank 0 may be the one that they wait for."""
    newest: dict[str, str] = {}
    for name in sorted(rundir.storage.list(EVENTS)):
        if (match := _OF_RANK.fullmatch(name)) and int(match[1]):
            newest[match[1]] = name
    found: list[dict[str, Any]] = []
    for name in list(newest.values())[:MOST_RANKS]:
        with suppress(*CANNOT_READ):
            found += parse_events(rundir.storage.read_bounded(f"{EVENTS}/{name}", EVENTS_BYTES))[0]
    return [event for event in found if event["kind"] == "hang"]


def _diagnosis_of(report: Any) -> Diagnosis | None:
    """Return the diagnosis in a performance report; None where it is not one of this version."""
    with suppress(KeyError, TypeError, ValueError):
        told = report["diagnosis"]
        return Diagnosis(
            cause=SlowdownCause(told["cause"]),
            share=float(told["share"]),
            evidence=str(told["evidence"]),
            rank=told["rank"],
            node_id=told["node_id"],
        )
    return None


def verdict_of(
    row: JobRow,
    status: Mapping[str, Any],
    result: Mapping[str, Any],
    launch: Mapping[str, Any],
    nodes: Sequence[NodePresence],
    found: Diagnosis,
) -> Verdict:
    """Return what a job's row says of it: why it failed, or what holds its steps up. Pure.

    ``status``, ``result``, ``launch``, ``nodes``: the content of these files of the run directory.
    """
    if row.state == JobState.FAILED:
        return Verdict(words=failure_words(status, result, launch, nodes)[:MOST_WORDS], tone="bad")
    if row.state == JobState.CANCELLED:
        return Verdict(words=_first_line(status.get("message")) or "somebody cancelled it", tone="wait")
    if row.state == JobState.QUEUED:
        return Verdict(words=_first_line(status.get("message")) or "waits for nodes", tone="wait")
    if row.running and (kept := describe_kept(status.get("kept") or ())):
        return Verdict(words="; ".join([*kept, _first_line(status.get("message"))])[:MOST_WORDS], tone="bad")
    if row.running and row.step is None:
        return Verdict(words="waits for its first step")
    if found.cause is SlowdownCause.UNKNOWN:
        return Verdict(words="too few steps were timed to say" if row.running else "")
    if found.cause is SlowdownCause.HEALTHY:
        return Verdict(words=f"nothing {'holds' if row.running else 'held'} the steps up", tone="good")
    share = f", {found.share:.0%} of training time" if found.share >= 0.005 else ""
    words = f"{found.where}{share}: {found.evidence}"[:MOST_WORDS]
    if not row.running:  # nothing can be done about it any more
        return Verdict(words=words)
    return Verdict(words=words, tone="bad" if found.cause is SlowdownCause.HANG else "wait")


def failure_words(
    status: Mapping[str, Any], result: Mapping[str, Any], launch: Mapping[str, Any], nodes: Sequence[NodePresence]
) -> str:
    """Return why a job failed, in one line, as the head of its page says it. Pure."""
    mine = result if result.get("launch") in (None, launch.get("launch")) else {}
    found = describe_failure(JobState.FAILED, status, mine, nodes, {}, "")
    assert found is not None
    title = found.title.removeprefix("failed").removeprefix(": ")
    why = found.cause or found.reason or found.nodes
    if title.startswith("stopped"):
        return f"{title}: {why}" if why else title
    return f"{why} ({title})" if title and why and title not in why else why or title


def _first_line(text: Any) -> str:
    lines = str(text or "").strip().splitlines()
    return visible(redact(lines[0]))[:MOST_WORDS] if lines else ""


def _number(*values: Any) -> float | None:
    """Return the first of these that is a number."""
    return next((float(value) for value in values if is_number(value)), None)

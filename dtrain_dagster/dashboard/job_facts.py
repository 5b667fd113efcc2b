"""What a job's page says besides its curves: failure, settings, result, checkpoints, links, what its dollars bought,
and the verdict on the whole of a job that has ended. Read now and then, not every second; a file that is damaged takes
only its own part of the page away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from dtrain_dagster.clusters.base import OWNER, JobState
from dtrain_dagster.clusters.resume_advice import how_to_go_on
from dtrain_dagster.costs.export import ledger_rows
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.money import SECOND, digits_of, total_shown
from dtrain_dagster.costs.plan import PLAN, probe_usage_of
from dtrain_dagster.costs.prices import PriceError, price_words
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.verdict import describe_goodput, judge_job
from dtrain_dagster.dashboard.cluster_views import cluster_commands
from dtrain_dagster.dashboard.failure import read_failure
from dtrain_dagster.dashboard.job_links import Places, links_of
from dtrain_dagster.dashboard.judged_result import result_of
from dtrain_dagster.jobs.totals import launched_usage
from dtrain_dagster.jobs.view import UNREADABLE
from dtrain_dagster.monitoring.alerts import best, describe_strategy
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose
from dtrain_dagster.monitoring.strategies import strategies
from dtrain_dagster.monitoring.windows import settled, windows
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import DistributedTrainingConfig
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import CHECKPOINTS, EVALUATION, JOB, LAUNCH, LOGS, RESULT, STATUS, RunDir
from trainer.secrets.redaction import redact

MOST_CHARACTERS = 2000
"""The most characters of one value that are shown."""
_NODES = {
    "node_count": "nodes",
    "processes_per_node": "processes per node",
    "sku": "size of the nodes",
    "tier": "tier",
    "engine": "cluster",
    "cluster_name": "name of the cluster",
}
_OF_EVERY_JOB = ("run_dir", "job_id", "schema_version")
"""Parts of ``job.json`` that are no setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetting:
    """A setting of a job, as words."""

    name: str
    """The field as ``--set`` takes it, such as ``training.epochs``; of nodes, words."""
    value: str
    default: str | None = None
    """The default; None where there is none, or where it is the value itself."""
    is_given: bool
    """Whether it differs from the default, or has none."""


def settings_of(job: Mapping[str, Any], launch: Mapping[str, Any] | None) -> list[JobSetting]:
    """Return the settings of a ``job.json`` and of the nodes of its last launch: those that differ from the defaults
    first. Secrets are struck out."""
    found = [*_nodes(launch or {}), *_parts(job), *_training(job.get("training") or {})]
    return sorted(found, key=lambda item: not item.is_given)


def _nodes(launch: Mapping[str, Any]) -> Iterator[JobSetting]:
    is_here = launch.get("engine") == "local"
    for field, words in _NODES.items():
        if launch.get(field) not in (None, "") and not (is_here and field == "cluster_name"):
            name = "size whose price stands in" if is_here and field == "sku" else words
            yield JobSetting(name=name, value=setting_text(launch[field]), is_given=True)


def _parts(job: Mapping[str, Any]) -> Iterator[JobSetting]:
    for part, document in job.items():
        if part == "training" or part in _OF_EVERY_JOB:
            continue
        for name, value in _flat(document, part):
            yield JobSetting(name=name, value=setting_text(value), is_given=part != "tracking")


def _training(given: Mapping[str, Any]) -> Iterator[JobSetting]:
    defaults = asdict(DistributedTrainingConfig())
    for name, value in given.items():
        is_given = name not in defaults or value != defaults[name]
        default = setting_text(defaults[name]) if is_given and name in defaults else None
        yield JobSetting(name=f"training.{name}", value=setting_text(value), default=default, is_given=is_given)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    elif value not in ({}, None, ""):
        yield name, value


def setting_text(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Return the value of a setting as pages show it: one line of at most so many characters, without secrets. Pure."""
    text = redact(value) if isinstance(value, str) else json.dumps(redact(value), ensure_ascii=False)
    text = visible({"null": "none", "true": "yes", "false": "no"}.get(text, text))
    return text if len(text) <= most else f"{text[: most - 1]}…"


MOST = 50
"""The most checkpoints that are read; a job keeps a handful."""

TRACKING = "tracking.json"
T = TypeVar("T")


def read_facts(
    rundir: RunDir, state: str, saved_at: Mapping[int, float], usd: float | None, places: Places
) -> dict[str, Any]:
    """Return the facts of a job in ``state``. ``saved_at``: when each step's checkpoint was saved; ``usd``: what it
    has cost, None where that is not known. ``damaged`` names the parts that cannot be read, and why."""
    damaged: list[str] = []

    def read(what: str, part: Callable[[], T]) -> T | None:
        try:
            return part()
        except (*UNREADABLE, OSError, RecursionError) as error:
            damaged.append(visible(redact(f"{what} cannot be read: {error}")))
            return None

    def document(name: str) -> Mapping[str, Any]:
        found = rundir.read_json(name)
        return found if isinstance(found, Mapping) else {}

    def of_this_launch(name: str) -> Mapping[str, Any]:
        found, launch = document(name), document(LAUNCH)
        return found if not launch or found.get("launch") in (None, launch.get("launch")) else {}

    job_id = rundir.uri.rstrip("/").rpartition("/")[2]
    failure = read(
        "the end",
        lambda: read_failure(
            rundir, state, of_this_launch(STATUS), of_this_launch(RESULT), how_to_go_on(rundir, job_id)
        ),
    )
    settings = read("the settings", lambda: settings_of(redact(document(JOB)), redact(document(LAUNCH))))
    result = read("the result", lambda: result_of(document(EVALUATION), usd))
    checkpoints = read("the checkpoints", lambda: list_checkpoints(rundir, saved_at))
    links = read(
        "the links",
        lambda: links_of(places, document(OWNER), document(JOB), document(TRACKING), document(LAUNCH)),
    )
    commands = read(
        "the cluster's names",
        lambda: cluster_commands(
            places.cluster,
            document(LAUNCH),
            rundir.storage.list(LOGS) if places.cluster.kind == "slurm" else (),  # a listing is paid for elsewhere
            state in ("running", "queued"),
        ),
    )
    return {
        "failure": asdict(failure) if failure else None,
        "settings": [asdict(item) for item in settings or ()],
        "result": asdict(result) if result else None,
        "checkpoints": [asdict(item) for item in checkpoints or ()],
        "links": [asdict(item) for item in links or ()],
        "commands": [asdict(item) for item in commands or ()],
        "damaged": damaged,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that can be resumed from."""

    folder: str
    """In the run directory."""
    step: int
    generation: int
    bytes: int
    saved_at: float | None
    """Unix time; None where no event told it."""
    marks: tuple[str, ...]
    """``latest``: the job resumes from it; ``best``: the model is taken from it."""


def list_checkpoints(rundir: RunDir, saved_at: Mapping[int, float]) -> list[Checkpoint]:
    """Return the complete checkpoints of a job, the newest first. ``saved_at``: the time of each step's save, as far as
    it is known. A damaged one is left out: the trainer does not resume from it either."""
    named = {"latest": _named(rundir, "LATEST.json"), "best": _named(rundir, "BEST.json")}
    found = []
    for name in sorted(rundir.storage.list(CHECKPOINTS), reverse=True)[:MOST]:
        folder = f"{CHECKPOINTS}/{name}"
        manifest = _read(rundir, f"{folder}/manifest.json")
        step, generation, files = (manifest.get(key) for key in ("step", "generation", "files"))
        if not isinstance(step, int) or not isinstance(generation, int) or not isinstance(files, Mapping):
            continue
        sizes = [item.get("bytes") for item in files.values() if isinstance(item, Mapping)]
        found.append(
            Checkpoint(
                folder=folder,
                step=step,
                generation=generation,
                bytes=sum(size for size in sizes if isinstance(size, int)),
                saved_at=saved_at.get(step),
                marks=tuple(mark for mark, path in named.items() if path == folder),
            )
        )
    return sorted(found, key=lambda item: (item.step, item.generation), reverse=True)


def _named(rundir: RunDir, name: str) -> str:
    return str(_read(rundir, f"{CHECKPOINTS}/{name}").get("path") or "")


def _read(rundir: RunDir, name: str) -> Mapping[str, Any]:
    try:
        found = rundir.read_json(name)
    except (DamagedError, OSError):
        return {}
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountRow:
    """A cause that paid time was spent on, in words."""

    cause: str
    meaning: str
    duration: str
    share: float
    """Of the paid node-time, from 0 to 1."""
    usd: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAccount:
    """The ledger of a job as its page shows it, and the verdict on the whole."""

    rows: tuple[AccountRow, ...] = ()
    """The costliest first; none where no price is known."""
    total: str = ""
    lost_usd: float | None = None
    """The dollars of what was lost to failures; None where no price is known."""
    duration: str = ""
    goodput: str = ""
    basis: str
    """What the dollars rest on."""
    estimate: str = ""
    """What was estimated, and how far the bill is from it; "" without an estimate."""
    notes: tuple[str, ...] = ()
    verdict: dict[str, Any] | None
    """The verdict on the whole training, as `describe_diagnosis` returns it; None while the job runs."""


def account_of(
    rundir: RunDir,
    nodes: Sequence[NodePresence],
    state: str,
    default_tier: Tier,
    training: Mapping[str, Any],
    now: float,
) -> JobAccount:
    """Return the account of a job in ``state``, from all of its events but the samples of nodes. It has no rows
    where the price of its nodes is not known."""
    running = state in (JobState.RUNNING, JobState.QUEUED)
    plan, launch = rundir.read_json(PLAN) or {}, rundir.read_json(LAUNCH) or {}
    events = [item for item in rundir.events() if item["kind"] != "node"]
    try:
        usage = launched_usage(nodes, launch, running, now, stale_seconds(rundir.storage))
        tracker = CostTracker("", [*usage, *probe_usage_of(plan)], plan.get("tier", default_tier))
    except (PriceError, ValueError):
        verdict = None if running else describe_diagnosis(diagnose(events), _advice(events, training))
        return JobAccount(basis="no price is known for its nodes", verdict=verdict)
    found = ledger(tracker.nodes, events, running, periods=1)
    causes = found.causes()
    digits = digits_of(found.units)
    rows = [
        AccountRow(
            cause=row["cause"],
            meaning=row["meaning"],
            duration=format_duration(float(row["node_seconds"])),
            share=float(row["percent"]) / 100,
            usd=f"${row['usd']:,}",
        )
        for row in ledger_rows(found, digits)
    ]
    judged = judge_job(events, found)
    verdict = None
    if not running:
        paid = describe_goodput(judged.goodput, state == JobState.SUCCEEDED)
        verdict = describe_diagnosis(judged.diagnosis, _advice(events, training), paid)
    return JobAccount(
        rows=tuple(sorted(rows, key=lambda row: -row.share)),
        lost_usd=causes[CostCause.LOST].usd if CostCause.LOST in causes else 0.0,
        total=f"${total_shown([found.units], digits):,}",
        duration=format_duration(found.microseconds / SECOND),
        goodput=f"{found.goodput:.0%} of the paid node-time was spent in steps that counted",
        basis=plan.get("price_words", price_words(str(launch.get("sku", "")), "history" in launch)),
        estimate=_estimate(plan, tracker, running),
        notes=(*tracker.notes, *found.notes),
        verdict=verdict,
    )


def describe_diagnosis(found: Diagnosis, advice: Sequence[str], of_paid_time: str = "") -> dict[str, Any] | None:
    """Return a diagnosis as the page shows it; None where the records do not tell. ``of_paid_time``: a sentence on what
    took the paid time, for a training that has ended."""
    if found.cause is SlowdownCause.UNKNOWN:
        return None
    share = f", {found.share:.0%} of training time" if found.share >= 0.005 else ""
    return {
        "cause": found.cause,
        "title": f"{found.where}{share}",
        "evidence": f"{found.evidence} {of_paid_time}".strip(),
        "also": [f"{item.where}, {item.share:.0%}: {item.evidence}" for item in found.also],
        "advice": list(advice),
    }


def _advice(events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> list[str]:
    return [describe_strategy(item) for item in best(strategies(settled(windows(events)), events, training))]


def _estimate(plan: Mapping[str, Any], tracker: CostTracker, running: bool) -> str:
    expected = ((plan.get("estimate") or {}).get("usd") or {}).get("expected")
    if not isinstance(expected, int | float) or isinstance(expected, bool) or expected <= 0:
        return ""
    words = f"estimated {dollars(expected)}"
    words += f", and {dollars(tracker.probe_usd)} for the probe" if tracker.probe_usd else ""
    spent = tracker.total_usd - tracker.probe_usd
    return words if running else f"{words}; the training cost {dollars(spent)}, {spent / expected - 1:+.0%}"

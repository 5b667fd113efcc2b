"""What a job's page says besides its curves: failure, settings, result, links, what its dollars bought, and the verdict
on the whole of a job that has ended. Read now and then, not every second; a file that is damaged takes only its own
part of the page away."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from dtrain_dagster.costs.verdict import describe_goodput, goodput
from dtrain_dagster.costs.worth import is_judged, worth_line
from dtrain_dagster.dashboard.failure import read_failure
from dtrain_dagster.jobs.totals import launched_usage
from dtrain_dagster.jobs.view import UNREADABLE
from dtrain_dagster.monitoring.alerts import advise
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.settings.environment import MLFLOW_HERE, Settings
from dtrain_dagster.settings.links import run_page, studio_url
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.printable import visible
from trainer.rundir import EVALUATION, JOB, LAUNCH, RESULT, STATUS, TRACKING, RunDir
from trainer.secrets.redaction import redact

MOST_NOTES = 20
T = TypeVar("T")
_RUN_ID = re.compile(r"[0-9A-Za-z-]{8,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The addresses at which other programs' pages are found, from this orchestrator's own settings; "" for none."""

    dagster_url: str = ""
    mlflow_url: str = ""


NOWHERE = Places()


def places_of(settings: Settings) -> Places:
    """Return where a job can be seen besides the dashboard."""
    return Places(dagster_url=settings.dagster_url.rstrip("/"), mlflow_url=settings.mlflow_page)


def facts_of_page(rundir: RunDir, state: str, usd: float | None, places: Places) -> dict[str, Any]:
    """Return the facts of a job in ``state``, and under ``damaged`` what cannot be read. ``usd``: its cost."""
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
    links = read(
        "the links",
        lambda: links_of(places, document(OWNER), document(JOB), document(TRACKING), document(LAUNCH)),
    )
    return {
        "failure": asdict(failure) if failure else None,
        "settings": read("the settings", lambda: settings_text(document(JOB), document(LAUNCH))),
        "result": read("the result", lambda: result_in_words(document(EVALUATION), usd)),
        "links": links or [],
        "damaged": damaged,
    }


def links_of(
    places: Places,
    owner: Mapping[str, Any],
    job: Mapping[str, Any],
    tracking: Mapping[str, Any],
    launch: Mapping[str, Any],
) -> list[dict[str, str]]:
    """Return ``label``, ``url`` and ``note`` (what has to run for the page to be there) of each page of another program
    about a job, from the contents of four files of its run directory, empty where missing. These may hold anything, so
    no address is taken from them but one of a service that is known by its name. Pure."""
    tags = (job.get("tracking") or {}).get("tags") or {}
    dagster_run = _run_id(owner.get("dagster_run_id") or tags.get("dagster_run_id"))
    is_served_here = places.mlflow_url == MLFLOW_HERE
    found = [
        ("Dagster run", places.dagster_url and dagster_run and f"{places.dagster_url}/runs/{dagster_run}",
         "`dtrain ui` serves it"),
        ("MLflow run", run_page(places.mlflow_url, _run_id(tracking.get("mlflow_run_id"))),
         "`dtrain ui mlflow` serves it" if is_served_here else ""),
        ("Azure ML studio", studio_url(launch.get("studio_url")), ""),
    ]  # fmt: skip
    return [{"label": label, "url": url, "note": note} for label, url, note in found if url]


def _run_id(value: Any) -> str:
    return value if isinstance(value, str) and _RUN_ID.fullmatch(value) else ""


def settings_text(job: Mapping[str, Any], launch: Mapping[str, Any]) -> str:
    """Return a job and the nodes of its last launch as text of many lines, without secrets. Pure."""
    text = json.dumps({"job": redact(job), "launch": redact(launch)}, indent=2, ensure_ascii=False)
    return visible(text, keep_lines=True)


def result_in_words(evaluation: Mapping[str, Any], usd: float | None) -> list[str]:
    """Return what an ``evaluation.json`` says of the model: verdict of the gate, worth, notes; nothing without a
    verdict. The figures beside those of baselines are in the report on the model, and in MLflow. Pure."""
    gate = evaluation.get("gate") or {}
    if not gate or not is_judged(evaluation):
        return []
    reasons = "; ".join(map(str, gate.get("reasons") or ("no reason given",)))
    verdict = "The gate was passed" if gate.get("passed") else f"The gate was not passed: {reasons}"
    worth = worth_line(evaluation, usd)
    notes = [*([f"Worth its cost? {worth[0].upper()}{worth[1:]}"] if worth else []), *evaluation.get("notes", ())]
    return [visible(str(line)) for line in (verdict, *notes[:MOST_NOTES])]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAccount:
    """The ledger of a job as its page shows it, and the verdict on the whole."""

    rows: tuple[dict[str, Any], ...] = ()
    """What paid time was spent on, in words, the costliest first; none where no price is known. ``share``: of the paid
    node-time, from 0 to 1."""
    total: str = ""
    lost_usd: float | None = None
    """The dollars of what was lost to failures; None where no price is known."""
    duration: str = ""
    basis: str
    """What the dollars rest on."""
    notes: tuple[str, ...] = ()
    """Sentences below the rows: the goodput, how far the bill is from the estimate, what is not exact."""
    verdict: dict[str, Any] | None
    """The verdict on the whole training, as `describe_diagnosis` returns it; None while the job runs."""


def trackers_of(
    rundir: RunDir,
    nodes: Sequence[NodePresence],
    launch: Mapping[str, Any],
    plan: Mapping[str, Any],
    running: bool,
    default_tier: Tier,
    now: float,
) -> tuple[CostTracker, CostTracker]:
    """Return what its own nodes cost so far, and with its probes. Raise `PriceError` or ValueError where unknown."""
    usage = launched_usage(nodes, launch, running, now, stale_seconds(rundir.storage))
    tier = plan.get("tier", default_tier)
    return CostTracker("", usage, tier), CostTracker("", [*usage, *probe_usage_of(plan)], tier)


def basis_of(plan: Mapping[str, Any], launch: Mapping[str, Any]) -> str:
    """Return what the dollars of a job rest on, in words. Pure."""
    return str(plan.get("price_words") or price_words(str(launch.get("sku", "")), "history" in launch))


def account_of(
    rundir: RunDir,
    nodes: Sequence[NodePresence],
    state: str,
    default_tier: Tier,
    training: Mapping[str, Any],
    now: float,
) -> JobAccount:
    """Return the account of a job, from its events; without rows where the price of its nodes is not known."""
    running = state in (JobState.RUNNING, JobState.QUEUED)
    plan, launch = rundir.read_json(PLAN) or {}, rundir.read_json(LAUNCH) or {}
    events = [item for item in rundir.events() if item["kind"] != "node"]
    tracker = found = None
    with suppress(PriceError, ValueError):
        _, tracker = trackers_of(rundir, nodes, launch, plan, running, default_tier, now)
    if tracker is not None:
        found = ledger(tracker.nodes, events, running)
    paid = "" if found is None else describe_goodput(goodput(found), state == JobState.SUCCEEDED)
    verdict = None if running else describe_diagnosis(diagnose(events), advise(events, training), paid)
    if tracker is None or found is None:
        return JobAccount(basis="no price is known for its nodes", verdict=verdict)
    causes, digits = found.causes(), digits_of(found.units)
    rows = [
        {
            "cause": row["cause"],
            "meaning": row["meaning"],
            "duration": format_duration(float(row["node_seconds"])),
            "share": float(row["percent"]) / 100,
            "usd": f"${row['usd']:,}",
        }
        for row in ledger_rows(found, digits)
    ]
    of_goodput = f"{found.goodput:.0%} of the paid node-time was spent in steps that counted"
    return JobAccount(
        rows=tuple(sorted(rows, key=lambda row: -row["share"])),
        lost_usd=causes[CostCause.LOST].usd if CostCause.LOST in causes else 0.0,
        total=f"${total_shown([found.units], digits):,}",
        duration=format_duration(found.microseconds / SECOND),
        basis=basis_of(plan, launch),
        notes=tuple(filter(None, (of_goodput, _estimate(plan, tracker, running), *tracker.notes, *found.notes))),
        verdict=verdict,
    )


def describe_diagnosis(found: Diagnosis, advice: Sequence[str], of_paid_time: str = "") -> dict[str, Any] | None:
    """Return a diagnosis as the page shows it, without secrets, or None. ``of_paid_time``: a sentence on what took the
    paid time."""
    if found.cause is SlowdownCause.UNKNOWN:
        return None
    share = f", {found.share:.0%} of training time" if found.share >= 0.005 else ""
    told: dict[str, Any] = {
        "cause": found.cause,
        "title": f"{found.where}{share}",
        "evidence": f"{found.evidence} {of_paid_time}".strip(),
        "also": [f"{item.where}, {item.share:.0%}: {item.evidence}" for item in found.also],
        "advice": list(advice),
    }
    return {name: redact(words) for name, words in told.items()}


def _estimate(plan: Mapping[str, Any], tracker: CostTracker, running: bool) -> str:
    expected = ((plan.get("estimate") or {}).get("usd") or {}).get("expected")
    if not isinstance(expected, int | float) or isinstance(expected, bool) or expected <= 0:
        return ""
    words = f"estimated {dollars(expected)}"
    words += f", and {dollars(tracker.probe_usd)} for the probe" if tracker.probe_usd else ""
    spent = tracker.total_usd - tracker.probe_usd
    return words if running else f"{words}; the training cost {dollars(spent)}, {spent / expected - 1:+.0%}"

"""Past runs as evidence for a planned training, of a Dagster instance or of a home: how long they took, and how good
their estimates were."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.costs.estimate import PRIOR_SPREAD, Basis, Forecast, Interval, LearnedCorrection, Measured, Sizes
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.prices import hardware_of
from dtrain_dagster.jobs.orders import latest_orders
from dtrain_dagster.planning.build_plan import pace_mark
from dtrain_dagster.planning.measured import read_measured
from dtrain_dagster.planning.probe import PastProbe
from dtrain_dagster.planning.scoring import MOST_RUNS, PRIOR_RUNS, Score, learn
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from trainer.config import JobConfig
from trainer.rundir import LAUNCH, RESULT, RunDir

if TYPE_CHECKING:
    import dagster as dg

LOOK_BACK = 60
"""Number of the latest materializations of an asset that are read."""
MOST_READ = 5
"""Run directories of each SKU whose events are read: a long training has many events."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCourse:
    """The incidents between a job's start and its end."""

    launches: int
    replaced_nodes: int
    generations: int
    """Number of generations that it trained with, one after the other."""

    @classmethod
    def read(cls, rundir: RunDir) -> JobCourse:
        nodes = rundir.nodes()
        return cls(
            launches=max((node.launch for node in nodes), default=1),
            replaced_nodes=sum(node.incarnation > 1 for node in nodes),
            generations=rundir.last_generation(),
        )

    @property
    def disturbed(self) -> str:
        """Return the incidents in words; "" for a job without any."""
        said = [f"it was started {self.launches} times"] if self.launches > 1 else []
        said += [f"{self.replaced_nodes} node(s) were replaced"] if self.replaced_nodes else []
        said += [f"nodes were lost or joined, {self.generations} generations in all"] if self.generations > 1 else []
        return "; ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A training that finished, whose run directory is still there."""

    job_id: str
    sku: str
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What an instance knows that bears on one training."""

    fingerprint: str
    runs: tuple[PastRun, ...]
    scores: tuple[Score, ...]
    probes: tuple[PastProbe, ...] = ()

    @classmethod
    def read(
        cls,
        instance: dg.DagsterInstance,
        fingerprint: str,
        pace: str,
        sku: str,
        keeps_cache: bool,
        names: GraphNames = STOCK_NAMES,
    ) -> History:
        return cls(
            fingerprint=fingerprint,
            runs=tuple(past_runs(instance, pace, sku, keeps_cache, names)),
            scores=tuple(past_scores(instance, names)),
            probes=tuple(past_probes(instance, names)),
        )

    def learned(self, basis: Basis, sku: str) -> LearnedCorrection:
        return learn(self.scores, basis, sku)

    def forecast(self, sizes: Sizes, node_count: int, sku: str) -> Forecast | None:
        """Return the best forecast from past runs, None where there are none."""
        totals = [
            score.actual_seconds
            for score in self.scores
            if (score.fingerprint, score.sku) == (self.fingerprint, sku) and not score.disturbed
        ]
        return from_history(self.runs, totals, sizes, node_count, sku, self.learned("history", sku))


def past_runs(
    instance: dg.DagsterInstance, pace: str, sku: str, keeps_cache: bool, names: GraphNames = STOCK_NAMES
) -> list[PastRun]:
    """Return the latest runs of the same pace, the newest first, that lost no node and did not start again: as many as
    are wanted on this SKU, and those on others that are newer."""
    made = _materializations(instance, names.key("trained_checkpoint"))
    folders = (RunDir(str(said["run_dir"])) for _, _, said in made if "run_dir" in said)
    return _usable(folders, keeps_cache, lambda plan: bool(plan) and plan.get("pace") == pace, sku)


class HomeHistory:
    """Past runs of a home, by its latest orders, as evidence for a training that no Dagster asset plans."""

    def __init__(self, home: Path, processes_per_node: int, sku: str, shares_machine: bool) -> None:
        """``sku``: the wanted one, and that of runs that name none. ``shares_machine``: whether all nodes are this
        machine, which keeps what was unpacked for the next run."""
        self.processes_per_node, self.sku, self.shares_machine = processes_per_node, sku, shares_machine
        self._orders = [(self._mark(job), job) for job in latest_orders(home, LOOK_BACK)]
        self._runs: dict[str, list[PastRun]] = {}

    def forecasts(self, job: JobConfig, sizes: Sizes) -> dict[str, Forecast]:
        """Return SKU → what past runs of the same pace and global batch tell of a job there, on the nodes of the latest
        of them."""
        sizes, found = replace(sizes, stated_ranks=job.training.world_size), dict[str, Forecast]()
        for run in self.runs_like(job):
            if run.sku in found:
                continue
            nodes = run.measured.node_count
            if told := from_history(self.runs_like(job), (), sizes, nodes, run.sku, LearnedCorrection()):
                found[run.sku] = told
        return found

    def runs_like(self, job: JobConfig) -> list[PastRun]:
        """Return the latest runs of the same pace and global batch, as `past_runs` does."""
        mark = self._mark(job)
        if mark not in self._runs:
            folders = (RunDir(order.run_dir) for its, order in self._orders if its == mark)
            self._runs[mark] = _usable(folders, self.shares_machine, lambda plan: True, self.sku)
        return self._runs[mark]

    def _mark(self, job: JobConfig) -> str:
        return f"{pace_mark(job, self.processes_per_node)}-w{job.training.world_size}"


def _usable(
    folders: Iterable[RunDir], keeps_cache: bool, is_wanted: Callable[[Mapping[str, Any]], bool], sku: str
) -> list[PastRun]:
    """Return the first `MOST_READ` runs on this SKU that can be learned from, and at most as many on each other before
    them. ``is_wanted``: by their plan."""
    found: list[PastRun] = []
    read = Counter[str]()
    for rundir in folders:
        if read[sku] == MOST_READ:
            break
        try:
            plan, result = rundir.read_json(PLAN) or {}, rundir.read_json(RESULT)
            if not is_wanted(plan) or not result or result["status"] != "succeeded" or JobCourse.read(rundir).disturbed:
                continue
            its_sku = hardware_of((rundir.read_json(LAUNCH) or {}).get("sku", plan.get("sku", sku))).sku
            if read[its_sku] == MOST_READ:
                continue
            nodes = rundir.nodes()
            count, batch = len({node.node_id for node in nodes}), rundir.read_job().training.global_batch_size
            run = PastRun(
                job_id=rundir.uri.rsplit("/", 1)[-1],
                sku=its_sku,
                measured=read_measured(list(rundir.events()), nodes, count, batch, keeps_cache),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info("the run directory %s cannot be used: %r", rundir.uri, error)
            continue
        found.append(run)
        read[its_sku] += 1
    return found


def past_probes(instance: dg.DagsterInstance, names: GraphNames = STOCK_NAMES) -> list[PastProbe]:
    """Return the probes of any training that plans of this instance rested on, the newest first."""
    found: dict[str, PastProbe] = {}
    for _, _, said in _materializations(instance, names.key("cost_estimate")):
        for item in said.get("probes") or ():
            with suppress(KeyError, TypeError):
                found.setdefault(item["job_id"], PastProbe(**item))
    return list(found.values())


def past_scores(instance: dg.DagsterInstance, names: GraphNames = STOCK_NAMES) -> list[Score]:
    """Return the scores of finished runs, the oldest first: for each job the last one of `cost_breakdown`."""
    latest: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for at, _, said in _materializations(instance, names.key("cost_breakdown")):
        latest.setdefault(str(said.get("job_id")), (at, said))
    scores = (score_of(at, said) for at, said in latest.values())
    return [score for score in scores if isinstance(score, Score)][:MOST_RUNS][::-1]


def latest_score(
    instance: dg.DagsterInstance, run_id: str, names: GraphNames = STOCK_NAMES
) -> tuple[str, Score | str] | None:
    """Return the id of the job of the last `cost_breakdown`, in this Dagster run if it made one, with its score or why
    it has none. None where there never was a breakdown."""
    told = _materializations(instance, names.key("cost_breakdown"))
    if not told:
        return None
    at, _, said = next((item for item in told if item[1] == run_id), told[0])
    return str(said.get("job_id", "unknown")), score_of(at, said)


def score_of(at: float, said: Mapping[str, Any]) -> Score | str:
    """Return the score from the metadata of a breakdown, or in words why there is none."""
    try:
        ran, planned = (said["sku"], said["tier"]), (said["planned_sku"], said["planned_tier"])
        if not said["wall_seconds"]:
            return "no record says when its nodes were there"
        if ran != planned:
            return "it ran on {} ({}), and the estimate was for {} ({})".format(*ran, *planned)
        usd = Interval(low=said["estimated_low_usd"], expected=said["estimated_usd"], high=said["estimated_high_usd"])
        if not (usd.expected > 0 and said["estimated_seconds"] > 0):
            return "its estimate is too small to be compared with"
        course = JobCourse(**{item.name: said[item.name] for item in fields(JobCourse)})
        return Score(
            at=at,
            job_id=said["job_id"],
            fingerprint=str(said.get("fingerprint")),
            basis=said["basis"],
            sku=said["sku"],
            seconds=usd.scaled(said["estimated_seconds"] / usd.expected),
            usd=usd,
            actual_seconds=said["wall_seconds"],
            actual_usd=said.get("training_usd", said["total_usd"]),
            learned_factor=said["learned_factor"],
            disturbed=course.disturbed,
        )
    except (KeyError, TypeError) as error:
        return f"its cost_breakdown lacks something, like one of an older version ({error!r}): materialize it again"


def from_history(
    runs: Sequence[PastRun],
    totals: Sequence[float],
    sizes: Sizes,
    node_count: int,
    sku: str,
    learned: LearnedCorrection,
) -> Forecast | None:
    """Return the best forecast from past runs on this SKU, None where there are none. ``runs``: of the same pace, the
    newest first. ``totals``: wall seconds of exactly this training on this SKU, whether or not their folders still
    exist."""
    same = [run for run in runs if run.sku == sku]
    exactly = f"{len(totals)} past run(s) of exactly this training"
    if totals and not any(run.measured.node_count == node_count for run in same):
        step_seconds, words, jobs = totals[-1] / sizes.work(node_count).steps, exactly, tuple[str, ...]()
        lump = Measured(node_count=node_count, startup_seconds=0.0, step_seconds=step_seconds)
        measured: tuple[Measured, ...] = (lump,)
        spread = spread_of_runs(totals)
    elif same:
        measured, jobs = _newest_of_each_count(same, node_count)
        count = measured[0].node_count
        words = f"{len(same)} past run(s) at the same pace, the latest {same[0].job_id}"
        words += "" if count == node_count else f", on {count} node(s) instead of {node_count}"
        words = exactly if totals else words
        paces = [run.measured.step_seconds for run in same if run.measured.node_count == count]
        spread = max(spread_of_runs(totals), spread_of_runs(paces))
    else:
        return None
    return Forecast(
        measured=measured,
        sizes=sizes,
        basis="history",
        basis_words=words,
        learned=learned,
        rests_on=jobs,
        totals=tuple(totals),
        run_spread=spread,
    )


def spread_of_runs(seconds: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm of the next of these times, shrunk towards `PRIOR_SPREAD`; 0 for
    fewer than two."""
    if len(seconds) < 2 or min(seconds) <= 0:
        return 0.0
    logs = [math.log(value) for value in seconds]
    middle = statistics.fmean(logs)
    known = PRIOR_RUNS + len(logs) - 1
    squares = PRIOR_RUNS * PRIOR_SPREAD**2 + sum((value - middle) ** 2 for value in logs)
    return math.sqrt(squares / known * (1 + 1 / len(logs)))


def knows(forecast: Forecast | None, node_count: int) -> bool:
    """Return whether the forecast rests on past runs on exactly these nodes, so that a probe would tell nothing new."""
    return forecast is not None and forecast.measured[0].node_count == node_count


def _newest_of_each_count(runs: Sequence[PastRun], planned: int) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """Return what one run for each node count took, and its job; that of the nearest to the planned comes first."""
    newest: dict[int, PastRun] = {}
    for run in runs:
        newest.setdefault(run.measured.node_count, run)
    found = sorted(newest.values(), key=lambda run: abs(run.measured.node_count - planned))
    return tuple(run.measured for run in found), tuple(run.job_id for run in found)


def _materializations(instance: dg.DagsterInstance, asset: dg.AssetKey) -> list[tuple[float, str, dict[str, Any]]]:
    """Return (when, Dagster run, metadata) of an asset's latest materializations, the newest first."""
    from dtrain_dagster.support.page_entries import read_entries  # not above: loads Dagster

    records = instance.fetch_materializations(asset, limit=LOOK_BACK).records
    return [
        (record.timestamp, record.run_id, read_entries(made.metadata))
        for record in records
        if (made := record.asset_materialization) is not None
    ]

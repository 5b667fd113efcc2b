"""A search from its request to its result: checked, its trial measured, its trials run by a fleet, its result kept.

Whoever begins a search of a name that is there continues it: nothing is bought twice.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.base import GPUClusterManager
from dtrain_dagster.clusters.notices import RETRIES, send_once
from dtrain_dagster.clusters.notices import SEARCH as SEARCH_PART
from dtrain_dagster.costs.estimate import LearnedCorrection, Parts, Sizes
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.runner import FleetRunner
from dtrain_dagster.planning.build_plan import pace_mark, sizes_of
from dtrain_dagster.planning.evidence import forecast_from_probe
from dtrain_dagster.search.results import (
    BEST,
    RESULT,
    SEARCH,
    kept_search,
    result_document,
    search_folder,
    settings_document,
    summary,
    trial_line,
)
from dtrain_dagster.search.script import SearchedScript
from dtrain_dagster.search.source import TrialSource
from dtrain_dagster.search.space import SpaceError, count_trials, job_of_trial, parse_space
from dtrain_dagster.search.trials import REDUCTION, Pruner, SearchSettings, TrialSeconds
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import JobConfig
from trainer.documents.places import PlaceError, checked_id
from trainer.errors import ConfigError
from trainer.rundir import RunDir
from trainer.runtime.launch import with_order
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from dtrain_dagster.search.tracking import SearchTracker

UNASKED = 2.0
"""Times what its trials cost to their ends that a search may cost to which nobody gave a budget."""
MARGIN_SECONDS = 30.0
"""Seconds for which each node of a trial may be paid after it has come to its limit, see `FleetLimits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What is searched, and by which means."""

    name: str
    space: Mapping[str, Any]
    """Plain data, see `dtrain_dagster.search.space`."""
    settings: SearchSettings
    base: JobConfig
    """The job that is varied. Its world size may be that of more nodes than a trial has: its batches stay the same."""
    samples: Mapping[str, int]
    """Samples of each split."""
    budget_usd: float | None
    """Dollars that all trials may cost together, with the measurement before them; None: see `Search.budget_usd`."""
    nodes: int
    """Nodes of all trials at once."""
    nodes_per_trial: int = 1
    processes_per_node: int = 1
    usd_per_node_hour: float
    tier: Tier = "dedicated"
    script: SearchedScript | None = None
    """The script that ``base`` is a training of; None: it has a dataset."""

    def __post_init__(self) -> None:
        try:
            checked_id(self.name, "the name of the search")
        except PlaceError as error:
            raise SpaceError(str(error)) from None
        if not 1 <= self.nodes_per_trial <= self.nodes:
            raise SpaceError(
                f"a trial has {self.nodes_per_trial} nodes of {self.nodes}: it needs at least 1, and has at most all"
            )
        if self.budget_usd is not None and not self.budget_usd > 0:
            raise SpaceError(f"budget_usd = {self.budget_usd:g}: give the dollars that all trials may cost together")

    @property
    def at_once(self) -> int:
        """Return the nodes that work at the same time."""
        return min(self.settings.parallel * self.nodes_per_trial, self.nodes)

    def count_trials(self) -> int:
        """Return the most trials that it can have: no more than there are combinations of values."""
        return int(min(self.settings.trials, count_trials(parse_space(self.space))))

    def described(self) -> dict[str, Any]:
        """Return all that decides which trials the search has."""
        job = json.loads(self.base.to_json())
        kept = {name: job[name] for name in ("dataset", "model", "loss", "training")}
        kept["training"] |= {"max_node_seconds": None}
        of_script = {} if self.script is None else {"script": self.script.described()}
        return {"space": dict(self.space), "job": kept, **of_script, **self.settings.decisive()}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a trial takes, and how that was found out."""

    expected: TrialSeconds
    usd: float = 0.0
    """Dollars of the jobs that it was found out by."""
    job_ids: tuple[str, ...] = ()


class Search:
    """One search on a cluster. Make it with `open_search`."""

    def __init__(
        self,
        home: Path,
        request: SearchRequest,
        manager: GPUClusterManager,
        env: Mapping[str, str],
        measured: Measured,
        told: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        """``told`` is called with what its fleet tells."""
        self.request, self.expected, self.before_usd = request, measured.expected, measured.usd
        self.folder = search_folder(home, request.name)
        self.trials = request.count_trials()
        """The most trials that it can have."""
        price, settings = request.usd_per_node_hour, replace(request.settings, trials=self.trials)
        self.plan = plan_search(settings, self.expected, price, request.at_once, request.budget_usd)
        self._home, self._manager, self._env, self._told = home, manager, env, told
        self._storage = open_storage(str(self.folder))

    def run(
        self,
        tell: Callable[[str], object],
        watch: Callable[[], object] = lambda: None,
        tracker: SearchTracker | None = None,
    ) -> dict[str, Any]:
        """Run the search, or go on with it, until it is over, and return its result (`result_of`). ``tell`` is called
        with a sentence on each trial that is over, and on what keeps ``tracker`` from writing to MLflow; ``watch``
        after each look. Raise `FleetError` where another process runs it."""
        request = self.request
        source = TrialSource(parse_space(request.space), request.settings, self._make_job)
        fleet = FleetRecords(self._home, request.name)
        env = with_order(self._env, part_of=SEARCH_PART)
        said: set[str] = set()

        def look(total_usd: float | None = None) -> None:
            lines = [trial_line(trial, request.settings.sign) for trial in source.trials if trial.state.is_final]
            lines += filter(None, [tracker.write(source.trials, total_usd) if tracker else ""])
            for line in lines:
                if line not in said:
                    said.add(line)
                    tell(line)
            watch()

        with fleet.sole_orchestrator():
            fleet.forget_cancellation()
            fleet.write_limits(self.limits(), time.time())
            runner = FleetRunner(
                self._manager, fleet, source, self._told,
                processes_per_node=request.processes_per_node, env=env, tier=request.tier,
            )  # fmt: skip
            runner.run(look)
        result = self.result_of(source)
        self._storage.write(RESULT, json.dumps(result, indent=1).encode())
        if source.best is not None and request.script is None:
            document = settings_document(request.name, request.settings, source.best, request.base)
            self._storage.write(BEST, json.dumps(document, indent=2, sort_keys=True).encode())
        look(result["usd"])
        if not fleet.is_cancelled():  # somebody knows already, and may go on with it
            self._tell_end(result)
        return result

    def _make_job(self, number: int, values: Mapping[str, Any]) -> tuple[FleetJob, int]:
        """Return the job of a trial, and how often it is evaluated if it goes to its end."""
        request, script, usual = self.request, self.request.script, self.expected
        job_id = trial_id(request.name, number)
        base = replace(request.base, job_id=job_id, run_dir=f"{request.base.run_dir.rpartition('/')[0]}/{job_id}")
        make = script.job_of if script else job_of_trial
        try:
            job = make(base, values, f"trial {number}")
            of = max(1, trial_sizes(request, job, None).work(request.nodes_per_trial).evaluations)
        except ConfigError as error:
            return FleetJob(job_id=job_id, node_seconds=1.0, problem=f"no training: {error}"), 1
        return FleetJob(
            job_id=job_id,
            nodes=request.nodes_per_trial,
            node_seconds=max(1.0, usual.evaluation * of + usual.finish),
            startup_seconds=usual.startup / request.nodes_per_trial,
            config=job,
            command=script.command(values) if script else None,
        ), of

    def _tell_end(self, result: Mapping[str, Any]) -> None:
        """Tell people once that the search has ended; trials are not told one by one. It never raises."""
        folder = RunDir(str(self.folder))
        title, text = f"dtrain: search {result['name']} has ended", "\n".join(summary(result))
        mark = f"end-{len(result['trials'])}"  # it may be given more trials later
        send_once(folder, lambda: (mark, title, text), RETRIES)

    @property
    def budget_usd(self) -> float:
        """Return the dollars that all may cost together; without a budget `UNASKED` times what its trials cost to their
        ends, with what each may be paid after it has come to its limit."""
        request = self.request
        if request.budget_usd is not None:
            return request.budget_usd
        after = MARGIN_SECONDS * request.at_once * request.usd_per_node_hour / 3600
        return self.before_usd + UNASKED * self.plan.trial_usd * self.trials + after

    def limits(self) -> FleetLimits:
        """Return the limits of its fleet. Raise `SpaceError` where the measurement has used the budget up."""
        request = self.request
        left = self.budget_usd - self.before_usd
        if left <= 0:
            raise SpaceError(
                f"budget_usd = {self.budget_usd:g}: measuring a trial has cost {self.before_usd:.2g} dollars; give more"
            )
        return FleetLimits(
            budget_usd=left,
            nodes=request.nodes,
            usd_per_node_hour=request.usd_per_node_hour,
            margin_seconds=MARGIN_SECONDS,
        )

    def result_of(self, source: TrialSource) -> dict[str, Any]:
        """Return the result as plain data: of a script with the command that trains with the best values, else with
        their file of settings."""
        request, best, script = self.request, source.best, self.request.script
        more = {
            "name": request.name,
            "dataset_id": request.base.dataset.dataset_id,
            "pruner": str(request.settings.pruner),
            "sampler": str(request.settings.sampler),
            "seed": request.settings.seed,
            "budget_usd": self.budget_usd,
            "planned": {"at_most_usd": self.plan.at_most_usd, "expected_usd": self.plan.expected_usd},
            "settings_file": f"{self.folder}/{BEST}" if best and not script else None,
            "command": script.words(best.values) if best and script else None,
        }
        return result_document(source.trials, request.settings, self.before_usd, more)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlan:
    """What a search costs at most, and what it is expected to cost; said beforehand."""

    trial_usd: float
    """A trial that is trained to its end."""
    at_most_usd: float
    expected_usd: float
    seconds: float
    """Expected seconds to the last trial."""
    lines: tuple[str, ...]
    """The same in sentences."""


def plan_search(
    settings: SearchSettings, usual: TrialSeconds, usd_per_node_hour: float, at_once: int, budget_usd: float | None
) -> SearchPlan:
    """Return the plan. ``usual``: what a trial takes; ``at_once``: nodes that work at the same time."""
    whole = usual.total * usd_per_node_hour / 3600
    most = settings.trials * whole
    share, basis = 1.0, "no trial is ended early"
    if settings.pruner is Pruner.asha:
        fixed = (usual.startup + usual.finish) / usual.total
        share, basis = fixed + (1 - fixed) * halving_share(usual.of), "as successive halving ends trials"
    limit = math.inf if budget_usd is None else budget_usd
    expected = min(limit, share * most)
    seconds = share * settings.trials * usual.total / max(1, at_once)
    capped = f", and never above the budget of {dollars(limit)}" if limit < most else ""
    lines = [
        f"{settings.trials} trials of {usual.of} evaluation(s); one that goes to its end takes "
        f"{format_duration(usual.total)} of node time, {dollars(whole)}",
        f"at most {dollars(min(limit, most))}{capped}; expected {dollars(expected)} ({basis}), in about "
        f"{format_duration(seconds)}",
    ]
    return SearchPlan(
        trial_usd=whole, at_most_usd=min(limit, most), expected_usd=expected, seconds=seconds, lines=tuple(lines)
    )


def halving_share(of: int) -> float:
    """Return the share of all evaluations that successive halving does, where scores say nothing of each other."""
    alive, done, rung = 1.0, 0.0, 1
    for number in range(1, of + 1):
        done += alive
        if number == rung and number < of:
            alive, rung = alive / REDUCTION, rung * REDUCTION
    return done / of


def trial_id(search: str, number: int) -> str:
    """Return the id of the job of a trial."""
    return f"{search}-{number:04d}"


def open_search(
    home: Path,
    request: SearchRequest,
    manager: GPUClusterManager,
    env: Mapping[str, str],
    measure: Callable[[], Measured],
    told: Callable[[str], object] = lambda sentence: None,
) -> Search:
    """Return a search, begun now or before. ``measure`` says what a trial takes; it is called once in the life of a
    search. Raise `SpaceError` where the one of this name was begun with something else."""
    kept, described = kept_search(home, request.name), request.described()
    described = json.loads(json.dumps(described))
    if kept is None:
        found = measure()
        document = {
            "name": request.name,
            "described": described,
            "expected": asdict(found.expected),
            "before_usd": found.usd,
            "measured_by": found.job_ids,
            "began_at": time.time(),
        }
        open_storage(str(search_folder(home, request.name))).write(SEARCH, json.dumps(document, indent=1).encode())
        return Search(home, request, manager, env, found, told)
    before = kept["described"]
    if before != described:
        differs = sorted(name for name in before.keys() | described.keys() if before.get(name) != described.get(name))
        raise SpaceError(
            f"search {request.name} was begun with another {', '.join(differs)}: repeat it as it was, or choose "
            "another name"
        )
    return Search(home, request, manager, env, Measured(TrialSeconds(**kept["expected"]), kept["before_usd"]), told)


def measure_trial(
    manager: GPUClusterManager,
    request: SearchRequest,
    env: Mapping[str, str],
    is_this_machine: bool,
    told: Callable[[str], object] = lambda sentence: None,
) -> Measured:
    """Return what a trial takes, by a probe, as a plan runs one, on the least nodes of a trial. Raise as
    `dtrain_dagster.planning.evidence.run_probe` does."""
    nodes, ranks = request.nodes_per_trial, request.processes_per_node
    sizes = trial_sizes(request, request.base, os.cpu_count() if is_this_machine else None)
    digest, command = ("", None) if request.script is None else (request.script.digest, request.script.command({}))
    mark = f"{pace_mark(request.base, ranks, digest)}-w{request.base.training.world_size}-{request.name}"
    most = None if request.budget_usd is None else request.budget_usd / request.usd_per_node_hour * 3600
    found = forecast_from_probe(
        manager,
        request.base,
        sizes,
        nodes,
        mark,
        dict(env),
        LearnedCorrection(),
        told,
        most=most,
        command=command,
    )
    usage = [item for job_id in found.rests_on for item in manager.node_usage(job_id)]
    usd = CostTracker("", usage, request.tier).total_usd
    expected = seconds_of_parts(found.parts(nodes), nodes, sizes.work(nodes).evaluations)
    return Measured(expected, usd, tuple(found.rests_on))


def seconds_of_parts(parts: Parts, nodes: int, evaluations: int) -> TrialSeconds:
    """Return the node-seconds of a trial from the seconds of its phases on this many nodes. Pure."""
    return TrialSeconds(
        startup=nodes * parts.startup,
        training=nodes * (parts.steps + parts.evaluation + parts.checkpoint),
        of=max(1, evaluations),
        finish=nodes * parts.finish,
    )


def trial_sizes(request: SearchRequest, job: JobConfig, cores: int | None) -> Sizes:
    """Return how much the job of a trial has to do. ``cores``: of the one machine of all nodes, see `Sizes`."""
    sizes = sizes_of(job, request.samples, request.processes_per_node, cores)
    return replace(sizes, stated_ranks=job.training.world_size)

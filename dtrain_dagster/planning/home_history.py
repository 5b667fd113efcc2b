"""Past runs of a home as evidence for a training that no Dagster asset plans. They are found by this home's orders,
whoever gave them: Dagster, a shell, a search or a fleet."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from dtrain_dagster.costs.estimate import Forecast, LearnedCorrection, Sizes
from dtrain_dagster.costs.prices import hardware_of
from dtrain_dagster.jobs.orders import latest_orders
from dtrain_dagster.planning.history import LOOK_BACK, MOST_READ, JobCourse, PastRun, from_history, pace_mark
from dtrain_dagster.planning.probe import read_measured
from trainer.config import JobConfig
from trainer.rundir import LAUNCH, RESULT, RunDir

_log = logging.getLogger(__name__)


class HomeHistory:
    """The latest orders of a home, read once."""

    def __init__(self, home: Path, processes_per_node: int, sku: str, shares_machine: bool) -> None:
        """``sku``: of the nodes that are planned. ``shares_machine``: whether all nodes are this one machine, which
        keeps what was unpacked for the next run."""
        self.processes_per_node, self.sku, self.shares_machine = processes_per_node, sku, shares_machine
        self._orders = [(self._mark(job), job) for job in latest_orders(home, LOOK_BACK)]
        self._runs: dict[str, list[PastRun]] = {}

    def forecast(self, job: JobConfig, sizes: Sizes) -> Forecast | None:
        """Return what past runs of the same pace and global batch tell of a job, on the nodes that the latest of them
        had; None where there are none. Of the trainer's own code they may have had another version."""
        runs = self.runs_like(job)
        if not runs:
            return None
        sizes = replace(sizes, stated_ranks=job.training.world_size)
        return from_history(
            runs, (), sizes, runs[0].measured.node_count, self.sku, lambda name: hardware_of(name).speed,
            lambda basis: LearnedCorrection(),
        )  # fmt: skip

    def runs_like(self, job: JobConfig) -> list[PastRun]:
        """Return the latest runs of the same pace and global batch, the newest first, that succeeded, lost no node and
        did not start again."""
        mark = self._mark(job)
        if mark not in self._runs:
            found = (self._read(RunDir(order.run_dir), order) for its, order in self._orders if its == mark)
            self._runs[mark] = [run for run in found if run is not None][:MOST_READ]
        return self._runs[mark]

    def _mark(self, job: JobConfig) -> str:
        return f"{pace_mark(job, self.processes_per_node)}-w{job.training.world_size}"

    def _read(self, rundir: RunDir, order: JobConfig) -> PastRun | None:
        try:
            result = rundir.read_json(RESULT)
            if not result or result["status"] != "succeeded" or JobCourse.read(rundir).disturbed:
                return None
            nodes = rundir.nodes()
            count = len({node.node_id for node in nodes})
            launch = rundir.read_json(LAUNCH) or {}
            return PastRun(
                job_id=order.job_id,
                fingerprint="",
                sku=hardware_of(launch.get("sku", self.sku)).sku,
                measured=read_measured(
                    list(rundir.events()), nodes, count, order.training.global_batch_size, self.shares_machine
                ),
                wall_seconds=max(node.ended_at or 0.0 for node in nodes) - min(node.started_at for node in nodes),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info("the run directory %s cannot be used: %r", rundir.uri, error)
            return None

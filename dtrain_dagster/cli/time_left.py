"""The time left of a job, to its very end: after the last step come the test split, the baselines and the report.

How long that takes says the plan of the job, or, for a training that no Dagster asset plans, past runs of this home.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.base import JobStatus
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.planning.projection import TimeLeft, time_left
from trainer.errors import DamagedError
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.settings.environment import Settings


class LeftClock:
    """The time left of one job, from how it goes and its plan."""

    def __init__(self, rundir: RunDir, expect_finish: Callable[[], float | None] = lambda: None) -> None:
        """``expect_finish``: is asked once for the seconds after the last step, of a job without a plan."""
        self._rundir, self._expect_finish = rundir, expect_finish
        self._plan: Mapping[str, Any] | None = None

    def left(self, status: JobStatus, view: JobView) -> TimeLeft | None:
        """Return the time left; None where it is not known, and for a job that has ended, however it did."""
        if status.state.is_final or not view.reports:
            return None
        if self._plan is None:
            self._plan = self._read_plan()
        return time_left(view, self._plan, time.time())

    def _read_plan(self) -> Mapping[str, Any]:
        with suppress(DamagedError):  # others refuse the job for it: here a figure is missing
            if (plan := self._rundir.read_json(PLAN)) is not None:
                return plan
        finish = self._expect_finish()
        return {} if finish is None else {"phases": {"finish": finish}}


def expect_finish(settings: Settings, rundir: RunDir) -> float | None:
    """Return the seconds that a training will take after its last step, as past runs alike took; None where this home
    has none, or they cannot be read."""
    from dtrain_dagster.cli.common import ranks_of
    from dtrain_dagster.planning.build_plan import sizes_of
    from dtrain_dagster.planning.check_job import samples_of
    from dtrain_dagster.planning.history import HomeHistory
    from trainer.rundir import LAUNCH

    with suppress(ValueError, OSError, RuntimeError):  # what is missing is a figure; a command that needs it says why
        job, launch = rundir.read_job(), rundir.read_json(LAUNCH) or {}
        history = HomeHistory(settings.home, ranks_of(settings), settings.gpu_type, settings.kind.is_this_machine)
        if not history.runs_like(job):
            return None
        cores = os.cpu_count() if history.shares_machine else None
        sizes = sizes_of(job, samples_of(job), history.processes_per_node, cores)
        if (known := history.forecast(job, sizes)) is not None:
            return known.parts(launch.get("node_count") or settings.nodes).finish
    return None

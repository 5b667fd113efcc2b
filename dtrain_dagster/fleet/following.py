"""What a running job of a fleet has told: its progress, its speed and evaluations, and the work that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetJob
from dtrain_dagster.jobs.view import JobFollower
from dtrain_dagster.planning.projection import TimeLeft, time_left
from trainer.documents.events import EvaluationEvent, read_events
from trainer.rundir import RunDir

MEASURED_SPREAD = 0.1
"""Standard deviation of the work left, as a fraction of it, once a job tells its speed."""


class Followed(JobFollower):
    """A job as far as its events were read."""

    def __init__(self, rundir: RunDir) -> None:
        super().__init__(rundir)
        self.judged: dict[int, EvaluationEvent] = {}
        """The evaluations of the validation split by step; of a step that was done again, the last."""

    def look(self) -> None:
        """Read what has come since."""
        for events in self.read():
            for event in read_events(EvaluationEvent, events):
                if event.split == "valid" and event.step is not None:
                    self.judged[event.step] = event

    @property
    def evaluations(self) -> Sequence[EvaluationEvent]:
        """Return the evaluations in order of steps."""
        return tuple(self.judged[step] for step in sorted(self.judged))

    def trains_since(self, launched_at: float | None) -> bool:
        """Return whether it has told of a step since then."""
        return bool(self.view.reports) and launched_at is not None and self.view.reports[-1][0] >= launched_at

    def left(self, now: float) -> TimeLeft | None:
        """Return the time to its end as it goes now; None while that is not known."""
        return time_left(self.view, None, now)

    def work_left(self, job: FleetJob, nodes: int, now: float) -> float | None:
        """Return the work that is left, as node-seconds on one node, of a job that trains on this many. None while that
        is not known."""
        left = self.left(now)
        return None if left is None else left.seconds / (job.serial_share + (1 - job.serial_share) / nodes)

    def stands(self, standing: Standing, now: float) -> Standing:
        """Return how the job stands, with what it has told since it was given its nodes last."""
        if not self.trains_since(standing.launched_at):
            return standing
        left = self.work_left(standing.job, standing.nodes, now)
        if left is not None:
            standing = replace(standing, left_node_seconds=left, left_spread=MEASURED_SPREAD)
        return replace(standing, is_training=True)

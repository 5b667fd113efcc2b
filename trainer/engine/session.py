"""`Session`: all that one training has in this process, in one place, from its first world to its last.

State that more than one module of a training needs belongs here, with what keeps it consistent: saving it and booking
what was saved. Who this process is, before it has data and a model, is `trainer.engine.participant`; the data and the
model are `trainer.engine.workload`; what happens in which order is `trainer.engine.trainer`.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from trainer.checkpoint.manager import CheckpointManager
from trainer.comm.group import GroupError
from trainer.comm.world import World
from trainer.config import JobConfig
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.participant import Participant
from trainer.engine.state import Progress
from trainer.engine.workload import Workload
from trainer.observability.reporter import StepWindow
from trainer.spec import DataSpec


class Session:
    """A training in this process. It is complete once made; `trainer.engine.recovery` brings it into its worlds."""

    def __init__(self, participant: Participant, workload: Workload) -> None:
        self.participant, self.workload = participant, workload
        self.job, self.config, self.rundir = participant.job, participant.config, participant.rundir
        self.facts, self.faults, self.device = participant.facts, participant.faults, participant.device
        self.elastic, self.launch = participant.elastic, participant.launch
        self.reports, self.budget = participant.reports, participant.budget
        self.shards, self.step, self.state = workload.shards, workload.step, workload.state
        self.total_steps = workload.total_steps
        self.checkpoints = CheckpointManager(
            self.rundir, self.config.keep_checkpoints, fingerprint_of(self.job, self.shards.spec), self._note_checkpoint
        )
        self.saved_step = 0
        self.best_saved_step = 0
        """Of the best checkpoint that is known to be in storage."""
        self.window = StepWindow()
        self.recent_steps: deque[dict[str, Any]] = deque(maxlen=64)
        """The ``step`` events of late, so that another rank 0 can report those that were lost."""

    @property
    def world(self) -> World:
        return self.participant.world

    @property
    def progress(self) -> Progress:
        return self.state.progress

    @property
    def is_over(self) -> bool:
        """Are all steps done, or as many as early stopping allows?"""
        return self.progress.step >= self.total_steps or self.progress.early_stopped

    @property
    def is_budget_due(self) -> bool:
        """Is it time to stop, as rank 0 sees it? The others hear of it."""
        if self.world.rank != 0:
            return False
        return self.budget.is_due(self.recent_steps[-1]["step_seconds"] if self.recent_steps else 0.0)

    def save(self, is_best: bool = False, wait: bool = False) -> None:
        """A checkpoint by rank 0, written in the background. Where nothing was taken, since two others are still to be
        written, the next one comes as planned; with ``wait`` it is this one that counts."""
        self.reports.end_phase("training")
        self.step.timer.mark("other")
        step, generation = self.progress.step, self.world.generation
        taken = True
        if self.world.rank == 0:
            self.faults.reach("save", step)
            best_is_saved = self.progress.best_step in (step, self.best_saved_step)
            state = self.state.capture(best_is_saved)
            taken = self.checkpoints.save(state, step, generation, is_best, self.is_over)
            if wait and self.checkpoints.wait(COMMIT_SECONDS) and not taken:
                taken = self.checkpoints.save(state, step, generation, is_best)
                self.checkpoints.wait(COMMIT_SECONDS)
        if taken:
            self.saved_step = step
        self.step.timer.mark("checkpoint")
        self.reports.end_phase("checkpoint")

    def save_at_budget(self, agreed: bool) -> None:
        """The checkpoint to go on from once the budget is raised. ``agreed``: all ranks do so."""
        if self.saved_step < self.progress.step:
            self.save(wait=True)
        self.checkpoints.wait(COMMIT_SECONDS)
        if agreed:  # nobody leaves before: a cluster may end all nodes with the first that does
            with suppress(GroupError):
                self.world.barrier()

    def close(self) -> None:
        """End the threads that gather batches and write checkpoints."""
        self.workload.close()
        self.checkpoints.close(5.0)

    def _note_checkpoint(self, kind: str, **fields: Any) -> None:
        """Called by the thread that writes checkpoints."""
        if fields.get("is_best"):
            self.best_saved_step = fields["step"]
        if kind == "checkpoint":
            self.budget.measured(fields["seconds"])
        self.reports.emit(kind, **fields)


def fingerprint_of(job: JobConfig, spec: DataSpec) -> str:
    """What is trained: a checkpoint of another dataset, model or loss is refused."""
    what = [spec.dataset_id, asdict(job.model), asdict(job.loss)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

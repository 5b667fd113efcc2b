"""`Session`: the whole state of one training in this process, in one place, from its first world to its last.

State that more than one module of a training needs belongs here, with what keeps it consistent: saving it and recording
what was saved. This process's identity, before it has data and a model, is `trainer.engine.participant`; the data and
the model are `trainer.engine.workload`; the order of events is `trainer.engine.trainer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

from trainer.checkpoint.manager import CheckpointManager
from trainer.comm.group import GroupError
from trainer.comm.world import World
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.out_of_memory import limit_evaluation
from trainer.engine.participant import Participant
from trainer.engine.sharded_recovery import as_whole
from trainer.engine.state import Progress
from trainer.engine.workload import Workload
from trainer.evaluation.evaluate import JudgeRequest
from trainer.observability.reporter import StepWindow


class Session:
    """A training in this process. It is complete once made; `trainer.engine.recovery` brings it into its worlds."""

    def __init__(
        self, participant: Participant, workload: Workload, parts: Mapping[str, Any], measure: dict[str, str]
    ) -> None:
        """``parts``: what its checkpoints belong to (`Problem.describe`); ``measure``: what its scores depend on."""
        self.participant, self.workload = participant, workload
        self.job, self.config, self.rundir = participant.job, participant.config, participant.rundir
        self.facts, self.faults, self.device = participant.facts, participant.faults, participant.device
        self.elastic, self.launch = participant.elastic, participant.launch
        self.reports, self.budget = participant.reports, participant.budget
        self.problem, self.step, self.state = workload.problem, workload.step, workload.state
        self.checkpoints = CheckpointManager(
            self.rundir, self.config.keep_checkpoints, self.problem.fingerprint, self._note_checkpoint, parts
        )
        self.state.progress.measure, self.state.progress.settings = measure, asdict(self.config)
        self.saved_step = 0
        self.best_saved_step = 0
        """The step of the best checkpoint that is known to be in storage."""
        self.window = StepWindow()
        self.recent_steps: deque[dict[str, Any]] = deque(maxlen=4096)
        """The latest ``step`` events, so that another rank 0 can report those that were not written."""

    @property
    def world(self) -> World:
        """The present world."""
        return self.participant.world

    @property
    def progress(self) -> Progress:
        """The progress of the training."""
        return self.state.progress

    @property
    def total_steps(self) -> int:
        """The optimizer steps at the end of the training."""
        return self.workload.total_steps

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the position in its order, at which the next step begins."""
        return self.progress.position(self.workload.sampler.samples)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or early stopping has ended the training."""
        return self.progress.step >= self.total_steps or self.progress.early_stopped

    @property
    def evaluation_batch(self) -> int:
        """The samples that are evaluated at once: once memory has run out, no more than training takes."""
        return limit_evaluation(self.step.limit, self.config.batch_size_per_gpu, self.problem.evaluation_batch)

    def judge_request(self, before_batch: Callable[[], object] = lambda: None) -> JudgeRequest:
        """Return what a judge needs to know of this training."""
        return JudgeRequest(
            model=self.state.module, world=self.world, device=self.device, batch_size=self.evaluation_batch,
            before_batch=before_batch,
        )  # fmt: skip

    def as_whole(self) -> AbstractContextManager[None]:
        """Return a context in which the model is a whole on every rank, for evaluations. A collective of a sharded
        model, and of DeepSpeed's; of another, nothing changes."""
        plan = self.workload.plan
        if plan is not None:
            return as_whole(self.state, self.world, plan)
        self.step.take_whole()
        return nullcontext()

    @property
    def is_budget_due(self) -> bool:
        """Whether it is time to stop for the budget, as rank 0 sees it; False on the other ranks, which are told."""
        if self.world.rank != 0:
            return False
        return self.budget.is_due(self.recent_steps[-1]["step_seconds"] if self.recent_steps else 0.0)

    def save(self, is_best: bool = False, wait: bool = False) -> None:
        """Have rank 0 save a checkpoint, written in the background. If two others are still being written, this one is
        skipped, and the next comes as planned; with ``wait`` it waits and is not skipped."""
        self.reports.end_phase("training")
        self.step.timer.mark("other")
        step, generation = self.progress.step, self.world.generation
        taken = True
        if self.workload.plan is not None:
            taken = self._save_part(is_best, wait)
        elif self.step.has_parts and self._is_left_out(is_best, wait):
            taken = False
        elif self.world.rank == 0:
            self.faults.reach("save", step)
            state = self._capture()
            taken = self.checkpoints.save(state, step, generation, is_best, self.is_over)
            if wait and self.checkpoints.wait(COMMIT_SECONDS) and not taken:
                taken = self.checkpoints.save(state, step, generation, is_best)
                self.checkpoints.wait(COMMIT_SECONDS)
        elif self.step.has_parts:
            self._capture()
        if taken:
            self.saved_step = step
        self.step.timer.mark("checkpoint")
        self.reports.end_phase("checkpoint")

    def _is_left_out(self, is_best: bool, wait: bool) -> bool:
        """Return whether rank 0 still writes others, so that this checkpoint is left out on all ranks: taking it is a
        collective, which none may enter alone. Waits for those others where it is not to be left out. A collective."""
        writes = self.world.rank == 0
        if writes and (wait or is_best or self.is_over):
            self.checkpoints.wait(COMMIT_SECONDS)
        [is_full] = self.world.any(writes and not self.checkpoints.has_room)
        return is_full

    def _capture(self) -> dict[str, Any]:
        """Return the contents of a checkpoint. A collective where ranks hold parts of it."""
        best_is_saved = self.progress.best_step in (self.progress.step, self.best_saved_step)
        self.step.take_whole()
        return self.state.capture(best_is_saved)

    def _save_part(self, is_best: bool, wait: bool) -> bool:
        """Save this rank's part of a sharded model's checkpoint, on all ranks of the first replica or on none. Return
        whether that was done. A collective."""
        plan = self.workload.plan
        assert plan is not None
        is_writer = self.world.rank in plan.replicas[0]
        if is_writer and (wait or is_best or self.is_over):  # these are not left out
            self.checkpoints.wait(COMMIT_SECONDS)
        best_is_saved = self.world.rank == 0 and self.progress.best_step in (self.progress.step, self.best_saved_step)
        is_full, best_is_saved = self.world.any(is_writer and not self.checkpoints.has_room, best_is_saved)
        if is_full:
            return False
        if is_writer:
            self.faults.reach("save", self.progress.step)
            self.checkpoints.save(
                self.state.capture(best_is_saved), self.progress.step, self.world.generation, is_best, self.is_over
            )
            if wait:
                self.checkpoints.wait(COMMIT_SECONDS)
        return True

    def save_at_end(self, agreed: bool) -> None:
        """Save the checkpoint to resume from once the budget is raised, or memory suffices. ``agreed``: all ranks take
        part."""
        is_apart = self.workload.plan is not None or self.step.has_parts
        is_possible = agreed or not is_apart or self.world.world_size == 1
        if self.saved_step < self.progress.step and is_possible:  # parts of a checkpoint are of one step
            self.save(wait=True)
        self.checkpoints.wait(COMMIT_SECONDS)
        if agreed:  # no rank leaves earlier: a cluster may end all nodes when the first one exits
            with suppress(GroupError):
                self.world.barrier()

    def close(self) -> None:
        """End the threads that load batches and write checkpoints."""
        self.workload.close()
        self.checkpoints.close(5.0)

    def _note_checkpoint(self, kind: str, **fields: Any) -> None:
        """Record a checkpoint event; called by the thread that writes checkpoints."""
        if kind == "checkpoint" and self.workload.plan is not None and self.world.rank != 0:
            return  # a part: rank 0 makes the checkpoint count
        if fields.get("is_best"):
            self.best_saved_step = fields["step"]
        if kind == "checkpoint":
            self.budget.measured(fields["seconds"])
        self.reports.emit(kind, **fields)

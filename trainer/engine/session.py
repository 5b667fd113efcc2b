"""`Session`: the whole state of one training in this process, in one place, from its first world to its last.

State that more than one module of a training needs belongs here, with what keeps it consistent: saving it and recording
what was saved. This process's identity, before it has data and a model, is `trainer.engine.participant`; the data and
the model are `trainer.engine.workload`; the order of events is `trainer.engine.trainer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.manager import CheckpointManager
from trainer.comm.group import GroupError
from trainer.comm.world import World
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.callbacks import Callbacks
from trainer.engine.out_of_memory import limit_evaluation
from trainer.engine.participant import Participant
from trainer.engine.state import Progress
from trainer.engine.workload import Workload
from trainer.observability.reporter import StepWindow
from trainer.runtime.packages import load

if TYPE_CHECKING:
    from trainer.evaluation.evaluate import JudgeRequest


class Session:
    """A training in this process. It is complete once made; `trainer.engine.joining` brings it into its worlds."""

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
        self.callbacks = Callbacks(self.problem.callbacks, self)
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
        graphs = self.step.graphs
        request: JudgeRequest = load("trainer.evaluation.judge:JudgeRequest")(
            model=self.state.module,
            world=self.world,
            device=self.device,
            batch_size=self.evaluation_batch,
            before_batch=before_batch,
            **({} if graphs is None else {"replaying": graphs.evaluating}),
        )
        return request

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
        taken, writes = True, self.state.writes(self.world)
        best_is_saved = self.progress.best_step in (step, self.best_saved_step)
        if self.step.is_divided:
            taken, best_is_saved = self._agree_to_save(writes, wait or is_best or self.is_over, best_is_saved)
        if writes and taken:
            self.faults.reach("save", step)
        if taken and (writes or self.step.is_divided):
            state = self.state.capture(best_is_saved)
            if writes:
                taken = self.checkpoints.save(state, step, generation, is_best, self.is_over)
            if writes and wait and self.checkpoints.wait(COMMIT_SECONDS) and not taken:
                taken = self.checkpoints.save(state, step, generation, is_best)
                self.checkpoints.wait(COMMIT_SECONDS)
        if taken:
            self.saved_step = step
        self.step.timer.mark("checkpoint")
        self.reports.end_phase("checkpoint")

    def _agree_to_save(self, writes: bool, is_needed: bool, best_is_saved: bool) -> tuple[bool, bool]:
        """Return whether a checkpoint is taken, which no rank may do alone: unless another is still being written and
        this one is not needed. And whether the best weights are saved, as rank 0 knows it. A collective."""
        if writes and is_needed:
            self.checkpoints.wait(COMMIT_SECONDS)
        is_full, best_is_saved = self.world.any(
            writes and not self.checkpoints.has_room, self.world.rank == 0 and best_is_saved
        )
        return not is_full, best_is_saved

    def save_at_end(self, agreed: bool) -> None:
        """Save the checkpoint to resume from once the budget is raised, or memory suffices. ``agreed``: all ranks take
        part."""
        is_possible = agreed or not self.step.is_divided or self.world.world_size == 1
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
        if kind == "checkpoint" and self.step.is_divided and self.world.rank != 0:
            return  # a part: rank 0 makes the checkpoint count
        if fields.get("is_best"):
            self.best_saved_step = fields["step"]
        if kind == "checkpoint":
            self.budget.measured(fields["seconds"])
            if self.world.rank == 0:
                self.callbacks.note_checkpoint(str(fields["path"]))
        self.reports.emit(kind, **fields)

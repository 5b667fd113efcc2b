"""The loop of this project: the trainer as it is, with its timing, reports and monitor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from benchmarks.frameworks.protocol import Case, Turns
from benchmarks.frameworks.workload import LOSS
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig
from trainer.engine.step import Batch
from trainer.engine.steps import Steps
from trainer.engine.trainer import DistributedTrainer

NEVER = 10**9
"""A number of steps or epochs that no training reaches."""


class OverError(Exception):
    """The case is over."""


class Trainer(DistributedTrainer):
    """A trainer that takes a step only when it is its turn."""

    turns: Turns

    def epoch_steps(self, dataloader: Iterable[Batch], epoch: int) -> Steps[dict[str, float]]:
        """Yield the steps of an epoch, in turns."""
        return super().epoch_steps(self._in_turns(dataloader), epoch)

    def _in_turns(self, dataloader: Iterable[Batch]) -> Iterator[Batch]:
        for batch in dataloader:
            pauses = self.turns.is_due
            if pauses:
                self.reports.watchdog.rest()
            if not self.turns.step():
                raise OverError
            if pauses:  # a pause is no part of a step
                self.session.step.timer.drop()
                self.reports.watchdog.progress(self.steps_done)
            yield batch


def job_of(case: Case) -> JobConfig:
    """Return the job of a case: no evaluations and checkpoints, as with all others, and otherwise a user's settings."""
    config = DistributedTrainingConfig(
        world_size=case.ranks,
        batch_size_per_gpu=case.batch,
        gradient_accumulation_steps=1,
        epochs=NEVER,
        threads_per_rank=1,
        seed=case.seed,
        learning_rate=case.learning_rate,
        clip_norm=case.clip_norm,
        weight_decay=case.weight_decay,
        schedule="constant",
        checkpoint_frequency=NEVER,
        eval_frequency=NEVER,
    )
    return JobConfig(
        job_id="benchmark",
        run_dir=case.folder,
        dataset=DatasetRef(uri=case.dataset),
        model=FactoryConfig(factory=case.model),
        loss=LOSS,
        training=config,
    )


def ours(case: Case, turns: Turns) -> None:
    """Train the case in turns, until it is over."""
    os.environ["MASTER_PORT"] = str(case.port)  # a port of its own: that of the case before is still in use
    trainer = Trainer(job_of(case))
    trainer.turns = turns
    try:
        trainer.initialize_distributed()
        trainer.setup()
        trainer.train()
    except OverError:
        return
    finally:
        trainer.close()
    raise AssertionError("the training ended before the benchmark did")

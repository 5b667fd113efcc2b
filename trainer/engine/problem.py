"""`Problem`: what is trained: data, task, model and judge, made from a job's configuration or given by a caller.

What makes the problem of each kind of dataset is in `MAKERS`; what else a new kind needs is in CONTRIBUTING.md.
Problems that a caller gives as objects are `trainer.fit`. How it is trained is `trainer.engine.workload` and
`trainer.engine.trainer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig
from trainer.data.loader import TrainingData
from trainer.data.manifest import DatasetError, kind_of, load_manifest
from trainer.engine.identity import (
    MONITORED,
    describe_figure,
    describe_loss,
    describe_structure,
    describe_weights,
    digest_measure,
)
from trainer.model.allowed_factories import refuse_other_kinds
from trainer.model.optimizers import USUAL, OptimizerRecipe
from trainer.model.task import Task
from trainer.runtime.packages import load
from trainer.spec import OWN, ROWS, WINDOWS
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from trainer.engine.step import TrainingStep
    from trainer.evaluation.judge import Judge

MAKERS = {
    WINDOWS: "trainer.engine.window_problem:WindowProblemMaker",
    ROWS: "trainer.engine.row_problem:RowProblemMaker",
    OWN: "trainer.engine.own_problem:OwnProblemMaker",
}
"""What makes the problem of a job, by the kind of its dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The parts of one training. The model is made anew by each rank, on the CPU or on ``device``."""

    data: TrainingData
    task: Task
    module: nn.Module
    judge: Judge
    identity: tuple[Any, ...]
    """What a checkpoint belongs to, as JSON: dataset, model and loss. A checkpoint of another identity is refused."""
    description: dict[str, Any]
    """The entries of ``model.json`` that tell how the module is made again."""
    evaluation_batch: int
    """The samples that are evaluated at once, while memory suffices."""
    recipe: OptimizerRecipe = USUAL
    """How its optimizer is made."""
    callbacks: Sequence[Any] = ()
    """See `trainer.engine.callbacks`."""
    attached: Mapping[str, Any] = field(default_factory=dict)
    """What else of the caller's has a state, by name: it has ``state_dict`` and ``load_state_dict``."""
    make_step: Callable[..., TrainingStep] | None = None
    """What makes its steps; None: as its strategy has them."""
    valid_name: str = ""
    """The name of the validation samples, where that of the dataset does not cover them."""
    valid_collate: Callable[..., Any] | None = None
    """What makes batches of them; None: the usual way."""

    @property
    def fingerprint(self) -> str:
        """Return the hash of the identity."""
        return hashlib.sha256(json.dumps(list(self.identity), sort_keys=True).encode()).hexdigest()[:16]

    def describe(self, config: DistributedTrainingConfig) -> dict[str, Any]:
        """Return what a checkpoint belongs to, part by part, as JSON: what `fingerprint` covers, and the structure of
        the model, the arguments of the loss and the order of samples. The model must be as it was made."""
        _, model, *_, loss = self.identity
        order: dict[str, Any] = {"seed": config.seed, "shuffle_block": config.shuffle_block}
        if self.data.drawing is not None and self.data.drawing.depends_on_batch:
            order["global_batch_size"] = config.global_batch_size
        return {
            "dataset": self.data.dataset_id,
            "model": {**model, "structure": describe_structure(self.module), "weights": describe_weights(self.module)},
            "loss": {**loss, **describe_loss(self.task)},
            "training": order,
        }

    def digest_measure(self, config: DistributedTrainingConfig) -> dict[str, str]:
        """Return digests of what the choice of the best weights depends on beside that (`trainer.engine.identity`)."""
        monitored = describe_figure(self.task, config.monitor)
        return digest_measure(self.module, self.task, self.valid_name, self.valid_collate) | {
            MONITORED: ", ".join(filter(None, (config.monitor, config.mode, monitored)))
        }


def refuse_differences(identities: Sequence[tuple[str, int, str, str]]) -> None:
    """Raise `ConfigError`, which names both, unless all ranks train the same. ``identities``: of each rank, its
    dataset's id, the number of its training samples, the fingerprint of its problem and that of its optimizer. Pure."""
    for rank, (dataset_id, samples, fingerprint, optimizer) in enumerate(identities):
        first_id, first_samples, first_fingerprint, first_optimizer = identities[0]
        if (dataset_id, samples) != (first_id, first_samples):
            raise ConfigError(
                f"rank {rank} trains on {dataset_id} with {samples} samples, and rank 0 on {first_id} with "
                f"{first_samples}: all ranks must read the same samples in the same order. Datasets that differ from "
                "process to process (a clock, an unseeded generator) need one seed, or Trainer(…, name=…) if their "
                "samples are equal nevertheless"
            )
        if fingerprint != first_fingerprint:
            raise ConfigError(
                f"rank {rank} has a different model or loss than rank 0: all ranks must create the same ones"
            )
        if optimizer != first_optimizer:
            raise ConfigError(
                f"rank {rank} has another optimizer or scheduler than rank 0, or other options of them: all ranks must "
                "create the same ones"
            )


class ProblemMaker(Protocol):
    """The interface of what makes a job's problem in a rank: its data first, then the parts that need memory."""

    def open_data(self, job: JobConfig, device: torch.device) -> TrainingData:
        """Return the data of the job."""
        ...

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on this data; called after torch's generator was seeded."""
        ...


def refuse_without_script(job: JobConfig) -> None:
    """Raise `DatasetError` for a job whose data and model are objects of a script."""
    if job.is_of_script:
        raise DatasetError(
            f"dataset.uri = {job.dataset.uri!r}: data and model of this job are objects of its script; start it as "
            "`dtrain train --script FILE.PY`"
        )


def maker_of(job: JobConfig) -> ProblemMaker:
    """Return what makes the problem that a job describes, by the kind of its dataset."""
    refuse_without_script(job)
    kind = OWN if job.dataset.factory is not None else _kind_of_dataset(job)
    refuse_other_kinds(job, kind)
    maker: ProblemMaker = load(MAKERS[kind])()
    return maker


def _kind_of_dataset(job: JobConfig) -> str:
    try:
        return kind_of(load_manifest(open_storage(job.dataset.uri)))
    except DatasetError:
        raise
    except ValueError as error:
        raise DatasetError(f"{job.dataset.uri}/manifest.json: {error}") from None

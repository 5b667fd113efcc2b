"""`Problem`: what is trained: data, task, model and judge, made from a job's configuration or given by a caller.

How it is trained is `trainer.engine.workload` and `trainer.engine.trainer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig
from trainer.data.loader import TrainingData, fits_on_device
from trainer.data.shards import DatasetError, DataShardManager
from trainer.engine.identity import describe_loss, describe_structure, describe_weights, digest_measure
from trainer.evaluation.evaluate import EVAL_BATCH
from trainer.evaluation.judge import Judge
from trainer.evaluation.window_judge import WindowJudge
from trainer.model.build import build_loss, build_model
from trainer.model.task import SupervisedTask, Task


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
    valid_name: str = ""
    """The name of the validation samples, where that of the dataset does not cover them."""
    valid_collate: Callable[..., Any] | None = None
    """What makes batches of them; None: the usual way."""
    evaluation_batch: int = EVAL_BATCH
    """The samples that are evaluated at once, while memory suffices."""

    @property
    def fingerprint(self) -> str:
        """Return the hash of the identity."""
        return hashlib.sha256(json.dumps(list(self.identity), sort_keys=True).encode()).hexdigest()[:16]

    def describe(self, config: DistributedTrainingConfig) -> dict[str, Any]:
        """Return what a checkpoint belongs to, part by part, as JSON: what `fingerprint` covers, and the structure of
        the model, the arguments of the loss and the order of samples. The model must be as it was made."""
        _, model, *_, loss = self.identity
        return {
            "dataset": self.data.dataset_id,
            "model": {**model, "structure": describe_structure(self.module), "weights": describe_weights(self.module)},
            "loss": {**loss, **describe_loss(self.task)},
            "training": {"seed": config.seed, "shuffle_block": config.shuffle_block},
        }

    def digest_measure(self) -> dict[str, str]:
        """Return digests of what the validation loss depends on beside that (`trainer.engine.identity`)."""
        return digest_measure(self.module, self.task, self.valid_name, self.valid_collate)


def refuse_differences(identities: Sequence[tuple[str, int, str]]) -> None:
    """Raise `ConfigError`, which names both, unless all ranks train the same. ``identities``: of each rank, its
    dataset's id, the number of its training samples and the fingerprint of its problem. Pure."""
    for rank, (dataset_id, samples, fingerprint) in enumerate(identities):
        first_id, first_samples, first_fingerprint = identities[0]
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


def open_dataset(job: JobConfig, splits: tuple[str, ...] = ()) -> DataShardManager:
    """Return the dataset of windows of a job. Raise `DatasetError` where one of ``splits`` is empty."""
    refuse_without_script(job)
    shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
    for split in splits:
        if shards.count(split) == 0:
            raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
    return shards


def open_shards(job: JobConfig, device: torch.device, splits: tuple[str, ...] = ()) -> DataShardManager:
    """Return the dataset of a job as `open_dataset` does, on the device where that is configured."""
    shards = open_dataset(job, splits)
    is_wanted = job.training.data_on_device and device.type == "cuda"
    if is_wanted and fits_on_device(shards.sample_bytes, torch.cuda.mem_get_info(device)[0]):
        shards.keep_on(device)
    return shards


class WindowProblemMaker:
    """Makes the problem that a job's configuration describes: windows of prices."""

    def open_data(self, job: JobConfig, device: torch.device) -> DataShardManager:
        """Return the dataset of the job. Raise `DatasetError` where it cannot be used."""
        return open_shards(job, device, ("train", "valid", "test"))

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on the windows."""
        assert isinstance(data, DataShardManager)
        return make_window_problem(job, data, device)


def make_window_problem(job: JobConfig, shards: DataShardManager, device: torch.device) -> Problem:
    """Return the problem of a job on windows of prices. Raise `trainer.config.ConfigError` for a model or loss that
    cannot be used."""
    criterion = build_loss(job.loss, shards.spec).to(device)
    second = getattr(criterion, "second_target", None)
    if second is not None:
        shards.add_target(second)
    module = build_model(job.model, shards.spec, int(criterion.outputs)).to(device)  # type: ignore[arg-type]
    model, loss = asdict(job.model), asdict(job.loss)

    def make_criterion(arguments: Mapping[str, float]) -> nn.Module:
        changed = replace(job.loss, args={**job.loss.args, **arguments})
        return build_loss(changed, shards.spec).to(device)

    return Problem(
        data=shards,
        task=SupervisedTask(criterion),
        module=module,
        judge=WindowJudge(criterion, shards, make_criterion),
        identity=(shards.spec.dataset_id, model, loss),
        description={"model": model, "loss": loss, "spec": asdict(shards.spec)},
    )

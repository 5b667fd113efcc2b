"""The problem of a job on windows of prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
from torch import nn

from trainer.config import JobConfig
from trainer.data.loader import TrainingData, fits_on_device
from trainer.data.shards import DatasetError, DataShardManager
from trainer.engine.problem import Problem, refuse_without_script
from trainer.evaluation.evaluate import EVAL_BATCH
from trainer.evaluation.window_judge import WindowJudge
from trainer.model.build import build_loss, build_model
from trainer.model.task import SupervisedTask


def open_shards(job: JobConfig, device: torch.device, splits: tuple[str, ...] = ()) -> DataShardManager:
    """Return the dataset of a job, on the device where that is configured. Raise `DatasetError` where one of ``splits``
    is empty."""
    refuse_without_script(job)
    shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
    for split in splits:
        if shards.count(split) == 0:
            raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
    is_wanted = job.training.data_on_device and device.type == "cuda"
    if is_wanted and fits_on_device(shards.sample_bytes, torch.cuda.mem_get_info(device)[0]):
        shards.keep_on(device)
    return shards


class WindowProblemMaker:
    """Makes the problem of a job on windows of prices."""

    def open_data(self, job: JobConfig, device: torch.device) -> DataShardManager:
        """Return the dataset of the job. Raise `DatasetError` where it cannot be used."""
        return open_shards(job, device, ("train", "valid", "test"))

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on the windows. Raise `trainer.config.ConfigError` for a model or loss that cannot be
        used."""
        assert isinstance(data, DataShardManager)
        criterion = build_loss(job.loss, data.spec).to(device)
        second = getattr(criterion, "second_target", None)
        if second is not None:
            data.add_target(second)
        module = build_model(job.model, data.spec, int(criterion.outputs)).to(device)  # type: ignore[arg-type]
        model, loss = asdict(job.model), asdict(job.loss)

        def make_criterion(arguments: Mapping[str, float]) -> nn.Module:
            changed = replace(job.loss, args={**job.loss.args, **arguments})
            return build_loss(changed, data.spec).to(device)

        return Problem(
            data=data,
            task=SupervisedTask(criterion),
            module=module,
            judge=WindowJudge(criterion, data, make_criterion),
            identity=(data.spec.dataset_id, model, loss),
            description={"model": model, "loss": loss, "spec": asdict(data.spec)},
            evaluation_batch=EVAL_BATCH,
        )

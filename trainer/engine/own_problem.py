"""The problem of a job on datasets of the user's own, which a function makes on each node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.config import ConfigError, FactoryConfig, JobConfig, parse_job
from trainer.data.dataset_data import DatasetData
from trainer.data.loader import TrainingData
from trainer.data.manifest import SPLITS, DatasetError
from trainer.data.stream_data import data_of
from trainer.data.torch_loader import ReadOptions
from trainer.engine.problem import Problem
from trainer.engine.state import Progress
from trainer.engine.task_check import check_model, check_task, try_task
from trainer.engine.workload import count_steps, make_sampler, most_samples
from trainer.evaluation.judge import TaskJudge
from trainer.model.factories import build_from_factory
from trainer.model.optimizer_check import try_optimizer
from trainer.model.optimizers import recipe_for
from trainer.model.sizes import model_bytes
from trainer.model.task import SupervisedTask, Task
from trainer.runtime.launch import Launch
from trainer.spec import OWN

OWN_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "squared_error": nn.MSELoss,
}
"""The stock losses for datasets of the user's own."""


_FURTHER = ("sample_weights", "lengths", "collate_fn")
"""What a function of datasets may return beside them."""


class OwnProblemMaker:
    """Makes the problem of a job on datasets of the user's own."""

    def open_data(self, job: JobConfig, device: torch.device) -> DatasetData:
        """Return the datasets that the function of a job makes: it returns a map-style dataset or a `trainer.Stream`
        for training, or a mapping with some of ``train``, ``valid`` and ``test``, and of ``sample_weights``,
        ``lengths`` and ``collate_fn``, as `trainer.Trainer.fit` and torch's loaders have them. Raise `ConfigError`
        where it is not allowed, fails or returns something else, and `DatasetError` where they are not those that the
        job expects."""
        assert job.dataset.factory is not None
        made = build_from_factory("dataset", FactoryConfig(factory=job.dataset.factory, args=job.dataset.args), {})
        where = f"dataset.factory = {job.dataset.factory!r}"
        if not isinstance(made, Mapping):
            made = {"train": made}
        known = *SPLITS, *_FURTHER
        if unknown := sorted(set(map(str, made)) - set(known)):
            raise ConfigError(
                f"{where} returned a mapping with the unknown key {unknown[0]!r}; known keys are {', '.join(known)}"
            )
        if not isinstance(made.get("train"), Dataset) and not hasattr(made.get("train"), "__getitem__"):
            raise ConfigError(
                f"{where} returned no training dataset but a {type(made.get('train')).__name__}: return a map-style "
                'dataset (__getitem__ and __len__), or {"train": …, "valid": …, "test": …}'
            )
        options = dict.fromkeys(SPLITS, ReadOptions(collate_fn=made.get("collate_fn")))
        data = data_of(made, options, sample_weights=made.get("sample_weights"), lengths=made.get("lengths"))
        expected = job.dataset.dataset_id
        if expected is not None and data.dataset_id != expected:
            raise DatasetError(
                f"{where} made {data.dataset_id!r} here, and dataset.dataset_id = {expected!r}: all nodes must get "
                "the same samples in the same order"
            )
        return data

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on these datasets. Model and loss are called with their arguments alone; a loss may be a
        task (`trainer.task`). Raise `ConfigError` for a model or loss that cannot be used."""
        assert isinstance(data, DatasetData)
        module = build_from_factory("model", job.model, {})
        try:
            check_model(module)
            made = build_from_factory("loss", job.loss, OWN_LOSSES)
            task = made if isinstance(made, Task) and not isinstance(made, nn.Module) else SupervisedTask(made)
            check_task(task)
        except ConfigError as error:
            raise ConfigError(
                f"model.factory = {job.model.factory!r}, loss.factory = {job.loss.factory!r}: {error}"
            ) from None
        # What a cluster has ordered was tried before its nodes were asked for.
        try_task(module, task, data, job.training, thorough=not Launch.read(os.environ).is_elastic)
        if isinstance(task, SupervisedTask) and isinstance(task.criterion, nn.Module):
            task.criterion.to(device)
        module = module.to(device)
        model, loss = asdict(job.model), asdict(job.loss)
        return Problem(
            data=data,
            task=task,
            module=module,
            judge=TaskJudge(task, data, job.training.monitor, job.training.mode),
            identity=(data.dataset_id, model, loss),
            description={"kind": OWN, "model": model, "loss": loss},
            valid_name=data.name_split("valid"),
            valid_collate=data.collate_of("valid"),
            evaluation_batch=job.training.batch_size_per_gpu,
        )


def describe_own_job(path: str) -> None:
    """Try the job in this file, on datasets of the user's own, and print what whoever plans it has to know, as JSON:
    the name and the samples of its datasets, and the bytes of its model. Raise as `OwnProblemMaker` does."""
    job = parse_job(Path(path).read_text(), is_stored=True)
    maker, cpu = OwnProblemMaker(), torch.device("cpu")
    data = maker.open_data(job, cpu)
    module = maker.make(job, data, cpu).module
    steps = count_steps(job.training, make_sampler(job.training, data, 0, 1), Progress())
    recipe = recipe_for(job.optimizer, job.lr_scheduler)
    recipe = try_optimizer(module, recipe, job.training, steps, data.count("valid") > 0)
    samples = {split: data.count(split) for split in SPLITS} | {"train": most_samples(job.training, data)}
    model = asdict(model_bytes(module, moments=recipe.moments))
    print(json.dumps({"dataset_id": data.dataset_id, "samples": samples, "model": model}))  # noqa: T201


if __name__ == "__main__":
    try:
        describe_own_job(sys.argv[1])
    except (ConfigError, DatasetError) as error:
        sys.exit(str(error))

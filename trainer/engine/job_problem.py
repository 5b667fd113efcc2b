"""`JobProblemMaker`: the problem of a job, by the kind of its dataset.

A new kind needs its data, task, model and judge, and a branch here. Problems that a caller gives as objects are
`trainer.fit`.
"""

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
from trainer.data.manifest import SPLITS, DatasetError, kind_of, load_manifest
from trainer.data.row_data import RowData
from trainer.data.shards import DataShardManager
from trainer.engine.problem import Problem, WindowProblemMaker, make_window_problem, refuse_without_script
from trainer.engine.task_check import check_model, check_task, try_task
from trainer.evaluation.judge import TaskJudge
from trainer.evaluation.row_judge import RowJudge
from trainer.model.allowed_factories import refuse_other_kinds
from trainer.model.build import build_loss, build_model
from trainer.model.factories import build_from_factory
from trainer.model.sizes import model_bytes
from trainer.model.task import SupervisedTask, Task
from trainer.spec import OWN, ROWS, WINDOWS
from trainer.storage.open import open_storage

ROWS_AT_ONCE = 4096
"""Rows that are evaluated at once, while memory suffices."""
OWN_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "squared_error": nn.MSELoss,
}
"""The stock losses for datasets of the user's own."""


class JobProblemMaker:
    """Makes the problem that a job's configuration describes."""

    def open_data(self, job: JobConfig, device: torch.device) -> TrainingData:
        """Return the data of the job. Raise `DatasetError` where it cannot be used."""
        refuse_without_script(job)
        if job.dataset.factory is not None:
            refuse_other_kinds(job, OWN)
            return open_own_dataset(job)
        kind = _kind_of_job(job)
        refuse_other_kinds(job, kind)
        if kind == WINDOWS:
            return WindowProblemMaker().open_data(job, device)
        data = RowData(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in SPLITS:
            if not data.count(split):
                raise DatasetError(
                    f"{job.dataset.uri}: the {split} split has no samples; build it with other fractions"
                )
        return data

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on this data. Raise `trainer.config.ConfigError` for a model or loss that cannot be
        used."""
        if isinstance(data, DataShardManager):
            return make_window_problem(job, data, device)
        if isinstance(data, RowData):
            return make_row_problem(job, data, device)
        assert isinstance(data, DatasetData)
        return make_own_problem(job, data, device)


def make_row_problem(job: JobConfig, data: RowData, device: torch.device) -> Problem:
    """Return the problem of a job on the rows of a table. Raise `trainer.config.ConfigError` for a model or loss that
    cannot be used."""
    criterion = build_loss(job.loss, data.spec).to(device)
    module = build_model(job.model, data.spec, int(criterion.outputs)).to(device)  # type: ignore[arg-type]
    model, loss = asdict(job.model), asdict(job.loss)
    return Problem(
        data=data,
        task=SupervisedTask(criterion),
        module=module,
        judge=RowJudge(criterion, data),
        identity=(data.dataset_id, model, loss),
        description={"kind": ROWS, "model": model, "loss": loss, "spec": asdict(data.spec)},
        evaluation_batch=ROWS_AT_ONCE,
    )


def make_own_problem(job: JobConfig, data: DatasetData, device: torch.device) -> Problem:
    """Return the problem of a job on datasets of the user's own. Model and loss are called with their arguments alone;
    a loss may be a task (`trainer.task`). Raise `trainer.config.ConfigError` for a model or loss that cannot be
    used."""
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
    try_task(module, task, data, job.training, thorough="DTRAIN_LAUNCH" not in os.environ)
    if isinstance(task, SupervisedTask) and isinstance(task.criterion, nn.Module):
        task.criterion.to(device)
    module = module.to(device)
    model, loss = asdict(job.model), asdict(job.loss)
    return Problem(
        data=data,
        task=task,
        module=module,
        judge=TaskJudge(task, data),
        identity=(data.dataset_id, model, loss),
        description={"kind": OWN, "model": model, "loss": loss},
        valid_name=data.name_split("valid"),
        valid_collate=data.collate_of("valid"),
        evaluation_batch=job.training.batch_size_per_gpu,
    )


def open_own_dataset(job: JobConfig) -> DatasetData:
    """Return the datasets that the function of a job makes on each node: it returns a map-style dataset for training,
    or a mapping with some of ``train``, ``valid`` and ``test``. Raise `ConfigError` where it is not allowed, fails or
    returns something else, and `DatasetError` where they are not those that the job expects."""
    assert job.dataset.factory is not None
    made = build_from_factory("dataset", FactoryConfig(factory=job.dataset.factory, args=job.dataset.args), {})
    where = f"dataset.factory = {job.dataset.factory!r}"
    if not isinstance(made, Mapping):
        made = {"train": made}
    if unknown := sorted(set(map(str, made)) - set(SPLITS)):
        raise ConfigError(
            f"{where} returned a mapping with the unknown key {unknown[0]!r}; known keys are {', '.join(SPLITS)}"
        )
    if not isinstance(made.get("train"), Dataset) and not hasattr(made.get("train"), "__getitem__"):
        raise ConfigError(
            f"{where} returned no training dataset but a {type(made.get('train')).__name__}: return a map-style "
            'dataset (__getitem__ and __len__), or {"train": …, "valid": …, "test": …}'
        )
    data = DatasetData(train=made["train"], valid=made.get("valid"), test=made.get("test"))
    expected = job.dataset.dataset_id
    if expected is not None and data.dataset_id != expected:
        raise DatasetError(
            f"{where} made {data.dataset_id!r} here, and dataset.dataset_id = {expected!r}: all nodes must get "
            "the same samples in the same order"
        )
    return data


def describe_own_job(path: str) -> None:
    """Try the job in this file, on datasets of the user's own, and print what whoever plans it has to know, as JSON:
    the name and the samples of its datasets, and the bytes of its model. Raise as `make_own_problem` does."""
    job = parse_job(Path(path).read_text(), is_stored=True)
    data = open_own_dataset(job)
    module = make_own_problem(job, data, torch.device("cpu")).module
    samples = {split: data.count(split) for split in SPLITS}
    print(json.dumps({"dataset_id": data.dataset_id, "samples": samples, "model": asdict(model_bytes(module))}))  # noqa: T201


def _kind_of_job(job: JobConfig) -> str:
    """Return the kind of the job's dataset. Raise `DatasetError` where it has none that is known."""
    try:
        return kind_of(load_manifest(open_storage(job.dataset.uri)))
    except DatasetError:
        raise
    except ValueError as error:
        raise DatasetError(f"{job.dataset.uri}/manifest.json: {error}") from None


if __name__ == "__main__":
    try:
        describe_own_job(sys.argv[1])
    except (ConfigError, DatasetError) as error:
        sys.exit(str(error))

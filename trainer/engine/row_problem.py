"""The problem of a job on the rows of a table."""

from __future__ import annotations

from dataclasses import asdict

import torch

from trainer.config import JobConfig
from trainer.data.loader import TrainingData
from trainer.data.manifest import SPLITS, DatasetError
from trainer.data.row_data import RowData
from trainer.engine.problem import Problem
from trainer.evaluation.row_judge import RowJudge
from trainer.model.build import build_loss, build_model
from trainer.model.task import SupervisedTask
from trainer.spec import ROWS

ROWS_AT_ONCE = 4096
"""Rows that are evaluated at once, while memory suffices."""


class RowProblemMaker:
    """Makes the problem of a job on the rows of a table."""

    def open_data(self, job: JobConfig, device: torch.device) -> RowData:
        """Return the data of the job. Raise `DatasetError` where it cannot be used."""
        data = RowData(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in SPLITS:
            if not data.count(split):
                raise DatasetError(
                    f"{job.dataset.uri}: the {split} split has no samples; build it with other fractions"
                )
        return data

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        """Return the problem on the rows. Raise `trainer.config.ConfigError` for a model or loss that cannot be
        used."""
        assert isinstance(data, RowData)
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

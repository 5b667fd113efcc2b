"""The judge of a script's model that will be registered: with the best weights, it also writes the model as a program
(`trainer.model.program`), before the training counts as ended. That this can be done is tried beforehand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.data.loader import TrainingData
from trainer.documents.schemas import FinishStage
from trainer.evaluation.evaluate import Evaluation, JudgeRequest, evaluation_mode
from trainer.evaluation.judge import TaskJudge
from trainer.model.program import (
    DESCRIPTION,
    EXAMPLE,
    PROGRAM,
    ProgramError,
    as_columns,
    describe_program,
    export_program,
    load_program,
)
from trainer.model.task import SupervisedTask, Task
from trainer.rundir import RunDir

FOLDER = "model"
SHOWN = 32
"""The most samples that are kept beside a program, as an example and to try servers with."""
_TRIED = 2
_WHAT = "registry: "


def try_program(model: nn.Module, task: Task, data: TrainingData) -> None:
    """Export a model, untrained, and hold what the program says of some samples against the model. Raise `ConfigError`
    where it cannot be registered, with the reason and the remedy. The model stays in its mode."""
    if not isinstance(task, SupervisedTask):
        raise ConfigError(
            f"{_WHAT}{type(task).__name__} may call the model as it likes, and a registered model is called with one "
            "tensor: give a loss of (outputs, target)"
        )
    if data.count("train") < _TRIED:
        raise ConfigError(f"{_WHAT}the model is exported with {_TRIED} samples, and there are fewer to train on")
    device = next(model.parameters()).device
    try:
        model.cpu()
        inputs = _inputs_of(data, "train", _TRIED)
        with evaluation_mode(model), torch.no_grad():
            run = load_program(export_program(model, inputs))
            expected, found = model(inputs), run(inputs)
        if not torch.allclose(expected, found, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise ProgramError(
                "the exported program gives other numbers than the model: forward must give the same for the same "
                "input when the model evaluates"
            )
    except ProgramError as error:
        raise ConfigError(f"{_WHAT}{error}") from None
    finally:
        model.to(device)


@dataclass(frozen=True, slots=True)
class ProgramJudge:
    """Judges as `TaskJudge` does, and writes the program."""

    judge: TaskJudge
    model: nn.Module
    """A copy of the model on the CPU, with any weights, which no strategy has taken apart."""

    def validate(self, request: JudgeRequest) -> Evaluation | None:
        """See `TaskJudge`."""
        return self.judge.validate(request)

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """See `TaskJudge`. Rank 0 writes the program; one that cannot be written, though it was tried, does not end the
        training: its description says why."""
        report = self.judge.report(request, run_dir, begin)
        if request.world.rank == 0:
            begin("model")
            try:
                self.model.load_state_dict(request.model.state_dict())
                self._write(run_dir)
            except (ProgramError, RuntimeError) as error:
                run_dir.write_json(f"{FOLDER}/{DESCRIPTION}", {"error": str(error)})
        request.world.barrier()
        return report

    def _write(self, run_dir: RunDir) -> None:
        data = self.judge.data
        split = next(name for name in ("test", "valid", "train") if data.count(name) >= _TRIED)
        inputs = _inputs_of(data, split, min(SHOWN, data.count(split)))
        program = export_program(self.model, inputs)
        with torch.no_grad():
            columns = as_columns(self.model(inputs).numpy())
        buffer = io.BytesIO()
        np.savez(buffer, inputs=inputs.numpy(), outputs=np.column_stack([*columns.values()]))
        example = buffer.getvalue()
        description = describe_program(program, example, inputs.numpy())
        for name, content in ((PROGRAM, program), (EXAMPLE, example)):
            run_dir.storage.write(f"{FOLDER}/{name}", content)
        run_dir.storage.write(f"{FOLDER}/{DESCRIPTION}", json.dumps(description | {"split": split}).encode())


def _inputs_of(data: TrainingData, split: str, count: int) -> Tensor:
    """Return the inputs of samples of a split, at equal distances. Raise `ProgramError` for batches without any."""
    positions = np.unique(np.linspace(0, data.count(split) - 1, count).astype(np.int64))
    batch = data.read(split, positions, torch.device("cpu"))
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ProgramError(f"the batches are no pairs of inputs and target, but a {type(batch).__name__}: give pairs")
    if not isinstance(batch[0], Tensor):
        raise ProgramError(
            f"a registered model takes one tensor, and the inputs of these batches are a {type(batch[0]).__name__}: "
            "let the dataset give pairs of one tensor and the target"
        )
    return batch[0]

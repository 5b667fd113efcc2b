"""What a caller's model, loss and data are held against before anything is trained: tried on the first samples.

A mistake is told here with its remedy, on the machine of its author. What a task is belongs to `trainer.model.task`.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import ConfigError
from trainer.data.batches import move_to
from trainer.data.kinds import SPLITS
from trainer.data.training_data import TrainingData
from trainer.evaluation.judge import Judging
from trainer.model.sizes import model_bytes
from trainer.model.task import LastDimCrossEntropyLoss, SupervisedTask, Task, per_sample, weigher

_TRIED = 3
"""Samples on which a task is tried."""
_MOST_COPIED = 2 << 30
"""Bytes of the largest model of which a copy is tried as it trains."""
_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.KLDivLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
"""torch's losses of outputs and targets of one shape; some of them broadcast others without a word."""
_log = logging.getLogger(__name__)


def check_model(model: Any) -> None:
    """Raise `ConfigError` for a model that cannot be trained, or not as its author means it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and must be one torch.nn.Module: put several of them into one, "
            "such as torch.nn.ModuleList or ModuleDict, which a task calls as it likes"
        )
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(model).__name__}: give the module itself (model.module); gradients are "
            "summed over ranks by the trainer"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no parameter that needs a gradient, so there is nothing to train: leave some "
            "of them unfrozen (requires_grad)"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, and parameters that are trained are real numbers: hold it as "
                "torch.view_as_real(…), and take torch.view_as_complex(…) of it in forward"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the model'} is a SyncBatchNorm, which would not synchronise: ranks come and go, so each "
                "micro-batch is computed by itself, the same at any number of ranks. Use BatchNorm (with statistics of "
                "a micro-batch), GroupNorm or LayerNorm"
            )
    _refuse_hidden_modules(model)


def _refuse_hidden_modules(model: nn.Module) -> None:
    """Raise `ConfigError` for modules in a plain list or mapping, of which PyTorch does not know: their parameters
    would stay as they are."""
    known = set(map(id, model.parameters()))
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if attribute.startswith("_"):  # torch's own registers
                continue
            parameters = (each for part in held if isinstance(part, nn.Module) for each in part.parameters())
            if any(each.requires_grad and id(each) not in known for each in parameters):
                raise ConfigError(
                    f"{f'{name}.' * bool(name)}{attribute} is a {type(value).__name__} of modules, whose parameters "
                    "PyTorch does not find, so they would not be trained: use torch.nn.ModuleList or ModuleDict, or "
                    "freeze them (requires_grad_(False))"
                )


def check_task(task: Task) -> None:
    """Raise `ConfigError` for a task that has parameters of its own to train, which no optimizer would know."""
    for part in (task, *([task.criterion] if isinstance(task, SupervisedTask) else [])):
        if isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters()):
            raise ConfigError(
                f"{type(part).__name__} has parameters of its own, which would not be trained: make them a part of the "
                "model, or freeze them (requires_grad_(False))"
            )


def try_task(model: nn.Module, task: Task, data: TrainingData, batch_size: int, thorough: bool = True) -> None:
    """Try the task on the first samples of each split, and as it trains; ``thorough``: else on those of the training
    split only, which makes lazy modules what they are. Raise `ConfigError` for a loss or a metric that is not one real
    number per sample, and for what broadcasts; errors of the caller's own code are raised as they are, those of another
    split with its name."""
    with _trial_of(model) as device:
        judging = Judging(task, model)
        for split in SPLITS if thorough else SPLITS[:1]:
            if count := min(_TRIED, data.count(split)):
                try:
                    batch = data.read(split, np.arange(count, dtype=np.int64), device)
                    judging.figures(batch, count)
                except Exception as error:
                    if split == SPLITS[0]:
                        raise
                    first = str(error).partition("\n")[0]
                    raise ConfigError(
                        f"the first samples of the {split} split cannot be judged, and those of the training split "
                        f"can ({type(error).__name__}: {first}): give both the same structure"
                    ) from error
    if thorough:
        _refuse_broadcast(model, task, data)
        _try_as_it_trains(model, task, data, batch_size)


def _refuse_broadcast(model: nn.Module, task: Task, data: TrainingData) -> None:
    """Raise `ConfigError` where outputs and targets are of different shapes and are compared all the same, each sample
    with each other one."""
    sizes = [count for count in (2, _TRIED) if count <= data.count("train")]
    with _trial_of(model) as device, torch.enable_grad():
        shapes = []
        for count in sizes:
            batch = data.read("train", np.arange(count, dtype=np.int64), device)
            if isinstance(task, SupervisedTask):
                _compare_shapes(task, model(batch[0]), batch[1])
            shapes.append(tuple(task.loss(model, batch).shape))
    squares = [shape[1:2] == (count,) for shape, count in zip(shapes, sizes, strict=True)]
    if len(sizes) > 1 and all(squares):
        raise ConfigError(
            f"the loss of {sizes[-1]} samples has the shape {shapes[-1]}: each sample is compared with each other one, "
            "as where (B, 1) meets (B,). Give both one shape, or reduce the loss to (B,) yourself"
        )


def _compare_shapes(task: SupervisedTask, outputs: Any, target: Any) -> None:
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return
    shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(target.shape)}"
    remedy = "give both one shape, such as outputs.squeeze(1) or target.unsqueeze(1)"
    if isinstance(task.criterion, _ELEMENTWISE) and outputs.shape != target.shape:
        raise ConfigError(f"{type(task.criterion).__name__} compares {shapes} by broadcasting: {remedy}")
    for name, figure in {"the loss": task.criterion, **task.figures}.items():
        found = figure(outputs, target)
        if isinstance(found, Tensor) and found.numel() > max(outputs.numel(), target.numel()):
            what = name if name == "the loss" else f"the metric {name!r}"
            raise ConfigError(f"{what} of {shapes} has the shape {tuple(found.shape)}, by broadcasting: {remedy}")


def _try_as_it_trains(model: nn.Module, task: Task, data: TrainingData, batch_size: int) -> None:
    """Try a copy of model and task as they train, forward and backward, unless the model is large or cannot be
    copied."""
    count = min(_TRIED, batch_size, data.count("train"))
    if model_bytes(model).parameters > _MOST_COPIED:
        return
    try:
        model, task = copy.deepcopy((model, task))
    except Exception as error:
        _log.info("the model cannot be copied, so it was not tried as it trains: %s", error)
        return
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batch = data.read("train", np.arange(count, dtype=np.int64), device)
    model.train()
    with torch.random.fork_rng(devices=[]):
        try:
            losses = per_sample(task.loss(model, batch), count, "the loss", summed=weigher(task) is not None)
            losses.sum().backward()
        except (RuntimeError, ValueError) as error:
            if count == 1 and "more than 1 value per channel" in str(error):
                raise ConfigError(
                    f"training.batch_size_per_gpu = {batch_size}, and BatchNorm trains on no fewer than two samples: "
                    "raise it to 2"
                ) from error
            if "process group has not been initialized" not in str(error):
                raise
            raise ConfigError(
                "the model or its task calls torch.distributed, which has no group here: ranks come and go, so each "
                "micro-batch is computed by itself, the same at any number of ranks. Leave such calls out; a larger "
                "training.batch_size_per_gpu puts more samples into one micro-batch"
            ) from error


def choose_usual_loss(model: nn.Module, data: TrainingData) -> Callable[[Any, Any], Tensor]:
    """Return the usual loss for the targets of the first samples. Raise `ConfigError` where none is usual."""
    remedy = "give Trainer(…, loss=…), such as torch.nn.CrossEntropyLoss(), or a task for batches of another structure"
    with _trial_of(model) as device:
        batch = data.read("train", _first_positions(data), torch.device("cpu"))
        if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise ConfigError(f"batches are no pairs (inputs, target), so there is no usual loss for them: {remedy}")
        target = batch[1]
        outputs = model(move_to(batch[0], device))
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    shapes = f"outputs of {shape} and targets of {tuple(target.shape)}, {target.dtype}"
    if isinstance(outputs, Tensor) and not target.is_floating_point() and outputs.dim() == target.dim() + 1 > 1:
        is_second = outputs.shape[:1] + outputs.shape[2:] == target.shape
        is_last = outputs.shape[:-1] == target.shape
        if is_second and is_last and outputs.dim() > 2:
            raise ConfigError(
                f"of {shapes}, the classes may be the second dimension, as torch has it, or the last: give Trainer(…, "
                "loss=torch.nn.CrossEntropyLoss()) for the second, or trainer.losses.LastDimCrossEntropyLoss() for the "
                "last"
            )
        if is_second or is_last:
            _log.info("the loss is the cross entropy: targets are classes")
            return nn.CrossEntropyLoss() if is_second else LastDimCrossEntropyLoss()
    if isinstance(outputs, Tensor) and target.is_floating_point() and outputs.shape == target.shape:
        _log.info("the loss is the squared error: targets are numbers")
        return nn.MSELoss()
    raise ConfigError(f"no loss is usual for {shapes}: {remedy}")


@contextmanager
def _trial_of(model: nn.Module) -> Iterator[torch.device]:
    """Let the model be tried in the block, without gradients and as in an evaluation; yield its device. What torch only
    warns of, where a loss broadcasts, is an error."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    except UserWarning as error:
        raise ConfigError(f"the loss compares outputs and targets of different shapes: {error}") from error
    finally:
        model.train(was_training)


def _first_positions(data: TrainingData) -> NDArray[np.int64]:
    return np.arange(min(_TRIED, data.count("train")), dtype=np.int64)

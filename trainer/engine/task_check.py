"""What a caller's model, loss and data are held against before anything is trained: tried on the first samples.

A mistake is told here with its remedy, on the machine of its author. What a task is belongs to `trainer.model.task`.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import move_to
from trainer.data.loader import TrainingData
from trainer.data.manifest import SPLITS
from trainer.data.sampler import spread_positions
from trainer.evaluation.evaluate import evaluation_mode
from trainer.evaluation.judge import TaskScorer, measured_by
from trainer.evaluation.measures import try_measures
from trainer.model.sizes import model_bytes
from trainer.model.task import (
    LastDimCrossEntropyLoss,
    SupervisedTask,
    Task,
    mean_of,
    measures_of,
    per_sample,
    weigher,
)
from trainer.runtime.nested import map_leaves

_TRIED = 3
"""Samples on which a task is tried."""
_MEASURED = 16
"""Samples of which the mean of a loss is compared with the trainer's."""
_MOST_COPIED = 2 << 30
"""Bytes of the largest model of which a copy is tried as it trains."""
_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.KLDivLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
"""torch's losses of outputs and targets of one shape; some of them broadcast others without a word."""
_OF_SHAPES = "Using a target size"
"""How torch's warning of a loss that broadcasts begins."""
_log = logging.getLogger(__name__)


def check_model(model: Any) -> None:
    """Raise `ConfigError` for a model that cannot be trained, or not as its author means it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and must be one torch.nn.Module: put several of them into one, "
            "such as torch.nn.ModuleList or ModuleDict, which a task can call as it needs"
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
        if parameter.is_complex() and parameter.requires_grad:
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


def check_task(task: Task) -> None:
    """Raise `ConfigError` for what is no task, and for one that has parameters of its own to train, which no optimizer
    would know."""
    if not callable(getattr(task, "loss", None)):
        raise ConfigError(
            f"task is a {type(task).__name__}, which has no method loss(model, batch): give what compares outputs with "
            "targets as loss"
        )
    for part in (task, *([task.criterion] if isinstance(task, SupervisedTask) else [])):
        if isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters()):
            raise ConfigError(
                f"{type(part).__name__} has parameters of its own, which would not be trained: make them a part of the "
                "model, or freeze them (requires_grad_(False))"
            )


def try_task(
    model: nn.Module, task: Task, data: TrainingData, config: DistributedTrainingConfig, thorough: bool = True
) -> None:
    """Try the task on the first samples of each split, and as it trains; ``thorough``: else on those of the training
    split only, which makes lazy modules what they are. Raise `ConfigError` for a loss or a metric that is not one real
    number per sample, for what broadcasts, and for a mean that is another than the trainer's; errors of the caller's
    own code are raised as they are, those of another split with its name."""
    batch_size = config.batch_size_per_gpu
    with _trial_of(model) as device, _explained(batch_size, config):
        scorer, names = TaskScorer(task, model), list[str]()
        for split in SPLITS if thorough else SPLITS[:1]:
            if count := min(_TRIED, batch_size, data.count(split)):
                try:
                    batch = data.read(split, np.arange(count, dtype=np.int64), device)
                    figures = scorer.figures(batch, count)
                    if split == SPLITS[0]:
                        names = [name for name in figures if name]
                        if measures := measures_of(task):
                            with torch.no_grad():
                                names += try_measures(measures, measured_by(task)(model, batch))
                except Exception as error:
                    if split == SPLITS[0]:
                        raise
                    first = str(error).partition("\n")[0]
                    raise ConfigError(
                        f"the first samples of the {split} split cannot be evaluated, but those of the training "
                        f"split can ({type(error).__name__}: {first}): give both the same structure"
                    ) from error
                if thorough and count > 1:
                    with torch.enable_grad():
                        _refuse_broadcast(model, task, batch, count)
        _refuse_unknown_monitor(config, names)
        if thorough and isinstance(task, SupervisedTask):
            _refuse_other_mean(model, task, data, batch_size, device)
    if thorough:
        _try_as_it_trains(model, task, data, config)


def try_scores(model: nn.Module, task: Task, data: TrainingData, config: DistributedTrainingConfig) -> None:
    """Try what evaluates in a loop of the caller's own, on the first samples of the splits that are evaluated. Raise
    as `try_task`."""
    with _trial_of(model) as device:
        for split in SPLITS[1:]:
            if count := min(_TRIED, config.batch_size_per_gpu, data.count(split)):
                batch = data.read(split, np.arange(count, dtype=np.int64), device)
                figures = TaskScorer(task, model).figures(batch, count)
                _refuse_unknown_monitor(config, [name for name in figures if name])


def _refuse_unknown_monitor(config: DistributedTrainingConfig, names: Sequence[str]) -> None:
    """Raise `ConfigError` where the weights would be chosen by a figure that is not measured, or by one of two of a
    name. ``names``: of the loss, the metrics and the measures; of a measure that gives several, perhaps only its
    own."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two metrics are named {twice[0]!r}: give them different names")
    if config.monitor not in names and not any(config.monitor.startswith(f"{name}_") for name in names):
        raise ConfigError(
            f"training.monitor = {config.monitor!r} is not measured: choose one of {', '.join(names)}, or add it to "
            "the metrics"
        )


def _refuse_broadcast(model: nn.Module, task: Task, batch: Any, count: int) -> None:
    """Raise `ConfigError` where outputs and targets are of different shapes and are compared all the same, each sample
    with each other one."""
    if not isinstance(task, SupervisedTask):
        shape = task.loss(model, batch).shape
        if shape[1:2] == (count,) and _mixes(lambda given: task.loss(model, given), batch, count):
            raise ConfigError(
                f"the loss of {count} samples has the shape {tuple(shape)}: every sample is compared with every "
                "other one, as when (B, 1) meets (B,). Give both one shape, or reduce the loss to (B,) yourself"
            )
        return
    outputs, target = model(batch[0]), batch[1]
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor) or outputs.shape == target.shape:
        return
    shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(target.shape)}"
    remedy = "give both one shape, such as outputs.squeeze(1) or target.unsqueeze(1)"
    if type(task.criterion) in _ELEMENTWISE:
        raise ConfigError(f"{type(task.criterion).__name__} compares {shapes} by broadcasting: {remedy}")
    if outputs.squeeze().shape != target.squeeze().shape:
        return
    for name, figure in {"the loss": task.criterion, **task.figures}.items():
        if _mixes(partial(figure, outputs), target, count):
            what = name if name == "the loss" else f"the metric {name!r}"
            raise ConfigError(
                f"{what} of {shapes} compares every sample with every other one, by broadcasting: {remedy}"
            )


def _mixes(figure: Callable[[Any], Tensor], given: Any, count: int) -> bool:
    """Return whether the first sample's figure depends on the second sample."""

    def first_of(value: Any) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return per_sample(figure(value), count, "the loss")[0].detach()

    try:
        return not torch.allclose(
            first_of(given), first_of(_map_tensors(given, count)), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    except Exception:  # other samples than those that the data have
        return False


def _map_tensors(given: Any, count: int) -> Any:
    """Return a batch whose second sample has other numbers."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) != count:
            return tensor
        changed, first, second = tensor.clone(), tensor[0], tensor[1]
        if tensor.is_floating_point() or tensor.is_complex():
            changed[1] = 0.5 * second + 0.25  # which a probability stays with that
        else:
            changed[1] = second == 0 if torch.equal(first, second) else first
        return changed

    return map_leaves(lambda part: change(part) if isinstance(part, Tensor) else part, given)


def _refuse_other_mean(
    model: nn.Module, task: SupervisedTask, data: TrainingData, batch_size: int, device: torch.device
) -> None:
    """Raise `ConfigError` for a loss that takes another mean of these samples by itself than the trainer does."""
    given = task.given
    if not isinstance(given, nn.Module) or getattr(given, "reduction", "none") not in ("mean", "batchmean"):
        return
    positions = spread_positions(data.count("train"), min(_MEASURED, batch_size))
    batch = data.read("train", positions, device)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        outputs = model(batch[0])
        torch.manual_seed(0)
        expected = task.judge(given, outputs, batch[1]).item()
        torch.manual_seed(0)
        losses = per_sample(
            task.judge(task.criterion, outputs, batch[1]), len(positions), "the loss", summed=task.weights is not None
        )
        weights = len(losses) if task.weights is None else task.weights(batch).sum().item()
    found = mean_of(losses.sum().item(), weights)
    if math.isfinite(expected) and not math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"{type(given).__name__} with reduction={given.reduction!r} is {expected:.6g} for {len(positions)} "
            f"samples, and the mean of what it gives for each with reduction='none' is {found:.6g}: the trainer "
            "divides by the number of samples, or by what a task's weights(batch) returns. Give the loss with "
            "reduction='none' if that is what you mean, otherwise a task that has weights"
        )


def _try_as_it_trains(model: nn.Module, task: Task, data: TrainingData, config: DistributedTrainingConfig) -> None:
    """Try a copy of model and task as they train, forward and backward, on as many samples as the smallest micro-batch
    has; unless the model is large or cannot be copied, of which only the attributes are looked at."""
    hidden, own = _find_hidden(model), [*model.parameters()]
    try:
        is_large = model_bytes(model).parameters > _MOST_COPIED
        copied = None if is_large else copy.deepcopy((model, task))
    except Exception as error:
        _log.info("the model cannot be copied, so it was not tried in training mode: %s", error)
        copied = None
    if copied is None:
        if hidden:
            raise ConfigError(_UNTRAINED.format(next(iter(hidden.values()))))
        return
    before = [parameter.grad for parameter in own]
    model, task = copied
    hidden |= _find_hidden(model)
    known = set(map(id, [*own, *model.parameters()]))  # a function may refer to the model itself
    count = min(_TRIED, config.batch_size_per_gpu, max(1, data.count("train") // config.micro_batches))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.train()

    def find_losses() -> Tensor:
        batch = data.read("train", np.arange(count, dtype=np.int64), device)
        return per_sample(task.loss(model, batch), count, "the loss", summed=weigher(task) is not None)

    with torch.random.fork_rng(devices=[]), _explained(count, config):
        losses = find_losses()
        if not losses.requires_grad:
            raise ConfigError(
                "the loss depends on no parameter of the model that needs a gradient: is it computed under no_grad, "
                "or from something that was detached?"
            )
        others = [leaf for leaf in _leaves_of(losses) if id(leaf) not in known]
        losses.sum().backward()
        if others:  # those that are there again were not made for this batch
            again = set(map(id, _leaves_of(find_losses())))
            for leaf in others:
                if id(leaf) in again:
                    what = hidden.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)} that the loss depends on")
                    raise ConfigError(_UNTRAINED.format(what))
    for parameter, gradient in zip(own, before, strict=True):
        parameter.grad = gradient


_UNTRAINED = (
    "{}, which needs a gradient, is not a parameter of the model, so it would not be trained: hold it as a "
    "torch.nn.Parameter, or its module in torch.nn.ModuleList or ModuleDict, or freeze it (requires_grad_(False))"
)


def _find_hidden(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters that are in a plain list or mapping, of which PyTorch does not know."""
    known, found = set(map(id, model.parameters())), dict[int, str]()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if attribute.startswith("_"):  # torch's own registers
                continue
            for part in held:
                for each in part.parameters() if isinstance(part, nn.Module) else ():
                    if each.requires_grad and id(each) not in known:
                        where = f"{f'{name}.' * bool(name)}{attribute}"
                        found[id(each)] = f"a parameter in {where}, a {type(value).__name__} of modules"
    return found


def _leaves_of(losses: Tensor) -> list[Tensor]:
    """Return the tensors at which the gradients of these losses end."""
    seen, ahead, found = set[Any](), [losses.grad_fn], list[Tensor]()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        ahead += [following for following, _ in node.next_functions]
    return found


@contextmanager
def _explained(count: int, config: DistributedTrainingConfig) -> Iterator[None]:
    """Let errors in the block that say nothing of dtrain name what is to be done."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if count == 1 and "more than 1 value per channel" in str(error):
            raised = "raise it to 2"
            why, remedy = f"training.batch_size_per_gpu = {config.batch_size_per_gpu}", raised
            if config.batch_size_per_gpu > 1:
                why = f"training.world_size x gradient_accumulation_steps = {config.micro_batches} micro-batches"
                remedy = "use fewer ranks, less accumulation, or more data"
            raise ConfigError(
                f"{why} leaves one sample per micro-batch, but BatchNorm needs at least two: {remedy}"
            ) from error
        if "process group has not been initialized" not in str(error):
            raise
        raise ConfigError(
            "the model or its task calls torch.distributed, which has no group here: ranks come and go, so each "
            "micro-batch is computed by itself, the same at any number of ranks. Remove such calls; a larger "
            "training.batch_size_per_gpu puts more samples into one micro-batch"
        ) from error


def choose_usual_loss(model: nn.Module, data: TrainingData) -> Callable[[Any, Any], Tensor]:
    """Return the usual loss for the targets of the first samples. Raise `ConfigError` where none is usual."""
    remedy = "give Trainer(…, loss=…), such as torch.nn.CrossEntropyLoss(), or a task for batches of another structure"
    with _trial_of(model) as device:
        batch = data.read("train", _first_positions(data), torch.device("cpu"))
        if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise ConfigError(f"batches are not pairs (inputs, target), so no loss can be chosen for them: {remedy}")
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
    raise ConfigError(f"there is no usual loss for {shapes}: {remedy}")


@contextmanager
def _trial_of(model: nn.Module) -> Iterator[torch.device]:
    """Let the model be tried in the block, without gradients and as in an evaluation; yield its device. What torch only
    warns of, where a loss broadcasts, is an error."""
    try:
        with evaluation_mode(model), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", _OF_SHAPES, UserWarning)
            yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    except UserWarning as error:
        if _OF_SHAPES not in str(error):
            raise
        raise ConfigError(f"the loss compares outputs and targets of different shapes: {error}") from error


def _first_positions(data: TrainingData) -> NDArray[np.int64]:
    return np.arange(min(_TRIED, data.count("train")), dtype=np.int64)

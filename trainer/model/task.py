"""What a training minimises: a loss for each sample of a batch, and the figures that are reported beside it.

A task knows the structure of its batches; a model, its data and its optimizer are not known here.

The loss of a global batch is one mean over all its samples, on whichever ranks and in whichever micro-batches they are:
the sum of the samples' losses, divided by the sum of their weights. A sample weighs 1 where its task does not say
otherwise (`Task`). torch's losses of classes weigh it by its classes, and by 0 where it is ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.runtime.nested import map_leaves


@runtime_checkable
class Task(Protocol):
    """The interface of a task. A class of your own needs `loss`; all else is optional: the method
    ``metrics(model, batch)``, which returns further figures per sample by name, the method ``weights(batch)``, and the
    attribute ``measures``, a mapping of `Measure` by name, with the method ``measured(model, batch)``, which returns
    the arguments of their updates as a tuple.

    ``weights(batch)`` returns what each sample, or each of its elements, weighs: (B, …), of any real type. Then the
    loss of a global batch is the sum of all that `loss` returns, divided by the sum of all weights: such as the mean
    over tokens that are no padding, where `loss` is 0 and the weight is 0 for padding.
    """

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return one loss per sample of the batch, shape (B,) or (B, …); of more dimensions the mean counts, or the sum
        where the task has weights."""
        ...


@runtime_checkable
class Measure(Protocol):
    """The interface of a figure of a whole split, such as those of torchmetrics. It is held on the CPU."""

    def update(self, *given: Any) -> object:
        """Take a batch: what the task's ``measured`` returns, as a rule outputs and targets."""
        ...

    def compute(self) -> Any:
        """Return the figure of all batches since the last reset: a number, or several by name."""
        ...

    def reset(self) -> object:
        """Forget all batches."""
        ...


Weigh = Callable[[Any], Tensor]
"""Returns the weights of a batch's samples or of their elements, (B, …)."""


class SupervisedTask:
    """The task of a model whose batches are pairs (inputs, target): ``criterion(model(inputs), target)``."""

    def __init__(
        self,
        criterion: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Callable[[Any, Any], Tensor] | Measure] | None = None,
    ) -> None:
        """``criterion`` returns one loss per sample; torch's own losses are taken as they are. ``metrics`` return one
        figure per sample, of which means are reported, or are measures of a whole split (`Measure`). Raise
        `ConfigError` for a loss whose mean is none over samples."""
        self.given = criterion
        """The loss as it was given, which `criterion` does not reduce."""
        self.criterion, self._weigh_target = unreduced(criterion)
        given = dict(metrics or {})
        self.measures = {name: each for name, each in given.items() if isinstance(each, Measure)}
        """The measures of a whole split, by name."""
        self.figures = {name: each for name, each in given.items() if not isinstance(each, Measure)}
        """The metrics of single samples, by name."""
        self.weights: Weigh | None = None if self._weigh_target is None else self._weigh
        """As `Task` describes; None where each sample weighs 1."""

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return the losses (B,) or (B, …). The criterion computes in float32 at least, also under autocast."""
        inputs, target = batch
        return self.judge(self.criterion, model(inputs), target)

    def metrics(self, model: Callable[..., Any], batch: Any) -> dict[str, Tensor]:
        """Return the figures (B,) by name."""
        if not self.figures:
            return {}
        inputs, target = batch
        outputs = model(inputs)
        return {name: self.judge(metric, outputs, target) for name, metric in self.figures.items()}

    def measured(self, model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
        """Return outputs, in float32 at least, and targets."""
        inputs, target = batch
        outputs = model(inputs)
        return (widened(outputs) if isinstance(outputs, Tensor) else outputs), target

    def _weigh(self, batch: Any) -> Tensor:
        assert self._weigh_target is not None
        return self._weigh_target(batch[1])

    @staticmethod
    def judge(judge: Callable[[Any, Any], Tensor], outputs: Any, target: Any) -> Tensor:
        """Return what a loss or a metric gives, in float32 at least, also under autocast."""
        if not isinstance(outputs, Tensor):
            return judge(outputs, target)
        kind = outputs.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return judge(widened(outputs), target)
        return judge(widened(outputs), target)


def measures_of(task: Task) -> Mapping[str, Measure]:
    """Return the measures of a task, by name."""
    found: Mapping[str, Measure] = getattr(task, "measures", None) or {}
    return found


class RememberedModel:
    """A model that is called once for each input: a task's loss, metrics and measures then share its outputs."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._known: tuple[Any, Any] | None = None

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs for these inputs, in memory of their own: a loss may change what it is given."""
        if self._known is None or self._known[0] is not inputs:
            self._known = inputs, self._model(inputs)
        return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._known[1])


def weigher(task: Task) -> Weigh | None:
    """Return the method ``weights`` of a task, None where each sample weighs 1."""
    found: Weigh | None = getattr(task, "weights", None)
    return found if callable(found) else None


def mean_of(total: float, weight: float) -> float:
    """Return the mean of losses from their sum and their samples' weight; 0 where none of the samples counts."""
    return total / weight if weight else 0.0


def widened(values: Tensor) -> Tensor:
    """Return values of half precision as float32, and others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def per_sample(losses: object, count: int, what: str, summed: bool = False) -> Tensor:
    """Return losses, figures or weights of a batch as one per sample, shape (count,), float32 at least: the mean over
    all other dimensions, or with ``summed`` the sum. ``what`` names their origin. Raise `ConfigError` if there is not
    at least one real number for each."""
    if isinstance(losses, Tensor) and losses.dim() and len(losses) == count and not losses.is_complex():
        values = widened(losses)
        if values.dim() == 1:
            return values
        return values.flatten(1).sum(1) if summed else values.flatten(1).mean(1)
    got = f"shape {tuple(losses.shape)}, {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
    raise ConfigError(
        f"{what} gave {got} for a batch of {count} samples, and must give one real number per sample, shape "
        f"({count},): use reduction='none'. The mean over the global batch is taken by the trainer, which divides "
        "batches among nodes as they come and go" + _explain_fewer(losses, count)
    )


def _explain_fewer(losses: object, count: int) -> str:
    if not isinstance(losses, Tensor) or not losses.dim() or not 0 < len(losses) < count:
        return ""
    return (
        "; if the collate function leaves samples out, leave them out of the dataset instead (torch.utils.data.Subset)"
    )


def unreduced(loss: Callable[[Any, Any], Tensor]) -> tuple[Callable[[Any, Any], Tensor], Weigh | None]:
    """Return the loss with one figure per sample, and what a target weighs (None: 1 for each sample). torch's own
    losses are copied with ``reduction='none'``, others are left as they are. Raise `ConfigError` for one whose mean is
    none over samples."""
    reduction = getattr(loss, "reduction", "none")
    if not isinstance(loss, nn.Module):
        return loss, None
    is_of_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and (
        reduction == "mean" or type(loss).forward in _OF_CLASSES  # `trainer.engine.task_check` compares the means
    )
    if reduction == "batchmean":
        return _without_reduction(loss), lambda target: torch.ones(len(target), device=target.device)
    if reduction not in ("mean", "none"):
        raise ConfigError(
            f"{type(loss).__name__} has reduction={reduction!r}, and the trainer takes means over samples: use 'mean', "
            "or 'none' and scale the losses yourself"
        )
    if reduction == "mean":
        loss = _without_reduction(loss)
    # Whoever asks for losses that are not reduced has their weights counted in the losses alone.
    return loss, ClassWeights(loss, counts_weight=reduction == "mean") if is_of_classes else None


def _without_reduction(loss: nn.Module) -> Any:
    loss = copy.deepcopy(loss)
    vars(loss)["reduction"] = "none"
    return loss


class LastDimCrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's cross entropy for outputs whose last dimension is that of the classes, as language models have them:
    outputs (B, …, C), targets (B, …)."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss, with the classes moved to where torch has them."""
        return super().forward(input.movedim(-1, 1), target)


_OF_CLASSES = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, LastDimCrossEntropyLoss.forward)


@dataclass(frozen=True, slots=True)
class ClassWeights:
    """What the targets of a loss of classes weigh: by the weight of their class, and nothing where they are ignored."""

    loss: Any
    counts_weight: bool
    """Whether the mean is divided by the weights of classes."""

    def __call__(self, target: Tensor) -> Tensor:
        """Return the weights (B, …) of targets (B, …), or of probabilities of classes (B, C, …), each of which
        counts once."""
        if target.is_floating_point():
            return torch.ones(target.shape[:1] + target.shape[2:], device=target.device)
        kept = target != self.loss.ignore_index
        if self.loss.weight is None or not self.counts_weight:
            return kept.float()
        return torch.where(kept, self.loss.weight[target.where(kept, 0)], 0.0)

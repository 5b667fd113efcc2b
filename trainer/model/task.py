"""What a training minimises: a loss for each sample of a batch, and the figures that are reported beside it.

A task knows the structure of its batches; a model, its data and its optimizer are not known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainer.config import ConfigError


@runtime_checkable
class Task(Protocol):
    """The interface of a task. A class of your own needs `loss`; `metrics` is optional."""

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return one loss per sample of the batch, shape (B,), float32."""
        ...


class SupervisedTask:
    """The task of a model whose batches are pairs (inputs, target): ``criterion(model(inputs), target)``."""

    def __init__(
        self, criterion: Callable[[Any, Any], Tensor], metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None
    ) -> None:
        """``criterion`` returns one loss per sample; ``metrics`` return one figure per sample, of which means are
        reported."""
        self.criterion = criterion
        self._metrics = dict(metrics or {})

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return the losses (B,). The criterion computes in float32, also under autocast."""
        inputs, target = batch
        return self._judge(self.criterion, model(inputs), target)

    def metrics(self, model: Callable[..., Any], batch: Any) -> dict[str, Tensor]:
        """Return the figures (B,) by name."""
        if not self._metrics:
            return {}
        inputs, target = batch
        outputs = model(inputs)
        return {name: self._judge(metric, outputs, target) for name, metric in self._metrics.items()}

    @staticmethod
    def _judge(judge: Callable[[Any, Any], Tensor], outputs: Any, target: Any) -> Tensor:
        if not isinstance(outputs, Tensor):
            return judge(outputs, target)
        kind = outputs.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return judge(outputs.float(), target)
        return judge(outputs.float(), target)


def per_sample(losses: object, count: int, what: str) -> Tensor:
    """Return losses or figures of a batch as one per sample, shape (count,): the mean over all other dimensions.
    ``what`` names their origin. Raise `ConfigError` if there is not at least one for each sample."""
    if isinstance(losses, Tensor) and losses.dim() and len(losses) == count:
        return losses if losses.dim() == 1 else losses.flatten(1).mean(1)
    got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise ConfigError(
        f"{what} gave {got} for a batch of {count} samples, and must give one figure per sample, shape ({count},): "
        "use reduction='none'. The mean over the global batch is taken by the trainer, which divides batches among "
        "nodes as they come and go"
    )


def unreduced(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return the loss with one figure per sample: torch's own losses are copied with ``reduction='none'``, others are
    left as they are. Raise `ConfigError` for one whose mean is no mean over samples."""
    reduction = getattr(loss, "reduction", "none")
    if not isinstance(loss, nn.Module) or reduction not in ("mean", "sum", "batchmean"):
        return loss
    name = type(loss).__name__
    if getattr(loss, "weight", None) is not None and "CrossEntropy" in name:
        raise ConfigError(
            f"{name} with weights of classes divides by their sum over the batch, which depends on how batches are "
            "divided: give it reduction='none', and every sample counts by its weight"
        )
    if reduction != "mean":
        raise ConfigError(f"{name} has reduction={reduction!r}, and the trainer takes means over samples: use 'none'")
    loss = copy.deepcopy(loss)
    vars(loss)["reduction"] = "none"
    return loss

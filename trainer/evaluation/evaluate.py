"""The evaluation of a split, whatever its data and its scores.

Every sample counts exactly once. Ranks take whole batches, the same at any world size, and sums are taken in float64:
the result does not depend on how many ranks there are. Memory does not grow with the split: of more than `MOST_JUDGED`
samples single scores are kept of that many, at even distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trainer.config import ConfigError
from trainer.data.batches import find_odd_row
from trainer.data.loader import TrainingData
from trainer.data.sampler import spread_positions

if TYPE_CHECKING:
    from trainer.comm.world import World

Array = NDArray[np.float64]
EVAL_BATCH = 1024
Scores = tuple[Mapping[str, Any], Mapping[str, Array]]
"""Of a batch: what adds up over batches and ranks, numbers or arrays by name; and scores of single samples (n,). Where
``loss`` is in both, a sample whose loss is no finite number is named."""
Scorer = Callable[[Any, int], Scores]
"""Returns the scores of a batch of so many samples."""


class SharedWork:
    """The division of work among the ranks of a world, such that its result does not depend on their number: each does
    whole blocks, in order. Without a ``world`` this process does everything."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self.rank, self.size = (world.rank, world.world_size) if world else (0, 1)

    def part(self, count: int, block: int = 1) -> tuple[int, int]:
        """Return this rank's positions [first, last) of ``count``; they begin and end between two blocks."""
        blocks = -(-count // block)
        first, last = (min(count, block * (blocks * place // self.size)) for place in (self.rank, self.rank + 1))
        return first, last

    def gather(self, value: Any) -> list[Any]:
        """Return one small value of each rank, as JSON has it. A collective; ranks may come to it at very different
        times."""
        if self._world is None:
            return [value]
        self._world.barrier()
        return self._world.all_gather_object(value)

    def sum(self, values: Array) -> Array:
        """Return the sum over ranks, same shape. A collective, as `gather`."""
        if self._world is None:
            return values
        self._world.barrier()
        return self._world.all_reduce(torch.from_numpy(np.ascontiguousarray(values))).numpy()

    def join(self, part: Array, first: int, count: int) -> Array:
        """Return the parts of all ranks (``count``, …), each from its ``first`` place on. A collective, as `gather`."""
        whole = np.zeros((count, *part.shape[1:]))
        whole[first : first + len(part)] = part
        return self.sum(whole)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Have a model evaluate in the block, and leave each of its modules in its mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # the whole comes first, then its parts
            if module.training != training:
                module.train(training)  # some take back in it what they did to evaluate, such as weights they merged


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRequest:
    """What a judgement needs of the training that asks for it."""

    model: nn.Module
    world: World
    device: torch.device
    batch_size: int
    before_batch: Callable[[], object] = lambda: None
    """Called before each batch; it may raise, to end the judgement."""
    replaying: Callable[[nn.Module], AbstractContextManager[Any]] = lambda _: nullcontext()
    """Returns a context in which the passes of a model that evaluates may be replayed."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the model evaluate, and leave it in its mode."""
        with evaluation_mode(self.model), self.replaying(self.model):
            yield

    def score(self, scorer: Scorer, data: TrainingData, split: str, keeps: bool = False) -> SplitScores:
        """Return what `score_split` gives for the model. A collective."""
        work = SharedWork(self.world)
        with self.evaluating():
            return score_split(scorer, data, split, work, self.batch_size, self.device, self.before_batch, keeps)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``loss`` is the mean per sample and ``metrics`` what could be judged beside it, equal on all ranks."""

    samples: int
    loss: float
    metrics: dict[str, float]
    why: str = ""
    """Why the loss is no finite number, where it is none and that is known."""
    has_odd_sample: bool = False
    """Whether that is because a sample has a number that is not finite."""

    def figure(self, name: str) -> float:
        """Return the loss or a metric. Raise `ConfigError` for one that was not measured."""
        if name != "loss" and name not in self.metrics:
            known = ", ".join(["loss", *self.metrics])
            raise ConfigError(f"training.monitor = {name!r} is not measured: choose one of {known}")
        return self.loss if name == "loss" else self.metrics[name]


@dataclass(frozen=True, slots=True)
class SplitScores:
    """The scores of a split, equal on all ranks."""

    samples: int
    sums: dict[str, Array]
    """What adds up, as a scorer gives it: () or (n,)."""
    kept: dict[str, Array]
    """Scores of single samples at the positions `trainer.data.sampler.spread_positions`; empty unless asked for."""
    why: str
    has_odd_sample: bool

    def evaluation(self, loss: float, metrics: Mapping[str, float]) -> Evaluation:
        """Return the evaluation with this mean loss and these means."""
        return Evaluation(self.samples, loss, dict(metrics), self.why, self.has_odd_sample)


def score_split(
    scorer: Scorer,
    data: TrainingData,
    split: str,
    work: SharedWork,
    batch_size: int,
    device: torch.device,
    before_batch: Callable[[], object] = lambda: None,
    keeps: bool = False,
) -> SplitScores:
    """Return the scores of all samples of a split; a collective. ``keeps``: those of single ones, too. Raise ValueError
    for an empty split."""
    count = data.count(split)
    if count == 0:
        raise ValueError(f"the split {split!r} of the dataset has no samples, so there is nothing to evaluate")
    kept = spread_positions(count) if keeps else np.arange(0)
    first, last = work.part(count, batch_size)
    parts = [np.arange(start, min(start + batch_size, last)) for start in range(first, last, batch_size)]
    sums: dict[str, Any] = {}
    each: dict[str, list[Array]] = {}
    odd: tuple[int, bool, str] | None = None
    for positions, batch in zip(parts, data.read_each(split, parts, device), strict=True):
        before_batch()
        added, single = scorer(batch, len(positions))
        for name, values in added.items():
            sums[name] = sums.get(name, 0.0) + values
        if odd is None and not math.isfinite(sums.get("loss", 0.0)):
            odd = describe_odd(batch, single["loss"], positions)
        if keeps:
            begin, end = np.searchsorted(kept, (positions[0], positions[-1] + 1))
            for name, values in single.items():
                each.setdefault(name, []).append(values[kept[begin:end] - positions[0]])
    # A rank without samples knows no names: all use those of the first that has some.
    told = work.gather([[[name, np.size(values)] for name, values in sums.items()], list(each), odd])
    names, columns, _ = max(told, key=lambda each: len(each[0]))
    flat = work.sum(np.concatenate([np.reshape(sums.get(name, np.zeros(size)), -1) for name, size in names]))
    edges = np.cumsum([0, *(size for _, size in names)])
    totals = {name: flat[edges[at] : edges[at + 1]] for at, (name, _) in enumerate(names)}
    table = np.zeros((len(columns), len(kept)))
    for row, name in zip(table, columns, strict=True):
        mine = np.concatenate([np.empty(0), *each.get(name, ())])
        row[(begin := np.searchsorted(kept, first)) : begin + len(mine)] = mine
    singles = dict(zip(columns, work.sum(table) if columns else table, strict=True))
    _, has_odd_sample, why = min((each[2] for each in told if each[2]), default=(0, False, _TOO_LARGE))
    is_finite = bool(np.isfinite(totals.get("loss", np.zeros(1))).all())
    return SplitScores(count, totals, singles, "" if is_finite else why, has_odd_sample and not is_finite)


_TOO_LARGE = "the sum of its losses is too large"


def describe_odd(batch: Any, losses: Array, positions: NDArray[np.int64]) -> tuple[int, bool, str]:
    """Return the first position of a batch whose loss is not finite, whether that is for its data, and a sentence."""
    rows = np.flatnonzero(~np.isfinite(losses))
    position = int(positions[rows[0] if len(rows) else 0])
    found = find_odd_row(batch, torch.from_numpy(losses))
    if found is None:
        return position, False, f"sample {position} is the first whose loss is not a number, though its data are finite"
    row, name, value = found
    position = int(positions[row])
    return position, True, f"sample {position} has {value} in {name}: fix that sample, or leave it out"

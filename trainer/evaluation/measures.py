"""Measures of a whole split, such as an F1 score, which no mean of single samples is: by the protocol of torchmetrics.

Rank 0 has them update with the outputs of all ranks, batch by batch in the order of the split, as one process would. So
each sample counts once, and the figure is the same at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.comm.state_passing import pass_state
from trainer.config import ConfigError
from trainer.model.task import Measure
from trainer.runtime.nested import find_odd_part, leaves_of, map_leaves

if TYPE_CHECKING:
    from trainer.comm.world import World

RESERVED = ("loss", "samples")
"""Names of figures in reports that no metric may have."""
MOST_KEPT = 1 << 30
"""The most bytes of outputs of a split that a rank keeps until they are measured."""


class KeptOutputs:
    """What this rank's batches of a split give to measures, on the CPU."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self._bytes = 0

    def add(self, given: tuple[Any, ...]) -> None:
        """Keep the arguments of an update. Raise `ConfigError` where they are too many."""
        kept = map_leaves(_on_cpu, given)
        self._bytes += sum(leaf.nbytes for leaf in leaves_of(kept) if isinstance(leaf, Tensor))
        if self._bytes > MOST_KEPT:
            raise ConfigError(
                f"the outputs of a split for measures are more than {MOST_KEPT >> 30} GiB on one rank: give a task "
                "whose method measured(model, batch) returns only what its measures need, such as the class of each "
                "sample"
            )
        self.batches.append(kept)


def measure_together(measures: Mapping[str, Measure], kept: KeptOutputs, world: World) -> dict[str, float]:
    """Return the figures of measures over what all ranks have kept, the same on all. A collective. Raise `ConfigError`
    for a measure that fails, or that is no number."""
    told: list[Any] = ["", {}]
    ranks = range(1, world.world_size)
    for measure in measures.values() if world.rank == 0 else ():
        measure.reset()
    try:
        _update(measures, kept.batches if world.rank == 0 else ())
    except ConfigError as error:
        told[0] = str(error)
    for rank in ranks:
        world.barrier()  # which has the patience for what rank 0 does alone
        passed = pass_state(world, rank, [0], lambda: {"batches": kept.batches})
        try:
            if passed is not None and not told[0]:
                _update(measures, passed["batches"])
        except ConfigError as error:  # told to all below: nobody may leave the order of collectives
            told[0] = str(error)
    if world.rank == 0 and not told[0]:
        try:
            told[1] = figures_of(measures)
        except ConfigError as error:
            told[0] = str(error)
        for measure in measures.values():
            measure.reset()
    world.barrier()
    why, figures = world.all_gather_object(told)[0]
    if why:
        raise ConfigError(why)
    found: dict[str, float] = figures
    return found


SHUFFLES = 20
"""How often targets are shuffled to tell what a measure is by chance."""


def measure_by_chance(measures: Mapping[str, Measure], figure: str, kept: KeptOutputs, world: World) -> list[float]:
    """Return a figure of one of these measures with the targets of other samples, for `SHUFFLES` orders of all targets
    of the split, the same on all ranks; empty where what the measure is given is no pair of tensors, or too large for
    one rank. A collective."""
    chosen = {name: each for name, each in measures.items() if figure == name or figure.startswith(f"{name}_")}
    batches = list(kept.batches) if world.rank == 0 else []
    held = [sum(leaf.nbytes for leaf in leaves_of(kept.batches) if isinstance(leaf, Tensor))]
    if sum(each for [each] in world.all_gather_object(held)) > MOST_KEPT:
        return []
    for rank in range(1, world.world_size):
        world.barrier()
        passed = pass_state(world, rank, [0], lambda: {"batches": kept.batches})
        batches += passed["batches"] if passed is not None else []
    found: list[float] = []
    if world.rank == 0 and all(_is_pair(each) for each in batches):
        outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        chance = torch.Generator().manual_seed(0)
        try:
            for _ in range(SHUFFLES):
                for measure in chosen.values():
                    measure.reset()
                _update(chosen, [(outputs, targets[torch.randperm(len(targets), generator=chance)])])
                found.append(figures_of(chosen)[figure])
        except ConfigError:  # it knows these targets only with these outputs
            found.clear()
        for measure in chosen.values():
            measure.reset()
    world.barrier()
    told: list[float] = world.all_gather_object(found)[0]
    return told


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(part, Tensor) and part.dim() > 0 for part in given)
        and len(given[0]) == len(given[1])
    )


def figures_of(measures: Mapping[str, Measure]) -> dict[str, float]:
    """Return the figures of measures by name; of one that gives several by name, each with that behind a ``_``. Raise
    `ConfigError` for one that fails, or is no number."""
    found: dict[str, float] = {}
    for name, measure in measures.items():
        try:
            value = measure.compute()
        except Exception as error:
            raise ConfigError(f"the measure {name!r} could not be computed: {type(error).__name__}: {error}") from error
        several = (
            {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        )
        for called, each in several.items():
            number = each.item() if getattr(each, "size", None) == 1 or _is_single(each) else each
            if isinstance(number, bool) or not isinstance(number, int | float):
                shape = f" of shape {tuple(each.shape)}" if isinstance(each, Tensor) else ""
                raise ConfigError(
                    f"the measure {name!r} computed a {type(each).__name__}{shape}, and must give one number, or some "
                    "by name (such as average='macro' instead of one for each class)"
                )
            if called in RESERVED:
                raise ConfigError(
                    f"a measure is named {called!r}, which every report already uses: give it another name"
                )
            found[called] = float(number)
    return found


def try_measures(measures: Mapping[str, Measure], given: tuple[Any, ...]) -> list[str]:
    """Try measures on a few samples, and return the names of their figures; of one that cannot be computed of so few
    its own. Raise `ConfigError` as `measure_together` does."""
    if (odd := find_odd_part(given)) is not None:
        raise ConfigError(
            f"measures are given a {type(odd).__name__}, and get tensors and plain values, in dictionaries, lists and "
            "tuples, which ranks can send: let the task's method measured return these"
        )
    for measure in measures.values():
        measure.reset()
    _update(measures, [map_leaves(_on_cpu, given)])
    names: list[str] = []
    for name, measure in measures.items():
        try:
            measure.compute()
        except Exception:
            names.append(name)
        else:
            names += figures_of({name: measure})
        measure.reset()
    return names


def _update(measures: Mapping[str, Measure], batches: Iterable[Any]) -> None:
    for given in batches:
        for name, measure in measures.items():
            try:
                measure.update(*given)
            except Exception as error:
                raise ConfigError(
                    f"the measure {name!r} could not be updated: {type(error).__name__}: {error}"
                ) from error


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value  # a loss may change its inputs

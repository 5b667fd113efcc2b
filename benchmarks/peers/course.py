"""Contestants in turns: what is chosen for them, the rounds, and the losses in the end."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from benchmarks.peers.contestant import Contestant, ContestantError, Stretch
from benchmarks.peers.turns import Case
from trainer.config import DistributedTrainingConfig

PEERS = {
    "plain_ddp": "torch", "lightning": "lightning", "accelerate": "accelerate", "ray": "ray",
    "plain_ddp_malloc": "torch",
}  # fmt: skip
"""Others, and the package of each."""
MALLOC = "plain_ddp_malloc"
"""Is compared with plain DDP, and so has its settings."""
OURS = ("ours", "tuned")
CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": (0, 1, 2),
    "ddp": ({}, {"gradient_as_bucket_view": True, "static_graph": True}),
}
"""Fields of a case that each peer may choose, one after the other. The first value stands unless another gains."""
WARM_UP, REPORT = 10, 10
"""Steps before anything is measured, and of one report of ours: stretches are multiples of that."""
GAIN = 1.02
"""What a setting must gain in the search to be taken."""
HOPELESS = 0.9
"""What is slower than this share of the best so far in its first pair is not tried again."""
SEARCH = (
    ("precision", ("bf16",)), ("micro_batches", (2, 4)), ("prefetch_batches", (0, 2)), ("communication", ("fp16",)),
    ("compile", ("default", "reduce-overhead")),
)  # fmt: skip
"""Settings in the order in which they are tried, each with the best of those before it."""
_T = TypeVar("_T")


@dataclass
class Cell:
    """One model with one batch, and what was measured of each contestant, round by round."""

    case: Case
    steps: int = 0
    stretches: dict[str, list[Stretch]] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By peer, the fields of the case that are its own."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Seed by seed."""

    def case_of(self, name: str) -> Case:
        own = {"training": self.tuned} if name == "tuned" else self.chosen.get(name, {})
        return replace(self.case, **own)

    def seconds(self, name: str) -> list[float]:
        return [stretch.seconds / stretch.steps for stretch in self.stretches[name]]

    def ratios(self, one: str, other: str) -> list[float] | None:
        """Round by round, how many times as fast ``one`` is; None where one of them is missing."""
        if one not in self.stretches or other not in self.stretches:
            return None
        return [theirs / ours for ours, theirs in zip(self.seconds(one), self.seconds(other), strict=True)]


class Course:
    """Lets contestants train in turns."""

    def __init__(self, contestants: Sequence[Contestant], failed: dict[str, str], seconds: float, seed: int) -> None:
        self.contestants = {contestant.name: contestant for contestant in contestants}
        self.failed, self.seconds, self.order = failed, seconds, random.Random(seed)

    def run(self, cell: Cell, rounds: int) -> None:
        """All rounds of a cell. A contestant that fails is left out from there on, and its part of this cell too."""
        names = list(self.contestants)
        for name in names:
            case = cell.case_of(name)
            self._try(name, lambda contestant, case=case: self._warm(contestant, case))
        measured = [name for name in names if name in self.contestants]
        found: list[dict[str, Stretch]] = []
        for _ in range(rounds):
            stretches: dict[str, Stretch] = {}
            for name in self.order.sample(measured, len(measured)):
                stretch = self._try(name, lambda contestant: contestant.stretch(cell.steps))
                if stretch is not None:
                    stretches[name] = stretch
            found.append(stretches)
        for name in measured:
            self._try(name, lambda contestant: contestant.end() or True)
        cell.stretches = {name: [part[name] for part in found] for name in measured if name in self.contestants}

    def measure_out(self, cell: Cell) -> None:
        """How many steps a stretch has: of the bound's, about as many as the seconds hold."""
        bound = self.contestants["bound"]
        self._warm(bound, cell.case)
        stretch = bound.stretch(WARM_UP)
        bound.end()
        cell.steps = REPORT * max(1, round(self.seconds * WARM_UP / stretch.seconds / REPORT))

    def choose(self, cell: Cell, pairs: int) -> None:
        """For each peer by itself, what of `CHOICES` it is fastest with."""
        for name in [name for name in PEERS if name in self.contestants and name != MALLOC]:
            chosen, best = {setting: values[0] for setting, values in CHOICES.items()}, 0.0
            for setting, values in CHOICES.items():
                for value in values[bool(best) :]:  # with the first one it has been measured already
                    case = replace(cell.case, **{**chosen, setting: value})
                    gain = self.gain(name, case, "bound", cell, pairs, HOPELESS * best)
                    if gain > (GAIN * best if best else 0.0):
                        chosen, best = {**chosen, setting: value}, gain
            cell.chosen[name] = chosen
        if MALLOC in self.contestants:
            cell.chosen[MALLOC] = cell.chosen.get("plain_ddp", {})

    def search(self, cell: Cell, pairs: int) -> dict[str, Any]:
        """Settings with which ours is fastest at the same global batch, one after the other."""
        best: dict[str, Any] = {}
        best_gain = 1.0
        for setting, values in SEARCH:
            base = dict(best)
            for value in values:
                override = overrides(setting, value, cell.case)
                if override is None:
                    continue
                candidate = base | override
                case = replace(cell.case, training=candidate)
                gain = self.gain("tuned", case, "ours", cell, pairs, HOPELESS * best_gain)
                say(f"  {candidate}: {gain:.3f} times as fast")
                if gain > GAIN * best_gain:
                    best, best_gain = candidate, gain
        return best

    def gain(self, name: str, case: Case, reference: str, cell: Cell, pairs: int, least: float) -> float:
        """How many times as fast a contestant is with this case as the reference with the cell's; 0 where it fails.
        Only one pair is measured where that is less than ``least``."""
        one, other = self.contestants[name], self.contestants[reference]
        if other.case is None:
            self._warm(other, cell.case)
        steps, ratios = max(REPORT, cell.steps // 2 // REPORT * REPORT), []
        try:
            self._warm(one, case)
            for _ in range(pairs):
                stretches = {item.name: item.stretch(steps) for item in self.order.sample([one, other], 2)}
                ratios.append(stretches[reference].seconds / stretches[name].seconds)
                if ratios[0] < least:
                    break
            one.end()
        except ContestantError as error:
            say(f"  {error}")
            return 0.0
        return statistics.median(ratios)

    def judge(self, cell: Cell, steps: int, seeds: int) -> None:
        """Validation losses after so many steps, seed by seed."""
        for name in [name for name in (*OURS, "plain_ddp") if name in self.contestants]:
            contestant = self.contestants[name]
            for seed in range(cell.case.seed, cell.case.seed + seeds):
                contestant.begin(replace(cell.case_of(name), seed=seed, judged_after=steps))
                contestant.stretch(steps)
                cell.losses.setdefault(name, []).append(contestant.end())

    def rest(self) -> None:
        """Whoever stands in a case leaves it."""
        for contestant in self.contestants.values():
            if contestant.case is not None:
                contestant.end()

    def close(self) -> None:
        for contestant in self.contestants.values():
            contestant.close()

    def _warm(self, contestant: Contestant, case: Case) -> bool:
        contestant.begin(case)
        contestant.stretch(WARM_UP)
        return True

    def _try(self, name: str, action: Callable[[Contestant], _T]) -> _T | None:
        """Of a peer, a failure is noted; the benchmark goes on without it. None then."""
        contestant = self.contestants.get(name)
        if contestant is None:
            return None
        try:
            return action(contestant)
        except ContestantError as error:
            if name not in PEERS:
                raise
            say(str(error))
            self.failed[name] = str(error)
            del self.contestants[name]
            contestant.close()
            return None


def overrides(setting: str, value: Any, case: Case) -> dict[str, Any] | None:
    """The fields that make a choice; None where it cannot be chosen here."""
    if setting == "micro_batches":
        if case.batch % value:
            return None
        return {"batch_size_per_gpu": case.batch // value, "gradient_accumulation_steps": value}
    if setting not in {known.name for known in fields(DistributedTrainingConfig)}:
        return None
    if getattr(case, setting, None) == value:
        return None
    if setting == "compile" and case.device == "cpu":  # takes half a minute to be slower
        return None
    return {setting: value}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

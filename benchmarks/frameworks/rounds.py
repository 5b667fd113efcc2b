"""Frameworks in turns: the choice of their options, the rounds, and the losses in the end."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.frameworks.framework_process import FrameworkProcess, FrameworkProcessError, Measurement, start
from benchmarks.frameworks.protocol import Case
from benchmarks.host import note
from trainer.config import DistributedTrainingConfig
from trainer.tuning.verdict import is_surely_faster

FRAMEWORKS = {
    "plain_ddp": "torch",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "ray": "ray",
    "plain_ddp_malloc": "torch",
    "plain_ddp_tuned": "torch",
}
"""Names of the others, and the package of each."""
MALLOC = "plain_ddp_malloc"
"""The framework that is compared with plain DDP, and therefore has its options."""
TUNED_PEER = "plain_ddp_tuned"
"""Plain DDP with malloc set as in ours, at the fastest settings that a search over the space of ours has found."""
LOCKSTEP = "bound_lockstep"
"""The bound's intervals if its ranks had waited for each other after each step: computed, not another framework."""
OURS = ("ours", "tuned")
"""Names under which the trainer of this project trains."""
OTHER_DDP = (MALLOC, TUNED_PEER)
"""Variants of plain DDP, which begin with its options."""
NEEDED = ("bound", "ours")
"""Frameworks without which there are no ratios."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": (0, 1, 2),
    "ddp": ({}, {"gradient_as_bucket_view": True, "static_graph": True}),
}
"""Fields of a case that each of the others may choose, one after the other. The first value stands unless another
gains."""
PEER_SEARCH: dict[str, tuple[Any, ...]] = {"precision": ("bf16",), "micro_batches": (2, 4), "hook": ("fp16",)}
"""Settings that `TUNED_PEER` may choose besides `CHOICES`: those of `SEARCH`, as plain DDP has them."""
INTERVAL_SECONDS = 0.5
"""Duration of an interval of the bound, about; half of it in searches."""
PAIRS = 2
"""Pairs of intervals for each candidate of a search."""
REPORT, LEAST_STEPS = 10, 3
"""Steps of one report of ours (longer intervals are multiples of it), and steps of the shortest interval."""
LEAST_ROUNDS = 2
"""Rounds that are done even if the time is up."""
SEARCH_SHARE = 0.5
"""Share of a cell's time that the search for the tuned settings may take."""
GAIN = 1.02
"""Factor by which a setting must gain in the search to be taken."""
CONFIRMING_PAIRS = 12
"""Pairs of intervals, after the search, in which the settings that were found must be faster than those of the others
beyond noise (the rule of `dtrain tune`): the figures of the search served the choice."""
HOPELESS = 0.9
"""A candidate that is slower than this share of the best so far in its first pair is not measured again."""
SEARCH = (
    ("precision", ("bf16",)),
    ("micro_batches", (2, 4)),
    ("prefetch_batches", (0, 2)),
    ("communication", ("fp16",)),
)
"""Settings in the order in which they are tried, each with the best of those before it. Not ``compile``, which
takes half a minute and makes the step slower."""
_T = TypeVar("_T")


@dataclass
class Cell:
    """A model with a batch, and the measurements of each framework, round by round."""

    case: Case
    steps: int = 0
    """Steps of an interval."""
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By framework, the fields of the case that are its own."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Validation losses by framework, seed by seed."""
    step_seconds: float = 0.0
    """Seconds of a step of the bound, roughly."""
    missing: list[str] = field(default_factory=list)
    """Parts that failed or that there was no time for."""

    @property
    def name(self) -> str:
        """The model and the batch, as text for people."""
        return f"{self.case.model}, {self.case.batch} per rank"

    def case_of(self, name: str) -> Case:
        """Return the case with the framework's own options."""
        own = {"training": self.tuned} if name == "tuned" else self.chosen.get(name, {})
        return replace(self.case, **own)

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of a step of a framework, round by round."""
        return [interval.seconds / interval.steps for interval in self.measurements[name]]

    def ratios(self, one: str, other: str) -> list[float] | None:
        """Return, round by round, how many times as fast ``one`` is as ``other``; None where one of them is missing."""
        if one not in self.measurements or other not in self.measurements:
            return None
        return [theirs / ours for ours, theirs in zip(self.seconds(one), self.seconds(other), strict=True)]

    def interval_of(self, seconds: float) -> int:
        """Return the number of steps that the bound takes in about ``seconds``."""
        steps = round(seconds / self.step_seconds)
        return steps // REPORT * REPORT if steps >= REPORT else max(LEAST_STEPS, steps)


class Rounds:
    """Lets frameworks train in turns. Times (``until``) are those of `time.monotonic`."""

    def __init__(self, names: Sequence[str], ranks: int, folder: Path) -> None:
        self.ranks, self.folder, self.order = ranks, folder, random.Random(0)
        self.frameworks: dict[str, FrameworkProcess] = {}
        self.failed: dict[str, str] = {}
        """Reasons of failures, by framework, or by framework and cell."""
        self._wanted, self._starts = list(names), 0
        self._choices: dict[int, dict[str, dict[str, Any]]] = {}

    def gather(self) -> None:
        """Start all frameworks that do not run; one that does not start is not tried again."""
        if not (absent := [name for name in self._wanted if name not in self.frameworks]):
            return
        self._starts += 1
        folder = self.folder / str(self._starts)
        folder.mkdir()
        started, failed = start(absent, self.ranks, folder)
        self.frameworks |= {framework.name: framework for framework in started}
        self.failed |= failed
        self._wanted = [name for name in self._wanted if name not in failed]

    def run(self, cell: Cell, rounds: int, until: float) -> None:
        """Run all rounds of a cell, or as many as there is time for. The measurements of a framework that fails are
        dropped."""
        wanted = list(self.frameworks)
        for name in wanted:
            case = cell.case_of(name)
            self._try(name, cell, lambda framework, case=case: self._warm(framework, case, cell))
        began = time.monotonic()
        for number in range(rounds):
            each = (time.monotonic() - began) / max(1, number)
            if number >= LEAST_ROUNDS and time.monotonic() + each > until:
                break
            names = [name for name in wanted if name in self.frameworks]
            found: dict[str, Measurement] = {}
            for name in self.order.sample(names, len(names)):
                interval = self._try(name, cell, lambda framework: framework.measure(cell.steps))
                if interval is not None:
                    found[name] = interval
            found[LOCKSTEP] = found["bound"]._replace(seconds=found["bound"].lockstep_seconds)
            # In one assignment: the benchmark may be stopped at any moment, and reports whole rounds only.
            cell.measurements = {name: [*cell.measurements.get(name, []), interval] for name, interval in found.items()}
        self.rest()

    def measure_out(self, cell: Cell) -> None:
        """Set the number of steps of an interval: as many as the bound takes in about `INTERVAL_SECONDS`."""
        bound = self.frameworks["bound"]
        bound.begin(cell.case)
        bound.measure(LEAST_STEPS)
        cell.step_seconds = bound.measure(LEAST_STEPS).seconds / LEAST_STEPS  # exact enough to choose a longer interval
        steps = cell.interval_of(INTERVAL_SECONDS / 2)
        cell.step_seconds = bound.measure(steps).seconds / steps
        bound.end()
        cell.steps = cell.interval_of(INTERVAL_SECONDS)

    def choose(self, cell: Cell, until: float) -> None:
        """Find the fastest values of `CHOICES` for each of the others, with the first model of each batch."""
        known = self._choices.setdefault(cell.case.batch, {})
        for name in [name for name in FRAMEWORKS if name in self.frameworks and name not in (*OTHER_DDP, *known)]:
            chosen, best = {setting: values[0] for setting, values in CHOICES.items()}, 0.0
            for setting, values in CHOICES.items():
                for value in values[bool(best) :]:  # the first value is already measured, with the options before
                    if time.monotonic() > until:
                        cell.missing.append(f"choice of {setting} for {name}")
                        break
                    case = replace(cell.case, **{**chosen, setting: value})
                    gain = self.gain(name, case, "bound", cell, PAIRS, HOPELESS * best)
                    if gain > (GAIN * best if best else 0.0):
                        chosen, best = {**chosen, setting: value}, gain
            cell.chosen[name] = chosen
            if best:
                known[name] = chosen
        cell.chosen |= known
        for name in OTHER_DDP:
            if name in self.frameworks:
                cell.chosen[name] = cell.chosen.get("plain_ddp", {})
        self.rest()

    def tune_peer(self, cell: Cell, until: float) -> None:
        """Let plain DDP choose among the settings that ours may choose: one after the other, each with the best of
        those before it. What it has found counts only if it is still faster than its start in pairs of their own."""
        if TUNED_PEER not in self.frameworks:
            return
        start = {**cell.chosen[TUNED_PEER]}
        best, best_gain = start, self.gain(TUNED_PEER, replace(cell.case, **start), "bound", cell, PAIRS, 0.0)
        for setting, values in PEER_SEARCH.items():
            base = dict(best)
            for value in values:
                if setting == "micro_batches" and cell.case.batch % value:
                    continue
                if time.monotonic() > until:
                    cell.missing.append(f"trial of {setting} {value} for {TUNED_PEER}")
                    continue
                candidate = {**base, setting: value}
                if candidate.get("micro_batches", 1) > 1:  # a static graph has every pass summed
                    candidate["ddp"] = {name: on for name, on in base.get("ddp", {}).items() if name != "static_graph"}
                gain = self.gain(
                    TUNED_PEER, replace(cell.case, **candidate), "bound", cell, PAIRS, HOPELESS * best_gain
                )
                note(f"  {TUNED_PEER} {candidate}: {gain:.3f} of the bound")
                if gain > GAIN * best_gain:
                    best, best_gain = candidate, gain
        if best != start:
            again = [
                self.gain(TUNED_PEER, replace(cell.case, **chosen), "bound", cell, CONFIRMING_PAIRS, 0.0)
                for chosen in (start, best)
            ]
            best = best if again[1] > again[0] else start
        cell.chosen[TUNED_PEER] = best
        self.rest()

    def search(self, cell: Cell, until: float) -> dict[str, Any]:
        """Return the settings with which ours is fastest at the same global batch, tried one after the other; none
        where they are not faster beyond noise in pairs of their own."""
        best: dict[str, Any] = {}
        best_gain = 1.0
        for setting, values in SEARCH:
            base = dict(best)
            for value in values:
                override = overrides(setting, value, cell.case)
                if override is None or "tuned" not in self.frameworks:
                    continue
                if time.monotonic() > until:
                    cell.missing.append(f"trial of {setting} {value}")
                    continue
                candidate = base | override
                case = replace(cell.case, training=candidate)
                gain = self.gain("tuned", case, "ours", cell, PAIRS, HOPELESS * best_gain)
                note(f"  {candidate}: {gain:.3f} times as fast")
                if gain > GAIN * best_gain:
                    best, best_gain = candidate, gain
        if best:
            case = replace(cell.case, training=best)
            ratios = self._pairs("tuned", case, "ours", cell, CONFIRMING_PAIRS, 0.0)
            if not ratios or not is_surely_faster(ratios):
                note(f"  {best}: not faster beyond noise in {len(ratios)} pairs of their own; ours stays as it is")
                best = {}
        self.rest()
        return best

    def gain(self, name: str, case: Case, reference: str, cell: Cell, pairs: int, least: float) -> float:
        """Return how many times as fast a framework is with this case as the reference with the cell's; 0 where it
        fails. Only one pair is measured if its ratio is less than ``least``."""
        ratios = self._pairs(name, case, reference, cell, pairs, least)
        return statistics.median(ratios) if ratios else 0.0

    def _pairs(self, name: str, case: Case, reference: str, cell: Cell, pairs: int, least: float) -> list[float]:
        """Return the ratios of `gain`, pair by pair; none where the framework fails."""
        one, other = self.frameworks[name], self.frameworks[reference]
        if other.case is None or other.is_broken:
            self._warm(other, cell.case, cell)
        steps = cell.interval_of(INTERVAL_SECONDS / 2)
        ratios: list[float] = []
        try:
            self._warm(one, case, cell)
            for _ in range(pairs):
                intervals = {item.name: item.measure(steps) for item in self.order.sample([one, other], 2)}
                ratios.append(intervals[reference].seconds / intervals[name].seconds)
                if ratios[0] < least:
                    break
            one.end()
        except FrameworkProcessError as error:
            note(f"  {error}")
            return []
        return ratios

    def judge(self, cell: Cell, steps: int, seeds: int, until: float) -> None:
        """Measure validation losses after ``steps`` steps, seed by seed, while there is time."""
        # Without settings of its own, tuned is ours, number for number.
        judged = [name for name in (*OURS, "plain_ddp") if cell.tuned or name != "tuned"]
        took = self.judging_seconds(cell, steps, 1)
        for seed in range(cell.case.seed, cell.case.seed + seeds):
            began = time.monotonic()
            if began + took > until:
                cell.missing.append(f"losses of {cell.case.seed + seeds - seed} of {seeds} seeds")
                break
            found: dict[str, float] = {}
            for name in judged:
                case = replace(cell.case_of(name), seed=seed, judged_after=steps)
                loss = self._try(name, cell, lambda framework, case=case: _loss(framework, case, steps))
                if loss is not None:
                    found[name] = loss
            if not cell.tuned and "tuned" in self.frameworks:
                found["tuned"] = found["ours"]
            cell.losses = {name: [*cell.losses.get(name, []), loss] for name, loss in found.items()}
            took = time.monotonic() - began

    def judging_seconds(self, cell: Cell, steps: int, seeds: int) -> float:
        """Return the seconds that `judge` takes, roughly: training, and two seconds to begin and to evaluate."""
        return seeds * (3 if cell.tuned else 2) * (2.0 + 1.3 * steps * cell.step_seconds)

    def rest(self) -> None:
        """Let all frameworks leave their cases; end those that cannot."""
        for name, framework in [*self.frameworks.items()]:
            if framework.case is not None or framework.is_broken:
                try:
                    framework.end()
                except FrameworkProcessError as error:
                    note(f"  {error}")
                    self._drop(name)

    def close(self) -> None:
        """End all frameworks."""
        for framework in self.frameworks.values():
            framework.close()

    def _warm(self, framework: FrameworkProcess, case: Case, cell: Cell) -> bool:
        framework.begin(case)
        framework.measure(min(REPORT, cell.interval_of(INTERVAL_SECONDS / 2)))
        return True

    def _try(self, name: str, cell: Cell, action: Callable[[FrameworkProcess], _T]) -> _T | None:
        """Return the result of an action on a framework. If it fails, record that, end the framework, which is started
        again for the next cell, and return None; raise where the framework is needed."""
        framework = self.frameworks.get(name)
        if framework is None:
            return None
        try:
            return action(framework)
        except FrameworkProcessError as error:
            if name in NEEDED:
                raise
            note(f"  {error}")
            self.failed[f"{name}: {cell.name}"] = str(error)
            self._drop(name)
            return None

    def _drop(self, name: str) -> None:
        self.frameworks[name].close()  # before it is removed: after an interruption here, `close` ends it again
        del self.frameworks[name]


def _loss(framework: FrameworkProcess, case: Case, steps: int) -> float:
    framework.begin(case)
    framework.measure(steps)
    return framework.end()


def overrides(setting: str, value: Any, case: Case) -> dict[str, Any] | None:
    """Return the fields that make a choice; None where it cannot be chosen here."""
    if setting == "micro_batches":
        if case.batch % value:
            return None
        return {"batch_size_per_gpu": case.batch // value, "gradient_accumulation_steps": value}
    if setting not in {known.name for known in fields(DistributedTrainingConfig)}:
        return None
    if getattr(case, setting, None) == value:
        return None
    return {setting: value}

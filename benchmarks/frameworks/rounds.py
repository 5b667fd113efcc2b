"""Frameworks in turns: the choice of their options, and the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.frameworks.framework_process import FrameworkProcess, FrameworkProcessError, Measurement, start
from benchmarks.frameworks.protocol import Case
from benchmarks.host import note

FRAMEWORKS = {
    "plain_ddp": "torch",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "ray": "ray",
    "plain_ddp_malloc": "torch",
}
"""Names of the others, and the package of each."""
MALLOC = "plain_ddp_malloc"
"""The framework that is compared with plain DDP, and therefore has its options."""
LOCKSTEP = "bound_lockstep"
"""The bound's intervals if its ranks had waited for each other after each step: computed, not another framework."""
NEEDED = ("bound", "ours")
"""Frameworks without which there are no ratios."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": (0, 1, 2),
    "ddp": ({}, {"gradient_as_bucket_view": True, "static_graph": True}),
}
"""Fields of a case that each of the others may choose, one after the other. The first value stands unless another
gains."""
INTERVAL_SECONDS = 0.5
"""Duration of an interval of the bound, about; half of it in searches."""
PAIRS = 2
"""Pairs of intervals for each candidate of a search."""
REPORT, LEAST_STEPS = 10, 3
"""Steps of one report of ours (longer intervals are multiples of it), and steps of the shortest interval."""
LEAST_ROUNDS = 2
"""Rounds that are done even if the time is up."""
GAIN = 1.02
"""Factor by which a setting must gain in the search to be taken."""
HOPELESS = 0.9
"""A candidate that is slower than this share of the best so far in its first pair is not measured again."""
_T = TypeVar("_T")


@dataclass
class Cell:
    """A model with a batch, and the measurements of each framework, round by round."""

    case: Case
    steps: int = 0
    """Steps of an interval."""
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By framework, the fields of the case that are its own."""
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
        return replace(self.case, **self.chosen.get(name, {}))

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
        for name in [name for name in FRAMEWORKS if name in self.frameworks and name not in (MALLOC, *known)]:
            chosen, best = {setting: values[0] for setting, values in CHOICES.items()}, 0.0
            for setting, values in CHOICES.items():
                for value in values[bool(best) :]:  # the first value is already measured, with the options before
                    if time.monotonic() > until:
                        cell.missing.append(f"choice of {setting} for {name}")
                        break
                    case = replace(cell.case, **{**chosen, setting: value})
                    gain = self.gain(name, case, cell, HOPELESS * best)
                    if gain > (GAIN * best if best else 0.0):
                        chosen, best = {**chosen, setting: value}, gain
            cell.chosen[name] = chosen
            if best:
                known[name] = chosen
        cell.chosen |= known
        if MALLOC in self.frameworks:
            cell.chosen[MALLOC] = cell.chosen.get("plain_ddp", {})
        self.rest()

    def gain(self, name: str, case: Case, cell: Cell, least: float) -> float:
        """Return how many times as fast a framework is with this case as the bound with the cell's, the median of pairs
        of intervals; 0 where it fails. Only one pair is measured if its ratio is less than ``least``."""
        one, bound = self.frameworks[name], self.frameworks["bound"]
        if bound.case is None or bound.is_broken:
            self._warm(bound, cell.case, cell)
        steps = cell.interval_of(INTERVAL_SECONDS / 2)
        ratios: list[float] = []
        try:
            self._warm(one, case, cell)
            for _ in range(PAIRS):
                seconds = {item.name: item.measure(steps).seconds for item in self.order.sample([one, bound], 2)}
                ratios.append(seconds["bound"] / seconds[name])
                if ratios[0] < least:
                    break
            one.end()
        except FrameworkProcessError as error:
            note(f"  {error}")
            return 0.0
        return statistics.median(ratios)

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

"""The side-by-side measurement of candidates: what runs them, and in which order they are timed.

Which candidates there are is decided in `trainer.tuning.search`; what their figures mean, in `trainer.tuning.verdict`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from trainer.config import ConfigError
from trainer.tuning.search_space import TrialSettings
from trainer.tuning.verdict import LEAST_ROUNDS, LearningResult

MOST_ROUNDS, HALVED_FROM = 9, 3
"""The most rounds in which a group is compared, and the round from which on the slower challengers leave."""


class NotFinite(ConfigError):
    """The settings that others are compared with no longer train."""


class TrialRunner(Protocol):
    """The interface through which candidates are tried. Every method is a collective of all ranks and returns the same
    on all of them."""

    @property
    def elapsed(self) -> float:
        """The seconds of the budget that are spent."""

    def prepare(self, candidate: TrialSettings) -> str:
        """Make a candidate ready to run; return "" or why it cannot run. A candidate that is ready stays as it is."""

    def measure(self, candidate: TrialSettings) -> float:
        """Run some steps of real training; return samples per second, 0 if the loss is no longer finite."""

    def release(self, candidate: TrialSettings) -> None:
        """Free what the candidate holds."""

    def learn(self, candidate: TrialSettings, steps: int) -> LearningResult:
        """Train the candidate from its first weights, with the whole schedule of the learning rate, on the samples that
        the configuration has in ``steps`` steps."""

    def step_seconds(self, candidate: TrialSettings) -> float:
        """Return the seconds per step in the candidate's last measurement."""


def better_half(challengers: Sequence[TrialSettings], rates: dict[TrialSettings, list[float]]) -> list[TrialSettings]:
    """Return the challengers with the higher medians, in their order; at least one."""
    ranked = sorted(challengers, key=lambda item: statistics.median(rates[item]), reverse=True)
    kept = set(ranked[: -(-len(ranked) // 2)])
    return [item for item in challengers if item in kept]


def compare_throughput(
    runner: TrialRunner, incumbent: TrialSettings, challengers: Sequence[TrialSettings], until: float, limit: float,
    rounds: int = MOST_ROUNDS, halves: bool = False,
) -> dict[TrialSettings, list[float]]:  # fmt: skip
    """Return the samples per second of each candidate, round by round; the incumbent runs in all rounds.

    The comparison ends after ``rounds`` rounds; at ``until`` seconds of the budget, if there were enough rounds to
    decide; and at ``limit`` in any case, except for the first round. ``halves``: whether the slower challengers leave
    early. Raise `NotFinite` if the loss of the incumbent is not finite.
    """
    racing = list(challengers)
    rates: dict[TrialSettings, list[float]] = {item: [] for item in (incumbent, *racing)}
    for number in range(rounds):
        before = runner.elapsed
        order = [incumbent, *racing]
        for candidate in order if number % 2 == 0 else reversed(order):
            rates[candidate].append(runner.measure(candidate))
        if not rates[incumbent][-1]:
            raise NotFinite(
                f"the loss is not finite with the settings {incumbent.label}: lower training.learning_rate or set "
                "training.clip_norm before you tune"
            )
        if halves and number + 1 >= HALVED_FROM and (number + 1 - HALVED_FROM) % 2 == 0:
            kept = better_half(racing, rates)
            for candidate in racing:
                if candidate not in kept:
                    runner.release(candidate)
            racing = kept
        took = (runner.elapsed - before) / len(order)
        then = runner.elapsed + took * (1 + len(racing))
        if then > limit or (number + 1 >= LEAST_ROUNDS and then > until):
            break
    return rates

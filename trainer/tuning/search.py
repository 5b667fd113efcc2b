"""The order in which auto-tuning tries candidates, and what it decides from the figures, without a clock, a process or
a model.

One group of settings after the other is searched, each with the best found so far for all others. The settings hardly
depend on each other, so the cost is the sum of their numbers instead of the product for all combinations. A combination
of two settings that pay only together may be missed. Within a group all candidates are measured in turn, for short
times. Each figure of the search has served a choice, so the winner's is too good on average. Therefore the result is
compared with the baseline once more, with figures of its own. Only what is faster beyond noise then is recommended.
`trainer.tuning.verdict` says what a candidate's figures mean; `trainer.tuning.tuner` does what is decided here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.tuning.search_space import LAYOUT, SettingsGroup, TrialSettings, TuningContext, groups, layouts, share
from trainer.tuning.verdict import (
    LEAST_ROUNDS,
    LearningResult,
    Spread,
    estimate_gain,
    explain_worse_learning,
    gains,
    is_surely_faster,
    measure_spread,
    no_gain,
    tolerated,
    untold,
)

LEAST_SECONDS = 10.0
"""The smallest budget, in seconds, with which candidates can be compared."""
SEARCHING, JUDGING = 0.6, 0.2
"""The shares of the budget for comparing and for checking what is learned; the rest is for the comparison after the
search."""
MOST_AT_ONCE = 4
"""The most candidates that challenge the present settings at once: all are in memory."""
MOST_ROUNDS, MOST_FINAL_ROUNDS = 9, 25
"""The most rounds in which a group is compared, and those of the comparison after the search."""
MOST_JUDGED, LEAST_JUDGED = 300, 20
"""The most and the fewest steps after which validation losses are compared."""
RUNS = 4
"""The number of trainings that the time for judging must suffice for, one of them the baseline's."""
Rates = dict[TrialSettings, list[float]]
OUT_OF_MEMORY = "out of memory"
NO_TIME = "not tried: no time left"


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
        """Train the candidate from its first weights for ``steps`` steps, with the whole schedule of the learning
        rate."""

    def step_seconds(self, candidate: TrialSettings) -> float:
        """Return the seconds per step in the candidate's last measurement."""


@dataclass(kw_only=True)
class Search:
    """A search of all groups. Its fields hold what it has found so far, at any time."""

    config: DistributedTrainingConfig
    facts: TuningContext
    runner: TrialRunner
    seconds: float
    say: Callable[..., None] = lambda **_: None
    """Called with keywords that describe each action."""
    keep: Callable[[], None] = lambda: None
    """Called when something better may have been found."""
    baseline: TrialSettings = field(default_factory=TrialSettings)
    best: TrialSettings = field(default_factory=TrialSettings)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One row for each candidate: group, settings, verdict, and figures if there are any."""
    baseline_rate: Spread | None = None
    best_rate: Spread | None = None
    gain: Spread | None = None
    """The gain of the best settings over the baseline, when these two were last compared."""
    is_complete: bool = False
    _before: TrialSettings = field(default_factory=TrialSettings)
    """The settings that the best ones took the place of."""
    _judging_seconds: float = 0.0
    _judged_steps: int = 0
    _learned: LearningResult | None = None
    _measurement_seconds: float = 0.0
    _entry_seconds: float = 0.0
    """The longest measurement and the longest preparation so far, with all that is done around them."""

    def run(self) -> None:
        """Search all groups and confirm the result. Raise `ConfigError` if the configuration cannot be trained at
        all."""
        self._begin()
        parts = [group for group in groups(self.facts) if self._options(group)]
        for number, group in enumerate(parts):
            self._improve(group, self.runner.elapsed + share(parts[number:], self._limit - self.runner.elapsed))
            self.keep()
        self.is_complete = self._confirm()
        self.keep()

    @property
    def _limit(self) -> float:
        """The seconds of the budget at which searching must end, so that enough rounds are left to compare the result
        with the baseline once more."""
        return min(SEARCHING * self.seconds + self._judging_seconds, self.seconds - self._confirming_seconds)

    @property
    def _confirming_seconds(self) -> float:
        """The seconds that the shortest comparison with the baseline takes."""
        return LEAST_ROUNDS * 2 * self._measurement_seconds + self._entry_seconds

    def _options(self, group: SettingsGroup) -> list[TrialSettings]:
        now = replace(self.config, **dict(self.best.settings))
        return [self.best.but(changes) for changes in group.options(now, self.facts)]

    def _has_time(self, count: int) -> bool:
        """Return whether there is time for one more candidate and a conclusive comparison of ``count``."""
        needed = self._entry_seconds + LEAST_ROUNDS * count * self._measurement_seconds
        return self.runner.elapsed + needed <= self._limit

    def _enter(self, candidate: TrialSettings) -> str:
        before = self.runner.elapsed
        why = self.runner.prepare(candidate)
        if not why:
            self._entry_seconds = max(self._entry_seconds, self.runner.elapsed - before)
        return why

    def _compare(self, challengers: Sequence[TrialSettings], until: float, limit: float, rounds: int) -> Rates:
        """Return the samples per second of the best settings and of the challengers, round by round.

        The comparison ends after ``rounds`` rounds; at ``until`` seconds of the budget, if there were enough rounds to
        decide; and at ``limit`` in any case, except for the first round. Raise `NotFinite` if the loss of the best
        settings is not finite.
        """
        order = [self.best, *challengers]
        rates: Rates = {item: [] for item in order}
        for number in range(rounds):
            before = self.runner.elapsed
            for candidate in order if number % 2 == 0 else reversed(order):
                rates[candidate].append(self.runner.measure(candidate))
            if not rates[self.best][-1]:
                raise NotFinite(
                    f"the loss is not finite with the settings {self.best.label}: lower training.learning_rate or set "
                    "training.clip_norm before you tune"
                )
            took = self.runner.elapsed - before
            self._measurement_seconds = max(self._measurement_seconds, took / len(order))
            then = self.runner.elapsed + took
            if then > limit or (number + 1 >= LEAST_ROUNDS and then > until):
                break
        return rates

    def _begin(self) -> None:
        """Prepare the configuration itself, or, if that does not fit into memory, its largest micro-batch that does."""
        why = self.runner.prepare(self.baseline)
        for changes in layouts(self.config, self.facts):
            if why != OUT_OF_MEMORY:
                break
            if changes[LAYOUT[0]] > self.config.batch_size_per_gpu:
                continue
            self._add("layout", self.baseline, why)
            self.baseline = self.best = self._before = TrialSettings().but(changes)
            why = self.runner.prepare(self.baseline)
        if why:
            raise ConfigError(f"the training cannot be run as it is configured ({self.baseline.label}): {why}")

    def _improve(self, group: SettingsGroup, until: float) -> None:
        """Search one group; its best becomes the present settings where it pays and learns as much."""
        challengers: list[TrialSettings] = []
        if why := self._enter(self.best):  # one that had left, to be compared, or for what others learn
            return self._add(group.name, self.best, why)
        for candidate in self._options(group):
            left = until - self.runner.elapsed
            if len(challengers) == MOST_AT_ONCE:
                self._add(group.name, candidate, f"not tried: {MOST_AT_ONCE} others were")
            elif left <= group.least_seconds or not self._has_time(2 + len(challengers)):
                self._add(group.name, candidate, NO_TIME)
            elif why := self._enter(candidate):
                self._add(group.name, candidate, why)
            else:
                self.say(group=group.name, candidate=candidate.label, doing="ready")
                challengers.append(candidate)
        if not challengers:
            return
        try:
            rates = self._compare(challengers, until, self._limit, MOST_ROUNDS)
        except NotFinite:
            if self.best == self.baseline:
                raise
            return self._fall_back(group.name, challengers)
        found = {item: gains(rates[item], rates[self.best]) for item in challengers}
        chosen = None
        for candidate in sorted(challengers, key=lambda item: statistics.median(found[item]), reverse=True):
            if group.changes_numbers and chosen is None and is_surely_faster(found[candidate]):
                for other in (self.best, *challengers):  # another training has to find room beside it
                    if other != candidate:
                        self.runner.release(other)
            verdict, learned = self._verdict(group, found, chosen, candidate)
            if verdict == "chosen":
                chosen = candidate
            self._add(group.name, candidate, verdict, rates[candidate], found[candidate], learned)
        for candidate in (self.best, *challengers):
            if candidate != (chosen or self.best):
                self.runner.release(candidate)
        if chosen is not None:
            self.gain = measure_spread(found[chosen]) if self.best == self.baseline else None
            self._before, self.best = self.best, chosen

    def _fall_back(self, group: str, challengers: Sequence[TrialSettings]) -> None:
        """Return to the settings that were chosen before, because the last choice does not train for long."""
        for candidate in (self.best, *challengers):
            self.runner.release(candidate)
        broken, self.best, self._before = self.best, self._before, self.baseline
        self.gain = None
        self._add(group, broken, "its loss does not stay finite")

    def _verdict(
        self, group: SettingsGroup, found: Rates, chosen: TrialSettings | None, candidate: TrialSettings
    ) -> tuple[str, LearningResult | None]:
        if not is_surely_faster(found[candidate]):
            return no_gain(found[candidate]), None
        if chosen is not None:
            return "slower than the chosen one", None
        if not group.changes_numbers:
            return "chosen", None
        why, learned = self._judge(candidate)
        return why or "chosen", learned

    def _judge(self, candidate: TrialSettings) -> tuple[str, LearningResult | None]:
        """Return why a candidate does not learn as the configuration does, "" if it does. All runs have the same
        samples."""
        allowed = JUDGING * self.seconds
        if self._learned is None:
            step = self.runner.step_seconds(self.best)
            self._judged_steps = min(MOST_JUDGED, int(allowed / RUNS / step))
        if self._judged_steps < LEAST_JUDGED or self._judging_seconds > allowed:
            return "faster, but there is no time to see whether it learns as much", None
        before = self.runner.elapsed
        if self._learned is None:
            self.say(group="judging", candidate=self.baseline.label, doing=f"trains {self._judged_steps} steps")
            self._learned = self.runner.learn(self.baseline, self._judged_steps)
        learned = None
        if not (why := untold(self._learned, self._judged_steps)):
            self.say(group="judging", candidate=candidate.label, doing=f"trains {self._judged_steps} steps")
            learned = self.runner.learn(candidate, self._judged_steps)
            why = explain_worse_learning(learned, self._learned, self._judged_steps)
        self._judging_seconds += self.runner.elapsed - before
        return why, learned

    def _confirm(self) -> bool:
        """Compare the best settings with the baseline in the time that is left; return whether the comparison was
        conclusive. These are the figures that count: what is not faster beyond noise then is not recommended."""
        found_best, self.best, self.gain = self.best, self.baseline, Spread(1.0, 1.0, 1.0)
        rivals = [] if found_best == self.baseline else [found_best]
        why = self._enter(self.baseline)
        if why:  # there may be no room beside the last choice
            self.runner.release(found_best)
            why = self._enter(self.baseline)
        if why:
            self._add("confirmation", self.baseline, f"nothing is confirmed: {why}")
            return False
        for rival in rivals:
            if why := self._enter(rival):
                self._add("confirmation", rival, f"not confirmed: {why}")
                return False
        rates = self._compare(rivals, self.seconds, self.seconds, MOST_FINAL_ROUNDS if rivals else 3)
        self.baseline_rate = self.best_rate = measure_spread(rates[self.baseline])
        for rival in rivals:
            found = gains(rates[rival], rates[self.baseline])
            is_faster = is_surely_faster(found)
            verdict = "confirmed" if is_faster else no_gain(found)
            self._add("confirmation", rival, verdict, rates[rival], found, is_final=True)
            if is_faster:
                self.best, self.gain, self.best_rate = rival, measure_spread(found), measure_spread(rates[rival])
            return len(found) >= LEAST_ROUNDS
        return True

    def _add(
        self,
        group: str,
        candidate: TrialSettings,
        verdict: str,
        rates: Sequence[float] = (),
        found: Sequence[float] = (),
        learned: LearningResult | None = None,
        is_final: bool = False,
    ) -> None:
        now = {**asdict(self.config), **dict((self.baseline if group == "confirmation" else self.best).settings)}
        change = {name: value for name, value in candidate.settings if now[name] != value}
        row: dict[str, Any] = {"group": group, "change": change, "settings": dict(candidate.settings)}
        row["verdict"] = verdict
        if rates:
            row |= {
                "samples_per_second": asdict(measure_spread(rates)),
                "gain": asdict(measure_spread(found)),
                "rounds": len(rates),
            }
            if is_final and len(found) > 1:
                row["gain_interval"] = asdict(estimate_gain(found))
        if learned is not None and self._learned is not None:
            row["validation_loss"] = {"candidate": learned.loss, "baseline": self._learned.loss}
            row["validation_loss"] |= {"steps": self._judged_steps, "tolerated": tolerated(self._learned)}
        self.rows.append(row)
        self.say(candidate=candidate.label, doing=verdict, **{key: row[key] for key in row if key in _SAID})


_SAID = ("group", "samples_per_second", "gain")

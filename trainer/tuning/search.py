"""The order in which auto-tuning tries candidates, and what it decides from the figures, without a clock, a process or
a model.

One group of settings after the other is searched, each with the best found so far for all others. The settings hardly
depend on each other, so the cost is the sum of their numbers instead of the product for all combinations. A combination
of two settings that pay only together may be missed. Within a group all candidates are measured in turn, for short
times. Where none can be refused later for what it learns, the slower half of the challengers leaves after every second
round from the third one on. Each figure of the search has served a choice, so the winner's is too good on average.
Therefore two comparisons with figures of their own follow: each chosen change against the same settings without it, and
what is left against the baseline. Only what is faster beyond noise in the last one is recommended.
`trainer.tuning.verdict` says what a candidate's figures mean; `trainer.tuning.tuner` does what is decided here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.tuning.comparison import HALVED_FROM, MOST_ROUNDS, NotFinite, TrialRunner, compare_throughput
from trainer.tuning.search_space import (
    LAYOUT,
    SettingsGroup,
    TrialSettings,
    TuningContext,
    groups,
    layouts,
    settings_without,
    share,
)
from trainer.tuning.verdict import (
    LEAST_ROUNDS,
    UNTOLD,
    LearningResult,
    Spread,
    estimate_gain,
    explain_worse_learning,
    gains,
    is_surely_faster,
    least_rounds,
    measure_spread,
    no_gain,
    pays,
    tolerated,
    untold,
)

LEAST_SECONDS = 10.0
"""The smallest budget, in seconds, with which candidates can be compared."""
SEARCHING, JUDGING = 0.6, 0.2
"""The shares of the budget for comparing and for checking what is learned; the rest is for the two comparisons after
the search."""
DROPPING = 0.5
"""The share of what is left after the search in which single changes are compared with the settings without them."""
MOST_AT_ONCE = 4
"""The most candidates that challenge the present settings at once: all are in memory."""
MOST_FINAL_ROUNDS = 25
"""The most rounds of a comparison after the search."""
MOST_JUDGED, LEAST_JUDGED = 300, 20
"""The most and the fewest steps after which validation losses are compared."""
RUNS = 4
"""The number of trainings that the time for judging must suffice for, one of them the baseline's."""
OUT_OF_MEMORY = "out of memory"
NO_TIME = "not tried: no time left"


@dataclass(kw_only=True)
class Search:
    """A search of all groups. Its fields hold what it has found so far, at any time."""

    config: DistributedTrainingConfig
    facts: TuningContext
    runner: TrialRunner
    seconds: float
    vary_batch: bool = False
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
    _chosen: list[TrialSettings] = field(default_factory=list)
    """The chosen settings of each group that had something to choose."""
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
        parts = [group for group in groups(self.vary_batch, self.facts) if self._options(group)]
        for number, group in enumerate(parts):
            self._improve(group, self.runner.elapsed + share(parts[number:], self._limit - self.runner.elapsed))
            self.keep()
        self.is_complete = self._confirm(self._drop_idle_changes())
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

    def _compare(
        self, incumbent: TrialSettings, challengers: Sequence[TrialSettings], until: float, limit: float, rounds: int,
        halves: bool = False,
    ) -> dict[TrialSettings, list[float]]:  # fmt: skip
        before = self.runner.elapsed
        rates = compare_throughput(self.runner, incumbent, challengers, until, limit, rounds, halves)
        mean = (self.runner.elapsed - before) / sum(map(len, rates.values()))
        self._measurement_seconds = max(self._measurement_seconds, mean)
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
            self.baseline = self.best = TrialSettings().but(changes)
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
            rates = self._compare(self.best, challengers, until, self._limit, MOST_ROUNDS, not group.changes_numbers)
        except NotFinite:
            if self.best == self.baseline:
                raise
            return self._fall_back(group.name, challengers)
        found = {item: gains(rates[item], rates[self.best]) for item in challengers}
        chosen = None
        for candidate in sorted(challengers, key=lambda item: statistics.median(found[item]), reverse=True):
            if group.changes_numbers and chosen is None and pays(found[candidate]):
                for other in (self.best, *challengers):  # another training has to find room beside it
                    if other != candidate:
                        self.runner.release(other)
            verdict, learned = self._verdict(group, found[candidate], chosen, candidate)
            if verdict == "chosen":
                chosen = candidate
            self._add(group.name, candidate, verdict, rates[candidate], found[candidate], learned)
        for candidate in (self.best, *challengers):
            if candidate != (chosen or self.best):
                self.runner.release(candidate)
        if chosen is not None:
            self.gain = measure_spread(found[chosen]) if self.best == self.baseline else None
            self.best = chosen
            self._chosen.append(chosen)

    def _fall_back(self, group: str, challengers: Sequence[TrialSettings]) -> None:
        """Return to the settings that were chosen before, because the last choice does not train for long."""
        for candidate in (self.best, *challengers):
            self.runner.release(candidate)
        self._chosen.remove(self.best)
        broken, self.best = self.best, self._chosen[-1] if self._chosen else self.baseline
        self.gain = None
        self._add(group, broken, "its loss does not stay finite")

    def _verdict(
        self, group: SettingsGroup, found: Sequence[float], chosen: TrialSettings | None, candidate: TrialSettings
    ) -> tuple[str, LearningResult | None]:
        if not pays(found):
            return no_gain(found, HALVED_FROM), None
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

    def _drop_idle_changes(self) -> list[TrialSettings]:
        """Compare what was chosen with the same settings without each single change, as far as there is time and
        memory; return the settings that the baseline is compared with in the end, the most important first."""
        whole = self.best
        if len(self._chosen) < 2:  # without its only change it is the baseline
            return self._chosen[:]
        earlier = self._chosen[: -MOST_AT_ONCE - 1 : -1]
        until = self.runner.elapsed + DROPPING * (self.seconds - self.runner.elapsed)
        until = min(until, self.seconds - self._confirming_seconds)
        places: dict[TrialSettings, int] = {}
        if not self._enter(whole):
            for place in range(len(self._chosen)):
                candidate = settings_without(self.baseline, self._chosen, {place})
                needed = self._entry_seconds + LEAST_ROUNDS * (2 + len(places)) * self._measurement_seconds
                if candidate in (whole, *places) or len(places) == MOST_AT_ONCE or self.runner.elapsed + needed > until:
                    continue
                if not self._enter(candidate):
                    places[candidate] = place
        if not places:
            return earlier
        try:
            rates = self._compare(whole, [*places], until, until, MOST_FINAL_ROUNDS)
        except NotFinite:
            self._fall_back("single change", [*places])
            return self._chosen[: -MOST_AT_ONCE - 1 : -1]
        dropped = set()
        for candidate, place in places.items():
            found = gains(rates[whole], rates[candidate])
            if len(found) < LEAST_ROUNDS:
                verdict = UNTOLD
            elif is_surely_faster(found):
                verdict = "kept"
            else:
                verdict = "dropped: it adds no sure gain"
                dropped.add(place)
            kept = dict(candidate.settings)
            changes = {name: value for name, value in whole.settings if kept.get(name, _ABSENT) != value}
            self._add("single change", whole, verdict, rates[whole], found, change=changes)
            self.runner.release(candidate)
        rest = settings_without(self.baseline, self._chosen, dropped)
        return [item for item in dict.fromkeys((rest, whole)) if item != self.baseline]

    def _confirm(self, wanted: Sequence[TrialSettings]) -> bool:
        """Compare the baseline and the ``wanted`` settings, side by side in the time that is left; return whether the
        comparison was conclusive. These are the figures that count: what is not faster beyond noise then is not
        recommended, and more settings only where they are faster, beyond noise, than fewer."""
        last, self.best, self.gain = self.best, self.baseline, Spread(1.0, 1.0, 1.0)
        why = self._enter(self.baseline)
        if why:  # there may be no room beside the last choice
            self.runner.release(last)
            why = self._enter(self.baseline)
        if why:
            self._add("confirmation", self.baseline, f"nothing is confirmed: {why}")
            return False
        rivals = self._rivals(wanted)
        rates = self._compare(
            self.baseline, rivals, self.seconds, self.seconds, MOST_FINAL_ROUNDS if rivals else HALVED_FROM
        )
        self.baseline_rate = measure_spread(rates[self.baseline])
        found = {item: gains(rates[item], rates[self.baseline]) for item in rivals}
        sure = [item for item in rivals if is_surely_faster(found[item], len(rivals))]
        for item in sorted(sure, key=lambda item: len(item.settings)):
            if self.best == self.baseline or is_surely_faster(gains(rates[item], rates[self.best]), len(rivals)):
                self.best, self.gain = item, measure_spread(found[item])
        for item in rivals:
            if item == self.best:
                verdict = "confirmed"
            elif item not in sure:
                verdict = no_gain(found[item], least_rounds(len(rivals)))
            elif len(item.settings) > len(self.best.settings):
                verdict = "adds no sure gain to the confirmed one"
            else:
                verdict = "slower than the confirmed one"
            self._add("confirmation", item, verdict, rates[item], found[item], comparisons=len(rivals))
        self.best_rate = measure_spread(rates[self.best])
        if not self._chosen or self.best != self.baseline:
            return True
        return bool(rivals) and len(rates[self.baseline]) >= least_rounds(len(rivals))

    def _rivals(self, wanted: Sequence[TrialSettings]) -> list[TrialSettings]:
        """Return the ``wanted`` settings as far as there is memory, and time for enough rounds; at least one."""
        rivals: list[TrialSettings] = []
        for candidate in wanted:
            count = 1 + len(rivals)
            needed = least_rounds(count) * (1 + count) * self._measurement_seconds + self._entry_seconds
            if rivals and self.runner.elapsed + needed > self.seconds:
                break
            if why := self._enter(candidate):
                self._add("confirmation", candidate, f"not confirmed: {why}")
            else:
                rivals.append(candidate)
        return rivals

    def _add(
        self, group: str, candidate: TrialSettings, verdict: str, rates: Sequence[float] = (),
        found: Sequence[float] = (), learned: LearningResult | None = None, comparisons: int = 0,
        change: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        before = self.baseline if group == "confirmation" else self.best
        now = {**asdict(self.config), **dict(before.settings)}
        if change is None:
            change = {name: value for name, value in candidate.settings if now[name] != value}
        row: dict[str, Any] = {"group": group, "change": change, "settings": dict(candidate.settings)}
        row["verdict"] = verdict
        if rates:
            row |= {
                "samples_per_second": asdict(measure_spread(rates)),
                "gain": asdict(measure_spread(found)),
                "rounds": len(rates),
            }
            if comparisons and len(found) > 1:
                row["gain_interval"] = asdict(estimate_gain(found, comparisons))
        if learned is not None and self._learned is not None:
            row["validation_loss"] = {"candidate": learned.loss, "baseline": self._learned.loss}
            row["validation_loss"] |= {"steps": self._judged_steps, "tolerated": tolerated(self._learned)}
        self.rows.append(row)
        self.say(candidate=candidate.label, doing=verdict, **{key: row[key] for key in row if key in _SAID})


_ABSENT = object()
_SAID = ("group", "samples_per_second", "gain")

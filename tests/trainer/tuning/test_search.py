"""What auto-tuning makes of figures, on a machine whose every step takes what it is told to: with no noise, or with
noise from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.tuning.search import OUT_OF_MEMORY, Search
from trainer.tuning.search_space import (
    COMPILE_SECONDS,
    KNOBS,
    TrialSettings,
    TuningContext,
    compilations,
    depths,
    groups,
    layouts,
    share,
    thread_counts,
)
from trainer.tuning.verdict import (
    LEAST_GAIN,
    LEAST_ROUNDS,
    LearningResult,
    estimate_gain,
    explain_worse_learning,
    gains,
    is_surely_faster,
    tolerated,
)

FACTS = TuningContext(world_size=2, local_world_size=1, cores=8, ranks_per_host=2)
CONFIG = DistributedTrainingConfig(world_size=2, batch_size_per_gpu=64, gradient_accumulation_steps=4)
MEASUREMENT, ENTRY = 1.0, 2.0


@dataclass
class Machine:
    """A runner whose clock goes on only by what is done on it."""

    speed: Callable[[dict], float]
    """Samples per second with these settings."""
    refuses: Callable[[dict], str] = lambda settings: ""
    loss: Callable[[dict], float] = lambda settings: 1.0
    is_likelihood: bool = True
    elapsed: float = 0.0
    inside: set[TrialSettings] = field(default_factory=set)
    most_inside: int = 0

    def prepare(self, candidate: TrialSettings) -> str:
        if candidate not in self.inside:
            self.elapsed += ENTRY
            if why := self.refuses(dict(candidate.settings)):
                return why
            self.inside.add(candidate)
            self.most_inside = max(self.most_inside, len(self.inside))
        return ""

    def measure(self, candidate: TrialSettings) -> float:
        assert candidate in self.inside
        self.elapsed += MEASUREMENT
        return self.speed(dict(candidate.settings))

    def release(self, candidate: TrialSettings) -> None:
        self.inside.discard(candidate)

    def learn(self, candidate: TrialSettings, steps: int) -> LearningResult:
        self.elapsed += 0.01 * steps
        return LearningResult(first=2.0, loss=self.loss(dict(candidate.settings)), is_likelihood=self.is_likelihood)

    def step_seconds(self, candidate: TrialSettings) -> float:
        return 0.01


def searched(machine: Machine, seconds: float = 1000.0, config=CONFIG, facts: TuningContext = FACTS, **more) -> Search:
    search = Search(config=config, facts=facts, runner=machine, seconds=seconds, **more)
    search.run()
    return search


def median_gain(search: Search) -> float:
    assert search.gain is not None
    return search.gain.median


def verdicts(search: Search, group: str) -> dict[tuple, str]:
    return {tuple(row["change"].values()): row["verdict"] for row in search.rows if row["group"] == group}


@given(st.floats(20, 3000), st.dictionaries(st.sampled_from(["fp32", "bf16", "fp16"]), st.floats(0.3, 3)))
def test_the_budget_is_kept_but_for_what_was_begun_in_it(seconds: float, factors: dict[str, float]):
    machine = Machine(lambda settings: factors.get(settings.get("precision", "fp32"), 1.0) * 100)
    searched(machine, seconds)
    assert machine.elapsed <= seconds + ENTRY + 2 * MEASUREMENT  # what confirms the result takes one round in any case
    assert machine.most_inside <= 5


@given(st.data())
def test_the_fastest_of_all_is_found_where_settings_do_not_depend_on_each_other(data: st.DataObject):
    table: dict = {}
    factors = st.sampled_from([0.5, 0.8, 1.0, 1.25, 2.0])

    def speed(settings: dict) -> float:
        total = 100.0
        for name in ("batch_size_per_gpu", "precision", "threads_per_rank"):
            if (key := (name, settings.get(name))) not in table:
                table[key] = data.draw(factors) if name in settings else 1.0
            total *= table[key]
        return total

    search, again = (searched(Machine(speed)) for _ in range(2))
    assert (search.best, search.rows) == (again.best, again.rows)  # the same figures, the same decisions
    best = 100.0
    for name in ("batch_size_per_gpu", "precision", "threads_per_rank"):
        best *= max([1.0, *(value for (key, _), value in table.items() if key == name)])
    assert speed(dict(search.best.settings)) == pytest.approx(best)
    assert set(dict(search.best.settings)) <= set(KNOBS)


def test_the_largest_micro_batch_that_fits_is_found_by_halving_at_the_same_global_batch():
    tried = [item["batch_size_per_gpu"] for item in layouts(replace(CONFIG, batch_size_per_gpu=64), FACTS)]
    assert tried == [256, 128, 32, 16, 8]

    def refuses(settings: dict) -> str:
        return OUT_OF_MEMORY if settings.get("batch_size_per_gpu", 64) > 128 else ""

    search = searched(Machine(lambda settings: settings.get("batch_size_per_gpu", 64), refuses))
    assert search.best.settings[:2] == (("batch_size_per_gpu", 128), ("gradient_accumulation_steps", 2))
    assert verdicts(search, "layout")[256, 1] == OUT_OF_MEMORY


def test_a_configuration_that_does_not_fit_is_halved_until_it_does():
    def refuses(settings: dict) -> str:
        return OUT_OF_MEMORY if settings.get("batch_size_per_gpu", 64) > 16 else ""

    search = searched(Machine(lambda settings: 100.0, refuses))
    assert dict(search.best.settings) == {"batch_size_per_gpu": 16, "gradient_accumulation_steps": 16}
    assert search.best == search.baseline
    with pytest.raises(ConfigError, match=r"as it is configured .*: no such model"):
        searched(Machine(lambda settings: 100.0, lambda settings: "no such model"))


def test_what_learns_less_is_dropped_with_its_figure_and_the_next_best_is_looked_at():
    speeds = {"bf16": 300.0, "fp16": 200.0}
    machine = Machine(
        lambda settings: speeds.get(settings.get("precision", ""), 100.0),
        loss=lambda settings: {"bf16": -2.99}.get(settings.get("precision", ""), -3.0),
    )
    search = searched(machine)
    assert dict(search.best.settings) == {"precision": "fp16"}
    assert verdicts(search, "precision")["fp16",] == "chosen"
    assert "its validation loss is -2.99000, that of the baseline -3.00000" in verdicts(search, "precision")["bf16",]
    assert median_gain(search) == pytest.approx(2.0)


def test_what_cannot_be_judged_in_time_is_not_taken():
    machine = Machine(lambda settings: 200.0 if "precision" in settings else 100.0)
    machine.step_seconds = lambda candidate: 10.0  # type: ignore[method-assign]
    search = searched(machine)
    assert search.best == TrialSettings()
    assert "no time to see whether it learns as much" in str(verdicts(search, "precision"))


def test_nothing_is_recommended_that_the_last_comparison_does_not_confirm():
    machine = Machine(lambda settings: 100.0)
    machine.speed = lambda settings: 200.0 if settings and machine.elapsed < 43 else 100.0
    search = searched(machine)
    assert "chosen" in {row["verdict"] for row in search.rows}
    assert search.rows[-1]["verdict"] == "no gain"
    assert (search.best, median_gain(search)) == (TrialSettings(), 1.0)


def test_what_does_not_stay_finite_never_wins_and_a_configuration_that_does_not_is_refused():
    search = searched(Machine(lambda settings: 0.0 if "precision" in settings else 100.0))
    assert search.best == TrialSettings()
    with pytest.raises(ConfigError, match="lower training"):
        searched(Machine(lambda settings: 0.0))


def test_a_gain_counts_where_it_is_large_enough_and_beyond_chance():
    assert is_surely_faster([1.05] * 6)
    assert is_surely_faster([0.99, *[1.05] * 8])
    assert not is_surely_faster([1 + LEAST_GAIN / 2] * 25)
    assert not is_surely_faster([1.5] * (LEAST_ROUNDS - 1))  # too few
    assert not is_surely_faster([0.7, 0.7, *[1.1] * 7])
    assert not is_surely_faster([0.0, *[1.5] * 24])  # a loss that was not finite
    assert gains([2.0, 3.0], [1.0, 2.0, 5.0]) == [2.0, 1.5]


def test_the_interval_of_a_gain_is_that_of_the_signed_rank_test():
    chance = random.Random(3)
    for rounds in (6, 9, 15, 25):
        logs = [chance.gauss(0.03, 0.05) for _ in range(rounds)]
        found = estimate_gain([math.exp(value) for value in logs])

        def refuted(shift: float, side: str, logs: list[float] = logs) -> bool:
            shifted = [value - shift for value in logs]
            return scipy.stats.wilcoxon(shifted, alternative=side, method="exact").pvalue <= 0.025

        for end, side, beyond in ((found.low, "greater", -1e-9), (found.high, "less", 1e-9)):
            assert refuted(math.log(end) + beyond, side)
            assert not refuted(math.log(end) - beyond, side)


QUIET, DRIFTING, DISTURBED = "each figure for itself", "drifts", "with disturbances of 30 %"


def noisy(seed: int, speed: Callable[[dict], float], noise: float, kind: str = QUIET) -> Machine:
    """A machine whose figures vary by ``noise`` (standard deviation of the logarithm)."""
    chance, drift = random.Random(seed), 0.0

    def measured(settings: dict) -> float:
        nonlocal drift
        error = chance.gauss(0, noise)
        if kind == DRIFTING:
            drift = 0.95 * drift + chance.gauss(0, noise)
            error += drift
        if kind == DISTURBED and chance.random() < 0.1:
            error -= chance.expovariate(1 / 0.3)
        return 100 * speed(settings) * math.exp(error)

    return Machine(measured)


@pytest.mark.parametrize("kind", [QUIET, DRIFTING, DISTURBED])
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_where_all_settings_are_equal_the_untuned_ones_stay(noise: float, kind: str):
    searches = [searched(noisy(seed, lambda settings: 1.0, noise, kind), seconds=300) for seed in range(100)]
    assert sum(search.best == search.baseline for search in searches) >= 0.95 * len(searches)
    assert all(search.is_complete for search in searches)


@pytest.mark.parametrize(("noise", "kind", "least"), [(0.03, QUIET, 0.9), (0.03, DRIFTING, 0.8), (0.01, QUIET, 0.99)])
def test_a_gain_of_a_tenth_is_found_in_noise_and_stated_with_an_interval_that_holds_it(
    noise: float, kind: str, least: float
):
    searches = [
        searched(noisy(seed, lambda now: 1.1 if now.get("precision") == "bf16" else 1.0, noise, kind), seconds=300)
        for seed in range(200)
    ]
    found = [search for search in searches if ("precision", "bf16") in search.best.settings]
    assert len(found) >= least * len(searches)
    assert sum(len(search.best.settings) > 1 for search in found) <= 0.15 * len(searches)
    rows = [row for search in found for row in search.rows if row["verdict"] == "confirmed"]
    assert len(rows) == len(found)
    held = sum(row["gain_interval"]["low"] <= 1.1 <= row["gain_interval"]["high"] for row in rows)
    assert held >= 0.9 * len(rows)
    assert all(row["gain_interval"]["low"] > 1 for row in rows)


def test_losses_are_compared_by_what_they_are_measured_in():
    nats = LearningResult(first=-1.0, loss=-2.001, is_likelihood=True)
    assert tolerated(nats) == 0.005  # whatever the unit of the target makes of its value
    assert not explain_worse_learning(replace(nats, loss=-1.9961), nats, 100)
    assert explain_worse_learning(replace(nats, loss=-1.9959), nats, 100)
    assert explain_worse_learning(replace(nats, loss=math.nan), nats, 100)
    assert not explain_worse_learning(replace(nats, loss=-9.0), nats, 100)  # better is better
    near_zero = LearningResult(first=2.0, loss=0.001, is_likelihood=False)
    assert tolerated(near_zero) == pytest.approx(0.01, rel=1e-3)
    assert tolerated(replace(near_zero, first=0.9, loss=0.8)) == pytest.approx(0.004)


def test_where_the_baseline_learns_nothing_nobody_is_taken_to_learn_as_much():
    nothing = LearningResult(first=2.0, loss=1.997, is_likelihood=True)
    assert "not compared" in explain_worse_learning(replace(nothing, loss=2.0), nothing, 20)
    assert "not compared" in explain_worse_learning(nothing, replace(nothing, loss=math.nan), 20)
    machine = Machine(lambda settings: 200.0 if "precision" in settings else 100.0, loss=lambda settings: 1.997)
    search = searched(machine)
    assert search.best == TrialSettings()
    assert "from 2.00000 to 1.99700 only" in verdicts(search, "precision")["bf16",]


def test_what_fails_while_it_is_judged_is_dropped_and_has_the_memory_to_itself():
    machine = Machine(lambda settings: {"bf16": 300.0, "fp16": 200.0}.get(settings.get("precision", ""), 100.0))
    trains, beside = machine.learn, []

    def learn(candidate: TrialSettings, steps: int) -> LearningResult:
        beside.append(len(machine.inside))
        if dict(candidate.settings).get("precision") == "bf16":
            return LearningResult(first=math.nan, loss=math.nan, is_likelihood=True, why=OUT_OF_MEMORY)
        return trains(candidate, steps)

    machine.learn = learn  # type: ignore[method-assign]
    search = searched(machine)
    assert verdicts(search, "precision") == {("bf16",): f"not compared: {OUT_OF_MEMORY}", ("fp16",): "chosen"}
    assert dict(search.best.settings) == {"precision": "fp16"}
    assert max(beside) == 1


def test_the_last_comparison_makes_room_and_says_where_it_could_not_be_made():
    machine = Machine(lambda settings: 200.0 if settings.get("precision") == "bf16" else 100.0)
    machine.refuses = lambda settings: (
        OUT_OF_MEMORY if not settings and machine.elapsed > 10 and len(machine.inside) >= room else ""
    )
    room = 1  # beside the choice there is none
    search = searched(machine)
    assert search.is_complete
    assert dict(search.best.settings) == {"precision": "bf16"}
    room, machine.elapsed = 0, 0.0  # there is none at all any more
    machine.inside.clear()
    search = searched(machine)
    assert search.rows[-1]["verdict"] == f"nothing is confirmed: {OUT_OF_MEMORY}"
    assert (search.best, search.is_complete) == (TrialSettings(), False)


@given(st.floats(30, 200), st.floats(1.1, 3))
def test_a_small_budget_never_says_that_nothing_pays_where_something_was_faster(seconds: float, gain: float):
    machine = Machine(lambda settings: 100.0 * gain if settings.get("batch_size_per_gpu") == 256 else 100.0)
    search = searched(machine, seconds)
    if "chosen" in verdicts(search, "layout").values():
        assert search.is_complete
        assert median_gain(search) == pytest.approx(gain)
    for row in search.rows:
        if row.get("gain", {}).get("median", 1.0) > 1.1:
            assert row["verdict"] not in ("no gain", "no sure gain")


def test_a_confirmation_that_had_too_few_rounds_is_no_result():
    machine = Machine(lambda settings: 130.0 if settings.get("precision") == "bf16" else 100.0)
    measure = machine.measure

    def slow(candidate: TrialSettings) -> float:  # the machine is busy with something else in the end
        machine.elapsed += 20.0 if "chosen" in {row["verdict"] for row in search.rows} else 0.0
        return measure(candidate)

    machine.measure = slow  # type: ignore[method-assign]
    search = Search(config=replace(CONFIG, prefetch_batches=0), facts=FACTS, runner=machine, seconds=200.0)
    search.run()
    assert search.rows[-1]["verdict"] == "too few rounds to tell"
    assert (search.best, search.is_complete) == (TrialSettings(), False)


def test_compiling_gets_the_time_that_it_needs_where_there_is_any():
    parts = groups(FACTS)
    assert share(parts[-1:], 40.0) == 40.0
    for left, enough in ((180.0, True), (72.0, False)):
        for number in range(len(parts) - 1):
            left -= share(parts[number:], left)
        assert (left > COMPILE_SECONDS) == enough


def test_a_choice_that_does_not_stay_finite_gives_way_to_the_one_before():
    def compiling() -> bool:
        return any("compile" in dict(candidate.settings) for candidate in machine.inside)

    def speed(settings: dict) -> float:
        if settings.get("precision") == "bf16" and "communication" in settings and compiling():
            return 0.0
        fast = 2.0 if settings.get("precision") == "bf16" else 1.0
        return 100.0 * fast * (2.0 if settings.get("communication") == "fp16" else 1.0)

    machine = Machine(speed)
    search = searched(machine)
    assert "its loss does not stay finite" in {row["verdict"] for row in search.rows}
    assert dict(search.best.settings) == {"precision": "bf16"}


def test_batches_ahead_are_tried_where_they_make_a_difference():
    assert [item["prefetch_batches"] for item in depths(CONFIG, FACTS)] == [1, 2, 4]
    assert [item["prefetch_batches"] for item in depths(CONFIG, replace(FACTS, batches_ahead=1))] == [0, 2, 4]
    on_gpu = replace(FACTS, batches_ahead=1, fits_gpu=True)
    assert depths(CONFIG, on_gpu) == []
    assert depths(replace(CONFIG, data_on_device=False), on_gpu)
    assert [group.name for group in groups(FACTS)].index("device") == 3  # and then input


def test_threads_get_cores_of_their_own():
    assert thread_counts(replace(CONFIG, threads_per_rank=1), FACTS) == [{"threads_per_rank": n} for n in (2, 4)]
    assert thread_counts(replace(CONFIG, threads_per_rank=1), replace(FACTS, cores=2)) == []


def test_cuda_graphs_are_tried_with_a_gpu_only():
    tried = {has_gpu: compilations(CONFIG, replace(FACTS, has_gpu=has_gpu)) for has_gpu in (False, True)}
    assert tried == {False: [{"compile": "default"}], True: [{"compile": "default"}, {"compile": "reduce-overhead"}]}

"""What ``auto`` sums gradients by: properties of the decision, and real ranks that agree on it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import trainer.parallel.auto_compression
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.observability.comm_profiler import FIELDS, TimingWindow
from trainer.parallel.auto_compression import (
    AGREEING,
    AT_ONCE,
    CLEARLY,
    GENTLE_FIRST,
    LEAST_STEPS,
    LONGEST_REST,
    PLAIN,
    REST,
    SUMS,
    AutoCompression,
    CommCost,
    MeasuredStep,
    choose,
    expect,
    exposed,
    is_settled,
    rest_of,
)
from trainer.parallel.compression import LoopbackTransport
from trainer.performance.link import Link

SLOW, FAST = (
    Link(latency_seconds=2e-4, seconds_per_byte=1.33 * 8 / rate) for rate in (100e6, 10e9)
)  # what a rank's link carries for each byte
KNOWN = {
    PLAIN: CommCost(),
    "fp16": CommCost(bytes_share=0.5, cost_per_byte=1e-9),
    "topk": CommCost(bytes_share=0.03, cost_per_byte=4e-9),
}
LARGE = MeasuredStep(computing_seconds=0.1, exposed_seconds=0.0, hiding_seconds=0.0, buckets=(1_000_000, 8_000_000))


def measured(step: MeasuredStep, link: Link, name: str = PLAIN) -> MeasuredStep:
    return replace(step, exposed_seconds=exposed(step, link, KNOWN[name]))


def choice(step: MeasuredStep, link: Link, present: str = PLAIN) -> str:
    return choose(present, expect(step, link, KNOWN, {}))


def test_where_the_network_is_slow_most_is_saved_and_where_it_is_quick_nothing_is_changed() -> None:
    assert choice(LARGE, SLOW) == "topk"
    assert choice(LARGE, FAST) == PLAIN
    between = Link(latency_seconds=2e-4, seconds_per_byte=1e-8)
    assert choice(LARGE, between) == "fp16", "rounding is enough: the rest is not worth another gradient"


def test_network_that_is_hidden_is_no_reason_to_compress() -> None:
    """All but a small last bucket is summed while the backward pass computes, however slow the link."""
    random = np.random.default_rng(0)
    for _ in range(300):
        link = Link(latency_seconds=random.uniform(0, 1e-3), seconds_per_byte=10 ** random.uniform(-10, -6))
        last, first = random.integers(1, 2000), random.integers(1, 10**8)
        computing = first * link.seconds_per_byte + 1e3 * (link.latency_seconds + 2000 * link.seconds_per_byte)
        buckets = int(first), int(last)
        step = MeasuredStep(computing_seconds=computing, exposed_seconds=0.0, hiding_seconds=1e9, buckets=buckets)
        assert choice(measured(step, link), link) == PLAIN


def test_who_is_chosen_is_not_given_up_for_a_trifle_and_a_choice_is_its_own() -> None:
    random = np.random.default_rng(1)
    for _ in range(1000):
        expected = {name: 10 ** random.uniform(-2, 0) for name in GENTLE_FIRST}
        for present in GENTLE_FIRST:
            then = choose(present, expected)
            assert choose(then, expected) == then
            if then != present:
                assert GENTLE_FIRST.index(then) < GENTLE_FIRST.index(present) or expected[then] < expected[present]
    nearly = {PLAIN: 1.0, "fp16": 1 / (CLEARLY - 0.01)}
    assert choose(PLAIN, nearly) == PLAIN
    assert choose("fp16", nearly) == "fp16"


def test_a_slower_link_never_leads_to_sending_more() -> None:
    bytes_sent = []
    for per_byte in np.logspace(-10, -6, 60):
        link = Link(latency_seconds=2e-4, seconds_per_byte=float(per_byte))
        bytes_sent.append(KNOWN[choice(LARGE, link)].bytes_share)
    assert bytes_sent == sorted(bytes_sent, reverse=True)
    assert {share for share in bytes_sent} == {1.0, 0.5, 0.03}


def test_what_was_measured_with_one_counts_more_than_what_was_expected_of_it() -> None:
    expected = expect(LARGE, SLOW, KNOWN, {PLAIN: 0.0, "topk": 5.0})
    assert choose("topk", expected) == "fp16"
    assert expect(LARGE, SLOW, KNOWN, {PLAIN: 0.01})["fp16"] == pytest.approx(
        0.11 + exposed(LARGE, SLOW, KNOWN["fp16"])
    ), "what plain sums take beyond the model, others are expected to take as well"


def test_one_window_is_enough_where_plain_sums_cost_most_else_two_must_agree() -> None:
    expected = {PLAIN: 1.0, "fp16": 0.6, "topk": 0.9 / AT_ONCE}
    assert is_settled(PLAIN, ["topk"], expected)
    assert not is_settled(PLAIN, ["fp16"], expected)
    assert not is_settled(PLAIN, ["topk", "fp16"], expected)
    assert is_settled(PLAIN, ["fp16"] * AGREEING, expected)
    assert not is_settled("fp16", ["topk"], {**expected, "fp16": 100.0}), "no hurry: the worst is over"


def test_looks_cost_next_to_nothing_and_become_rare_but_never_cease() -> None:
    for link in (SLOW, FAST):
        for bytes_ in (1000, 10**6, 25 * 10**6, 10**9):
            cost = SUMS * (link.latency_seconds + bytes_ * link.seconds_per_byte)
            rests = [rest_of(link, bytes_, looks) for looks in range(2000)]
            assert rests[0] >= REST * cost
            assert all(then == min(2 * now, max(now, LONGEST_REST)) for now, then in pairwise(rests))


class Simulated:
    """Windows of three ranks over a link, as the present choice makes them. The link passes ``burst`` bytes of each
    message at once."""

    def __init__(self, computing: float, sizes: tuple[int, ...], burst: int = 0) -> None:
        world = World(RankFacts(world_size=3), torch.device("cpu"), "gloo")
        self.automatic = AutoCompression(world, [0, 1, 2], 0.01, may_drop=True)
        self.tried, self.probed, self.seconds = 0, list[float](), 0.0
        self.automatic._try = self._try  # type: ignore[method-assign]
        self.automatic._probe_link = self._probe_link  # type: ignore[method-assign]
        self.computing, self.burst, self.buckets = computing, burst, [torch.zeros(size // 4) for size in sizes]

    def _try(self, bucket: Any, link: Link) -> dict[str, CommCost]:
        self.tried += 1
        return {name: means for name, means in KNOWN.items() if name != PLAIN}

    def _probe_link(self, bucket: torch.Tensor) -> list[tuple[int, float]]:
        self.probed.append(self.seconds)
        link = self.probed_as
        return [(size, link.latency_seconds + size * link.seconds_per_byte) for size in (4, bucket.nbytes)]

    def window(
        self, link: Link, steps: int = 10, stall: float = 0.0, probed_as: Link | None = None
    ) -> dict[str, Any] | None:
        """``stall``: seconds that each sum takes beyond what the link does."""
        self.probed_as = probed_as or link
        means = KNOWN[self.automatic.present]
        names = [*(f"bucket {number}" for number in range(len(self.buckets))), "commit"]
        sizes = [round(means.bytes_share * bucket.nbytes) for bucket in self.buckets] + [56]
        network_times = [
            link.latency_seconds + max(0, size - self.burst) * link.seconds_per_byte + stall for size in sizes
        ]
        cost = means.cost_per_byte * sum(bucket.nbytes for bucket in self.buckets)
        return self.see(
            dict(zip(names, zip(sizes, network_times, strict=True), strict=True)), sum(network_times) + cost, steps
        )

    def see(
        self, network_times: dict[str, tuple[int, float]], exposed: float, steps: int = 10
    ) -> dict[str, Any] | None:
        """``network_times``: bytes and seconds of each collective."""
        values = np.zeros((3, steps, len(FIELDS) + 2 * len(network_times)))
        values[:, :, FIELDS.index("backward")], values[:, :, FIELDS.index("exposed")] = self.computing, exposed
        values[:, :, len(FIELDS) :: 2] = [seconds for _, seconds in network_times.values()]
        self.seconds += steps * (self.computing + exposed)
        window = TimingWindow(values, tuple((name, bytes_) for name, (bytes_, _) in network_times.items()))
        return self.automatic.review(window, self.buckets)


def choices(told: list[dict[str, Any] | None]) -> list[str]:
    return [item["choice"] for item in told if item]


def test_a_slow_link_is_noticed_in_the_first_window_that_counts() -> None:
    world = Simulated(0.1, (4_000_000,))
    told = [world.window(SLOW) for _ in range(8)]
    assert [number for number, item in enumerate(told) if item] == [1]
    first = told[1]
    assert first is not None
    assert (first["before"], first["choice"]) == (PLAIN, "topk")
    assert "with topk one takes" in first["reason"]
    assert first["step_seconds"]["allreduce"] > 3 * first["step_seconds"]["topk"]
    assert first["bandwidth_bytes_per_second"] == pytest.approx(100e6 / 8, rel=0.01)
    assert world.tried == 1


def test_small_messages_say_nothing_of_large_ones() -> None:
    """As it was seen at 100 Mbit/s: after top-k all messages are small, and take about as long as the smallest."""
    world = Simulated(0.008, (1_050_000, 1_070_000))
    plain = {"bucket 0": (1_050_000, 0.138), "bucket 1": (1_070_000, 0.1), "commit": (56, 0.004)}
    small = {"bucket 0": (21_000, 0.0041), "bucket 1": (21_400, 0.0039), "commit": (56, 0.004)}
    told = [world.see(plain, 0.234) for _ in range(2)] + [world.see(small, 0.011) for _ in range(30)]
    assert choices(told) == ["topk"]
    assert not world.probed
    assert world.automatic.present == "topk"


def test_a_link_that_stays_slow_is_probed_ever_more_rarely() -> None:
    world = Simulated(0.1, (4_000_000,), burst=131_072)
    assert choices([world.window(SLOW) for _ in range(2)]) == ["topk"]
    chosen = world.seconds
    assert choices([world.window(SLOW) for _ in range(3000)]) == []
    rests = np.diff([chosen, *world.probed])
    cost = SUMS * 4_000_000 * SLOW.seconds_per_byte
    expected = [min(LONGEST_REST, REST * cost * 2**looks) for looks in range(len(rests))]
    assert len(rests) > 5
    assert rests == pytest.approx(expected, rel=0.05)


def test_a_choice_is_taken_back_when_the_link_is_better() -> None:
    world = Simulated(0.1, (4_000_000,), burst=131_072)
    told = [world.window(SLOW) for _ in range(100)]
    slow = world.seconds
    while world.automatic.present != PLAIN and world.seconds < 10 * slow:
        told.append(world.window(FAST))
    assert world.automatic.present == PLAIN, "it was never noticed"
    assert world.seconds < 3 * slow, "doubled rests: within about as long as it had been slow"
    assert choices(told + [world.window(FAST) for _ in range(300)]) == ["topk", PLAIN]
    assert world.tried == 1


def test_a_link_that_is_quick_in_probes_only_holds_up_few_windows() -> None:
    """One that saves up for bursts while it is hardly used."""
    world = Simulated(0.1, (4_000_000,))
    told = [world.window(SLOW, 50, probed_as=FAST) for _ in range(700)]
    back = choices(told).count(PLAIN)
    assert choices(told) == ["topk"] + [PLAIN, "topk"] * back
    assert 3 < back == len(world.probed) < 12
    assert max(np.diff(world.probed)) > 400


def test_a_link_that_gets_worse_is_probed_before_the_present_one_is_given_up() -> None:
    """Not so soon, and plain sums would be tried: they were not bad when they were last seen."""
    world = Simulated(0.1, (4_000_000,))
    between = Link(latency_seconds=2e-4, seconds_per_byte=1.25e-8)
    assert choices([world.window(between) for _ in range(1000)]) == ["fp16"]
    told = [world.window(SLOW) for _ in range(10)]
    assert choices(told) == ["topk"]


def test_one_that_was_given_up_in_a_bad_moment_gets_another_chance() -> None:
    world = Simulated(0.1, (4_000_000,))
    assert choices([world.window(SLOW) for _ in range(3)]) == ["topk"]
    while world.automatic.present != PLAIN:
        world.window(SLOW, stall=1.0)
    assert choices([world.window(SLOW) for _ in range(300)])[-1] == "topk"


def test_short_windows_and_a_quick_network_lead_to_no_trial() -> None:
    short = Simulated(0.1, (4_000_000,))
    assert [short.window(SLOW, LEAST_STEPS - 1) for _ in range(5)] == [None] * 5
    quick = Simulated(0.1, (40_000,))
    told = [item for item in (quick.window(FAST) for _ in range(5)) if item]
    assert [(item["choice"], item["before"]) for item in told] == [(PLAIN, PLAIN)], "said once, that all stays"
    assert "nothing to gain" in told[0]["reason"]
    assert quick.tried == short.tried == 0


@pytest.mark.parametrize(
    ("patience", "numbers"), [(0.0, trainer.parallel.auto_compression.PROBED_FIRST), (1e9, 1_000_000)]
)
def test_a_bandwidth_probe_of_a_link_that_has_got_worse_ends_early(
    patience: float, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.parallel.auto_compression, "PROBE_SECONDS", patience)
    found, latency, seconds = trainer.parallel.auto_compression._time_plain(torch.zeros(1_000_000), LoopbackTransport())
    assert found == numbers
    assert min(latency, seconds) > 0

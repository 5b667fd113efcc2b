"""Does the diagnosis name what was planted, and nothing where nothing was? On simulated steps, with known truth."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from dtrain_dagster.monitoring.diagnosis import SlowdownCause, diagnose
from dtrain_dagster.monitoring.stragglers import stragglers
from dtrain_dagster.monitoring.windows import collective_link, settled, windows
from tests.dtrain_dagster.simulated_timing import Simulation
from trainer.rundir import event

COMPUTING = 0.1
STEP = COMPUTING + 0.006
"""Of a healthy simulated step, about."""


def chosen(seed: int, shortest: int = 3) -> dict[str, Any]:
    """Ranks, length and noise of a run, by chance. The short ones are as noisy as the long ones."""
    chance = random.Random(seed)
    return {
        "seed": seed,
        "ranks": chance.choice((2, 3, 4)),
        "windows": chance.randint(shortest, 30),
        "noise": chance.choice((0.02, 0.05)),
        "outliers": chance.choice((0.0, 0.01, 0.03)),
        "computing": COMPUTING,
    }


def lost(share: float) -> float:
    """Seconds more per step that make up this share of it."""
    return STEP * share / (1 - share)


def plants(seed: int) -> list[tuple[SlowdownCause, int | None, dict[str, Any]]]:
    """What is planted in runs of at least 12 windows, from 5 % of the step on."""
    run = chosen(seed, shortest=12)
    chance = random.Random(seed + 1)
    rank, share = chance.randrange(run["ranks"]), chance.choice((0.05, 0.07, 0.1, 0.3))
    seconds = lost(share)
    few = {"computing": 0.003, "latency": 0.001, "optimizer": 0.0005, "buckets": (40_000, 40_000)}
    result: list[tuple[SlowdownCause, int | None, dict[str, Any]]] = [
        (SlowdownCause.SLOW_COMPUTE, rank, {"late_compute": {rank: seconds}}),
        (SlowdownCause.SLOW_INPUT, rank, {"late_input": {rank: seconds}}),
        (SlowdownCause.INPUT, None, {"input": 1.4 * seconds}),
        (SlowdownCause.COMMUNICATION, None, {"buckets": (60_000_000, 60_000_000)}),
        (SlowdownCause.SMALL_BATCHES, None, few),
        (
            SlowdownCause.CHECKPOINT,
            None,
            {"save_every": chance.choice((2, 6, 40)), "stall": 0.0, "stall_share": seconds},
        ),
    ]
    if run["ranks"] > 2:
        result.append((SlowdownCause.SLOW_LINK, rank, {"slow_link_of": rank, "buckets": (24_000_000, 24_000_000)}))
    for _, _, extra in result:
        if "stall_share" in extra:
            extra["stall"] = extra["save_every"] * extra.pop("stall_share")
    return [(cause, place, run | extra) for cause, place, extra in result]


def test_planted_causes_are_named_with_their_rank():
    right, wrong = 0, []
    for seed in range(8):
        for cause, rank, fields in plants(seed):
            found = diagnose(Simulation(**fields).events())
            if (found.cause, found.rank) == (cause, rank):
                right += 1
            else:
                wrong.append((cause, rank, found, fields))
    assert right / (right + len(wrong)) >= 0.95, wrong


def test_healthy_runs_raise_no_alarm():
    wrong = []
    for seed in range(100, 140):
        fields = chosen(seed) | {"noise": random.Random(seed).choice((0.02, 0.05, 0.1))}
        found = diagnose(Simulation(**fields).events())
        if found.cause is not SlowdownCause.HEALTHY:
            wrong.append((found, fields))
    assert not wrong


def test_a_late_rank_is_told_with_when_it_began_and_what_takes_longer():
    found = diagnose(Simulation(windows=20, since=12, late_compute={1: 0.05}).events())
    assert (found.cause, found.rank, found.node_id) == (SlowdownCause.SLOW_COMPUTE, 1, 11)
    assert found.since_step == pytest.approx(120, abs=10)
    assert found.share == pytest.approx(0.05 / 0.156 * 8 / 19 * 1.2, rel=0.35)
    assert found.where == "slow compute on rank 1 (node 11)"
    assert "since step" in found.evidence
    assert "communication itself takes" in found.evidence


def test_a_slow_probe_of_a_link_that_carries_next_to_nothing_is_not_the_cause():
    """Latency makes this network slow; that one rank's megabytes were slow to arrive once explains nothing."""
    few = {"computing": 0.003, "latency": 0.001, "optimizer": 0.0005, "buckets": (40_000, 40_000)}
    events = Simulation(windows=16, slow_link_of=1, **few).events()
    [link] = [item for item in events if item["kind"] == "link"]
    assert diagnose(events).cause is SlowdownCause.SMALL_BATCHES
    link["seconds"] = [[source, target, 50 * seconds] for source, target, seconds in link["seconds"]]
    assert diagnose(events).cause is SlowdownCause.SLOW_LINK


def test_what_a_step_costs_however_few_samples_it_has_is_told_below_the_limit_of_the_network():
    """With peer-to-peer connections latency is no fifth of the step any more, though little else is left than what is
    fixed."""
    few = {"computing": 0.0028, "latency": 0.00025, "optimizer": 0.0003, "buckets": (40_000,), "noise": 0.1}
    found = diagnose(Simulation(windows=12, **few).events())
    assert found.cause is SlowdownCause.SMALL_BATCHES
    assert "no matter how few samples" in found.evidence
    assert 0.16 < found.share < 0.25
    assert diagnose(Simulation(windows=12, **{**few, "computing": 0.006}).events()).cause is SlowdownCause.HEALTHY


def test_pauses_in_one_of_ten_steps_are_found_though_no_median_sees_them():
    found = diagnose(Simulation(windows=24, late_compute={2: 0.03}, pauses_only=True, outliers=0.0).events())
    assert (found.cause, found.rank) == (SlowdownCause.SLOW_COMPUTE, 2)
    assert "pauses in some steps" in found.evidence


def test_a_slow_spell_that_is_over_is_not_a_straggler():
    slow, quick = (Simulation(windows=24, seed=5, late_compute=late).events() for late in ({1: 0.04}, {}))
    assert diagnose([*slow[:8], *quick[8:]]).cause is SlowdownCause.HEALTHY
    assert diagnose([*slow[:16], *quick[16:]]).cause is SlowdownCause.SLOW_COMPUTE, (
        "most windows are too many for a spell"
    )


def test_who_is_late_for_a_moment_of_many_short_steps_is_not_blamed():
    """A second that a rank spends on something else is twelve windows of such steps."""
    late = {"computing": 0.003, "optimizer": 0.0005, "late_compute": {0: 0.004}, "buckets": (40_000,)}
    assert diagnose(Simulation(windows=12, **late).events()).cause is SlowdownCause.HEALTHY
    found = diagnose(Simulation(windows=40, **late).events())
    assert (found.cause, found.rank) == (SlowdownCause.SLOW_COMPUTE, 0)


@pytest.mark.parametrize("save_every", [2, 6, 40])
def test_saves_make_neither_their_rank_late_nor_the_others(save_every: int):
    found = diagnose(Simulation(ranks=2, windows=26, save_every=save_every, stall=0.03 * save_every).events())
    assert found.cause is SlowdownCause.CHECKPOINT
    assert not found.also


@pytest.mark.parametrize("dealt", [(2, 1, 1), (2, 2, 1, 1), (3, 2)])
def test_who_is_dealt_more_is_not_blamed(dealt: tuple[int, ...]):
    events = Simulation(ranks=len(dealt), windows=20, micro_batches=dealt).events()
    found = diagnose(events)
    assert (found.cause, found.rank) == (SlowdownCause.UNEVEN, None)
    assert not found.also
    # but who is slow beyond that is found, even if it has the least work
    least = len(dealt) - 1
    late = Simulation(ranks=len(dealt), windows=20, micro_batches=dealt, late_compute={least: 0.1}).events()
    assert least in {item.rank for item in stragglers(settled(windows(late)))}


ON_A_LAPTOP = {"windows": 16, "cores": 2, "late_compute": {0: 0.05}, "buckets": (60_000_000,) * 2}
"""Three ranks on two cores; rank 0, whose machine also runs the program that follows the job, comes late."""


def test_where_ranks_share_cores_neither_a_rank_nor_the_network_is_judged():
    events = Simulation(**ON_A_LAPTOP).events()
    whole, latest = diagnose(events), diagnose(events[-8:])
    for found in (whole, latest):
        assert (found.cause, found.rank, found.node_id) == (SlowdownCause.CROWDED, None, None), (
            "however little it costs: the live verdict is that of the report"
        )
        assert not found.also
        assert found.evidence.startswith("3 ranks share 2 cores")
        assert "this does not mean that a node is slow" in found.evidence
    own = diagnose(Simulation(**{**ON_A_LAPTOP, "cores": 4}).events())
    assert {item.cause for item in (own, *own.also)} == {SlowdownCause.SLOW_COMPUTE, SlowdownCause.COMMUNICATION}


def test_a_rank_that_computes_for_longer_than_sharing_explains_is_blamed_on_a_laptop_too():
    base = next(item for item in Simulation(**ON_A_LAPTOP | {"late_compute": {}}).events() if item["kind"] == "timing")
    usual = sum(statistics.median(base["segments"][name]) for name in ("forward", "backward", "optimizer"))
    for late, cause in ((2.5 * usual, SlowdownCause.CROWDED), (4 * usual, SlowdownCause.SLOW_COMPUTE)):
        found = diagnose(Simulation(**ON_A_LAPTOP | {"late_compute": {1: late}}).events())
        assert found.cause is cause, f"{late / usual:g} times the others' longer"
    assert found.rank == 1
    assert SlowdownCause.CROWDED not in {item.cause for item in found.also}, "it says that no node is slow"


def test_ranks_on_gpus_share_no_cores():
    on_gpus = [item | {"device": "cuda"} for item in Simulation(**ON_A_LAPTOP).events()]
    assert diagnose(on_gpus).cause is not SlowdownCause.CROWDED


def test_a_hang_comes_first_with_the_rank_that_is_waited_for():
    events = Simulation(windows=6, late_compute={0: 0.1}).events()
    at = events[-1]["time"] + 30
    for rank, sequence in ((0, 200), (1, 199), (2, 200)):
        operation = "no collective" if rank == 1 else "all-reduce of gradient bucket 0"
        hang = event(
            "hang", rank, 1, step=60, node_id=10 + rank, operation=operation, sequence=sequence, waited_seconds=25.0,
            stacks="", recent=[], nodes=[10, 11, 12], where="model.py:12",
        )  # fmt: skip
        events.append(hang | {"time": at + rank})
    found = diagnose(events)
    assert (found.cause, found.rank, found.node_id) == (SlowdownCause.HANG, 1, 11)
    assert found.where == "hang of rank 1 (node 11)"
    assert [item.cause for item in found.also] == [SlowdownCause.SLOW_COMPUTE]


def test_memory_that_ran_out_is_told():
    events = Simulation(windows=6).events()
    events.append(event("out_of_memory", 1, 1, step=7, samples=64, activation_checkpointing=True))
    found = diagnose(events)
    assert found.cause is SlowdownCause.MEMORY
    assert type(found.where) is str, "Dagster's metadata takes no enumeration"
    assert "64 samples" in found.evidence


def test_records_without_timing_are_not_judged_and_bad_ones_do_no_harm():
    assert diagnose([]).cause is SlowdownCause.UNKNOWN
    assert diagnose([event("step", 0, 1, step=10)]).cause is SlowdownCause.UNKNOWN
    few = diagnose(Simulation(windows=2, late_compute={1: 0.1}).events())
    assert few.cause is SlowdownCause.UNKNOWN
    assert "Too few steps were timed" in few.evidence
    [first, *rest] = Simulation(windows=8).events()
    bare = {name: first[name] for name in ("kind", "time", "rank", "generation", "step", "steps", "seconds", "nodes")}
    only_bare = diagnose([bare | {"time": bare["time"] + number} for number in range(8)])
    assert only_bare.cause is SlowdownCause.HEALTHY
    assert diagnose([{"kind": "timing", "time": 0.0, "rank": 0}, bare, *rest]).cause is SlowdownCause.HEALTHY


@pytest.mark.parametrize(
    "damage",
    [
        {"nodes": "0, 1"}, {"segments": {"input": 0.1}}, {"segments": {"input": [float("nan"), 0.1, 0.1]}},
        {"collectives": [3]}, {"time": None},
    ],
)  # fmt: skip
def test_a_damaged_event_is_left_out_and_the_others_are_read(damage):
    events = Simulation(windows=5, ranks=3).events()
    events[2] = events[2] | damage
    assert [window.step for window in windows(events)] == [10, 20, 40, 50]


def test_the_first_window_of_a_generation_does_not_count_where_others_are_there():
    events = Simulation(windows=5).events()
    again = [item | {"time": item["time"] + 100, "generation": 2} for item in events[:3]]
    kept = settled(windows([*events, *again]))
    steps = [(item.generation, item.step) for item in kept]
    assert steps == [*((1, step) for step in (20, 30, 40, 50)), *((2, step) for step in (10, 20, 30))]


def test_latency_and_bandwidth_are_found_again():
    [*_, last] = Simulation(noise=0.0, outliers=0.0, buckets=(100_000, 5_000_000)).events()
    fit = collective_link(windows([last])[0].collectives)
    assert fit is not None
    assert fit.latency_seconds == pytest.approx(0.0004, rel=0.05)
    assert 1 / fit.seconds_per_byte == pytest.approx(1.2e9, rel=0.05)

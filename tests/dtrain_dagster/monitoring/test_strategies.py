"""Strategies: what they promise is what the simulated training then does; and what cannot help is not promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain_dagster.monitoring.alerts import COMMUNICATION, alerts, communication_alert
from dtrain_dagster.monitoring.stragglers import FEWEST_WINDOWS
from dtrain_dagster.monitoring.strategies import Change, step_model, strategies
from dtrain_dagster.monitoring.windows import (
    COMMUNICATION_LIMIT,
    KEPT_EVENTS,
    KEPT_WINDOWS,
    keep,
    settled,
    shares,
    windows,
)
from dtrain_dagster.planning.optimizer import GPUMemory, gpu_memory
from tests.dtrain_dagster.simulated_timing import Simulation
from trainer.rundir import event

TRAINING = {"gradient_accumulation_steps": 2, "batch_size_per_gpu": 128, "checkpoint_frequency": 40}
LARGE = Simulation(windows=12, noise=0.0, outliers=0.0, buckets=(60_000_000,))
SMALL = Simulation(windows=12, noise=0.0, outliers=0.0, computing=0.003, latency=0.001, buckets=(40_000, 40_000))


def of(simulation: Simulation) -> dict[str, Change]:
    return {item.name: item for item in strategies(settled(windows(simulation.events())), TRAINING)}


def rate(simulation: Simulation) -> float:
    return step_model(settled(windows(simulation.events()))).samples_per_second


def test_where_bandwidth_is_short_bytes_are_saved_and_the_promise_is_kept():
    found = of(LARGE)
    halved = replace(LARGE, buckets=(30_000_000,))
    assert found["fp16 compression"].time == pytest.approx(rate(LARGE) / rate(halved), rel=0.03)
    assert found["top-k compression"].gain > found["fp16 compression"].gain > 0.1
    assert found["fp16 compression"].setting == "training.communication = fp16 (now allreduce)"
    events = LARGE.events()
    names = {item.name for item in strategies(settled(windows(events)), {**TRAINING, "precision": "fp16"})}
    assert "fp16 compression" in names
    assert "top-k compression" not in names, "a training with a loss scale refuses it"
    # as many micro-batches more in each step as the change says
    assert found["more accumulation"].setting == "training.gradient_accumulation_steps = 4 (now 2)"
    doubled = replace(LARGE, micro_batches=(4, 4, 4))
    assert found["more accumulation"].time == pytest.approx(rate(LARGE) / rate(doubled), rel=0.05)
    assert "hierarchical all-reduce" not in found, "each node has one rank"


def test_where_latency_counts_fewer_bytes_are_promised_nothing():
    found = of(SMALL)
    assert not {"fp16 compression", "top-k compression"} & set(found)
    assert found["more accumulation"].gain > 0.4
    assert found["fewer nodes"].cost_gain > 0
    ranked = [item.gain for item in found.values() if item.gain >= 0.01]
    assert ranked == sorted(ranked, reverse=True)


def test_sums_within_nodes_are_for_several_ranks_on_each():
    events = replace(LARGE, ranks=4).events()
    for item in events:
        item["nodes"] = [0, 0, 1, 1]
    found = {item.name: item for item in strategies(settled(windows(events)), TRAINING)}
    assert found["hierarchical all-reduce"].gain > 0.1
    assert found["hierarchical all-reduce"].setting == "training.communication = hierarchical (now allreduce)"
    compressed = strategies(settled(windows(events)), {**TRAINING, "communication": "topk"})
    names = {item.name for item in compressed}
    assert not names & {"fp16 compression", "top-k compression", "hierarchical all-reduce"}, "it does so already"
    assert found["fewer nodes"].setting.startswith("1 node(s) instead of 2")


def test_a_straggler_is_replaced_and_no_word_of_the_network():
    late = Simulation(windows=16, noise=0.0, outliers=0.0, micro_batches=(4, 4, 4), late_compute={1: 0.1})
    found = of(late)
    assert list(found) == ["replace node 11", "go on without node 11"]
    expected = rate(late) / rate(replace(late, late_compute={}))
    assert found["replace node 11"].time == pytest.approx(expected, rel=0.03)


def test_the_alert_counts_all_that_communication_costs_and_says_which_part_is_which():
    """A tenth of the time on the network and more than that waiting: neither is above the limit by itself."""
    late = Simulation(windows=12, noise=0.0, outliers=0.0, buckets=(14_000_000,), late_compute={1: 0.03})
    found = settled(windows(late.events()))
    part = shares(found)
    assert max(part["communication"], part["waiting"]) < COMMUNICATION_LIMIT < part["communication"] + part["waiting"]
    alert = communication_alert(found, TRAINING)
    assert alert is not None
    assert f"{part['communication']:.0%} on the network, {part['waiting']:.0%} waiting" in alert.sentence
    assert f" in steps {found[0].step - found[0].steps + 1} to {found[-1].step} (limit" in alert.sentence
    assert communication_alert(found[:FEWEST_WINDOWS], TRAINING) is not None
    assert communication_alert(found[: FEWEST_WINDOWS - 1], TRAINING) is None, "too few to say it"
    assert alert.title == f"communication takes {part['communication'] + part['waiting']:.0%} of training time"
    assert part["waiting"] > part["communication"]
    assert alert.changes[0].name == "replace node 11"
    assert not {"fp16 compression", "top-k compression"} & {item.name for item in alert.changes}, "no cure"
    assert "compression does not end this waiting" in alert.sentence
    mostly_wire = settled(windows(replace(late, buckets=(30_000_000,), late_compute={1: 0.005}).events()))
    alert = communication_alert(mostly_wire, TRAINING)
    assert alert is not None
    assert "fp16 compression" in {item.name for item in alert.changes}
    assert "replace node 11" not in {item.name for item in alert.changes}


def test_no_advice_that_would_gain_less_than_noise():
    quiet = Simulation(windows=30, noise=0.0, outliers=0.0, late_compute={1: 0.006})
    assert "replace node 11" in of(quiet)
    noisy = replace(quiet, noise=0.4, windows=8, late_compute={1: 0.02})
    rows = settled(windows(noisy.events()))
    assert step_model(rows).noise > 0.05
    assert not [item for item in strategies(rows, TRAINING) if max(item.gain, item.cost_gain) < 0.05]


def test_ranks_that_share_cores_raise_no_alarm_about_a_node_or_the_network():
    laptop = Simulation(windows=16, cores=2, late_compute={0: 0.1}, buckets=(60_000_000,) * 2)
    own = replace(laptop, cores=4)
    assert {item.key for item in alerts(keep((), own.events()), (), TRAINING)} == {COMMUNICATION, "slow compute 10"}
    events = laptop.events()
    assert alerts(keep((), events), (), TRAINING) == []
    assert communication_alert(settled(windows(events)), TRAINING) is None
    assert not of(laptop)


def test_each_straggler_has_an_alert_and_changes_are_against_the_costliest():
    both = Simulation(ranks=5, windows=16, noise=0.0, outliers=0.0, late_compute={1: 0.1, 2: 0.04})
    found = {item.key: item for item in alerts(both.events())}
    assert found["slow compute 11"].changes[0].name == "replace node 11"
    assert found["slow compute 12"].changes == (), "while the other is there, that gains nothing"


def test_input_is_one_node_s_matter_or_everybody_s():
    one = of(Simulation(windows=12, noise=0.0, outliers=0.0, late_input={2: 0.1}))
    assert list(one)[:2] == ["replace node 12", "go on without node 12"], (
        "the faster first, though the other is cheaper"
    )
    assert "quicker input" not in one
    everybody = Simulation(windows=12, noise=0.0, outliers=0.0, input=0.05)
    assert list(of(everybody)) == ["quicker input"]
    promised = 1 / of(everybody)["quicker input"].time
    most = rate(replace(everybody, input=0.0)) / rate(everybody)
    assert 1.2 < promised <= most, "waiting for whose input takes longest would end as well"


def memory(strategy: str = "ddp", **facts: Any) -> GPUMemory:
    """What is known of a GPU of 16 GB of which the half is used."""
    gpu = {"memory_used_bytes": 8e9, "memory_total_bytes": 16e9}
    events = [*Simulation(windows=8).events(), event("node", 0, 1, node_id=10, gpus=[gpu])]
    events = [{**item, **facts} if item["kind"] == "timing" else item for item in events]
    found = gpu_memory(settled(windows(events)), events, {**TRAINING, "strategy": strategy})
    assert found
    return found


def test_a_batch_grows_with_what_grows_with_it_only():
    usual, more = memory(), memory(held_bytes=int(6e9))
    assert memory(held_bytes=1) == usual, "weights, gradients and moments are held in any case"
    assert more.held == 6e9
    assert more.bytes_per_sample == 2e9 / 128
    assert more.batch_at(0.85) == (13.6e9 - 6e9) * 128 / 2e9 // 8 * 8 > usual.batch_at(0.85)
    assert memory(held_bytes=int(16e9)).held < 8e9, "of a process that has ended"
    held = {strategy: memory(strategy, parameters_bytes=10**9).held for strategy in ("ddp", "hsdp", "fsdp")}
    assert held == pytest.approx({"ddp": 4e9, "hsdp": 4e9, "fsdp": 4e9 / 3}), "one rank on each node"
    small = GPUMemory(used=500, total=1000, held=300.0, batch=100, ranks=1)
    assert small.batch_at(0.8) == 248
    assert replace(small, used=900).batch_at(0.8) == 100, "never smaller than now"
    assert replace(small, ranks=2).batch_at(0.8) == 248, "each of the two has half of it, now and then"


def test_people_are_told_once_with_what_would_help_the_most_first():
    recent: tuple[Any, ...] = ()
    told_of: dict[str, Any] = {}
    texts = []
    for item in LARGE.events():
        recent = keep(recent, [item])
        for alert in alerts(recent, told_of, TRAINING):
            told_of[alert.key] = alert
            texts.append(alert.text)
    [text] = texts
    first, *help_ = text.splitlines()
    assert first.startswith("communication takes 33% of training time")
    assert "32% on the network, 1% waiting" in first
    assert "limit 20%" in first
    assert len(help_) == 5
    quicker = [line for line in help_ if "samples per dollar" not in line]
    assert quicker == help_[: len(quicker)], "what is only cheaper comes last"
    gains = [int(line.split("+")[1].split("%")[0]) for line in quicker]
    assert gains == sorted(gains, reverse=True)


def test_records_without_samples_are_told_of_without_strategies():
    late = Simulation(windows=12, buckets=(120_000_000,), late_compute={1: 0.1}).events()
    bare = [{name: value for name, value in item.items() if name != "samples"} for item in late]
    found = alerts(keep((), bare), (), TRAINING)
    assert {item.key for item in found} == {"communication", "slow compute 11"}
    assert not any(item.changes for item in found)
    assert strategies(settled(windows(bare)), TRAINING) == ()


def test_a_moment_of_many_short_steps_is_no_alert():
    short = Simulation(windows=12, computing=0.003, optimizer=0.0005, buckets=(4_000_000,)).events()
    longer = Simulation(windows=12, computing=0.03, optimizer=0.005, buckets=(40_000_000,)).events()
    assert communication_alert(settled(windows(short)), TRAINING)
    assert not alerts(short, (), TRAINING)
    assert [item.key for item in alerts(longer, (), TRAINING)] == [COMMUNICATION]


def test_of_a_long_job_only_the_latest_windows_are_kept():
    events = Simulation(windows=KEPT_WINDOWS + 9, save_every=40).events()
    kept = keep(keep((), events[:30]), events[30:])
    assert sum(item["kind"] == "timing" for item in kept) == KEPT_WINDOWS
    assert kept[-1] == events[-1]
    saves = [event("checkpoint", 0, 1, step=step) for step in range(KEPT_EVENTS + 9)]
    assert len(keep((), saves)) == KEPT_EVENTS, "nor does what is kept grow where no timing is recorded"

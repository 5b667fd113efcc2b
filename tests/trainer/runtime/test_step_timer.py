"""Where the time of a step went: what is made of measured times, and delays planted in real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from harness.worlds import Job
from trainer.comm.group import Collective
from trainer.comm.static_rendezvous import join_world
from trainer.comm.world import RankFacts, World
from trainer.config import DistributedTrainingConfig
from trainer.observability.comm_profiler import (
    EAGER_WINDOWS,
    FIELDS,
    MOST_STEPS,
    PROBE_EVERY,
    PROBE_REST,
    WINDOW_SECONDS,
    CommunicationProfiler,
    TimingWindow,
    hosts_of,
    is_probe_due,
    name_of,
    next_probe,
    row_of,
    summarize_window,
)
from trainer.observability.link_probe import links
from trainer.runtime.step_timer import SEGMENTS, Mark, StepTimer, computed_at, durations, moments

CPU = torch.device("cpu")
STEP = {"input": 0.01, "forward": 0.2, "backward": 0.3, "optimizer": 0.05, "other": 0.01, "samples": 64}
NETWORK = 0.02


def window(exposed: list[list[float]], collectives: Any = (), own: Any = None, **changes: Any) -> TimingWindow:
    """``exposed``: (ranks, steps); a change is a value of a field for each rank."""
    values = np.zeros((len(exposed), len(exposed[0]), len(FIELDS) + 2 * len(collectives)))
    for name, value in {**STEP, **changes}.items():
        values[:, :, FIELDS.index(name)] = np.reshape(value, (-1, 1))
    values[:, :, FIELDS.index("exposed")] = exposed
    if own is not None:
        values[:, :, len(FIELDS) :] = own
    return TimingWindow(values, collectives)


SLOW, FORWARD = NETWORK + 0.05, [0.2, 0.25, 0.2]
TWICE = {"forward": [0.4, 0.2], "backward": [0.6, 0.3], "samples": [128, 64]}
TURNS = [[NETWORK if step % 3 == rank else NETWORK + 0.09 for step in range(6)] for rank in range(3)]


@pytest.mark.parametrize(
    ("exposed", "changes", "communication", "waiting", "late"),
    [
        # Rank 1 takes 50 ms longer: the others' own clocks would blame the network for it.
        ([[SLOW] * 4, [NETWORK] * 4, [SLOW] * 4], {"forward": FORWARD}, NETWORK, [0.05, 0, 0.05], [0, 0.05, 0]),
        # Ranks take turns in being late: a minimum of means would be 0.08, and no rank is late as a rule.
        (TURNS, {}, NETWORK, [0.06] * 3, [0] * 3),
        # A network that is slow for all is no rank's fault.
        ([[0.4] * 3] * 2, {}, 0.4, [0, 0], [0, 0]),
        # Three micro-batches on two ranks: one has two of them.
        ([[NETWORK] * 5, [NETWORK + 0.5] * 5], TWICE, NETWORK, [0, 0.5], [0.5, 0]),
        # A single rank neither communicates nor waits.
        ([[0.001] * 2], {}, 0.0, [0.0], [0.0]),
    ],
    ids=["a slow rank", "turns", "a slow network", "more work", "alone"],
)  # fmt: skip
def test_the_network_is_the_least_of_each_step_and_the_rest_is_waiting_for_who_is_late(
    exposed: list[list[float]], changes: dict[str, Any], communication: float, waiting: list[float], late: list[float]
) -> None:
    ranks, steps = len(exposed), len(exposed[0])
    found = summarize_window(window(exposed, **changes), "mesh")
    segments = found["segments"]
    assert segments["communication"] == pytest.approx([communication] * ranks)
    assert segments["waiting"] == pytest.approx(waiting)
    assert found["typical"]["late"] == pytest.approx(late)
    forward = changes.get("forward", [0.2] * ranks)
    assert segments["forward"] == pytest.approx(forward)
    assert segments["other"] == pytest.approx([0.011 if ranks == 1 else 0.01] * ranks)
    if ranks > 1 and "samples" not in changes:
        assert found["typical"]["compute"] == pytest.approx([0.35 + each for each in forward])
    assert np.sum(list(segments.values()), axis=0) == pytest.approx([found["seconds"]] * ranks), "they leave no gap"
    assert found["samples"] == [steps * each for each in changes.get("samples", [64] * ranks)]
    assert (found["steps"], found["collectives"]) == (steps, [])


def test_each_collective_has_its_network_its_waiting_and_what_the_backward_pass_hides() -> None:
    """The second step has no 'bucket 1'."""
    sizes = (("bucket 0", 1000), ("bucket 1", 3000))
    gone = np.nan
    own = np.array([
        [[0.5, 0.4, 0.30, 0.1], [0.6, 0.5, gone, gone], [0.1, 0.1, 0.20, 0.0]],
        [[0.2, 0.2, 0.36, 0.0], [0.1, 0.1, gone, gone], [0.9, 0.3, 0.20, 0.0]],
        [[0.2, 0.1, 0.30, 0.2], [0.1, 0.0, gone, gone], [0.1, 0.1, 0.23, 0.0]],
    ])  # fmt: skip
    first, second = summarize_window(window([[0.1] * 3] * 3, sizes, own), "mesh")["collectives"]
    network = (0.2 + 0.1 + 0.1) / 3
    assert (first["name"], first["bytes"]) == sizes[0]
    assert first["wire_seconds"] == pytest.approx(network, abs=1e-6)
    assert first["waiting_seconds"] == pytest.approx(
        [1.2 / 3 - network, 1.2 / 3 - network, 0.4 / 3 - network], abs=1e-6
    )
    assert first["overlapped_seconds"] == pytest.approx([1.0 / 3, 0.2, 0.2 / 3], abs=1e-6)
    assert first["bandwidth_bytes_per_second"] == pytest.approx(2 * 2 / 3 * 1000 / network, rel=1e-3)
    assert second["wire_seconds"] == pytest.approx(0.25)
    assert second["waiting_seconds"] == pytest.approx([0, 0.03, 0.015])
    star, _ = summarize_window(window([[0.1] * 3] * 3, sizes, own), "star")["collectives"]
    assert star == {**first, "bandwidth_bytes_per_second": None}


def test_machines_are_numbered_in_order_of_appearance() -> None:
    assert hosts_of([(9e12, 2), (7.0, 4), (9e12, 2)]) == ((0, 2), (1, 4), (0, 2))


def test_one_step_of_one_rank_as_a_row() -> None:
    def all_reduce(what: str, began: float, ended: float) -> Collective:
        return Collective(1, what, 8, began, began, ended)

    marks = [
        Mark(None, 10.0), Mark("checkpoint", 10.5), Mark("other", 10.6), Mark(None, 50.0), Mark("input", 50.1),
        Mark("other", 50.2), Mark("forward", 51.0), Mark("backward", 52.0), Mark("forward", 52.5),
        Mark("backward", 53.5), Mark("exposed", 54.0), Mark("optimizer", 54.1), Mark("exposed", 54.3),
        Mark("optimizer", 54.4),
    ]  # fmt: skip
    collectives = [
        all_reduce("all-reduce of gradient bucket 0 (8 bytes)", 52.9, 53.4),
        all_reduce("all-reduce of gradient bucket 1 (8 bytes)", 53.4, 54.0),
        all_reduce("commit of the step", 54.1, 54.3),
    ]
    row = row_of(marks, collectives, 64, ["bucket 0", "bucket 1", "which gradients there are", "commit"])
    found = dict(zip(FIELDS, row, strict=False))
    assert found == pytest.approx({
        "input": 0.1, "forward": 1.3, "backward": 2.0, "exposed": 0.7, "optimizer": 0.2, "checkpoint": 0.5,
        "other": 0.2, "samples": 64,
    })  # fmt: skip
    assert row[len(FIELDS) :] == pytest.approx([0.5, 0.5, 0.6, 0.1, np.nan, np.nan, 0.2, 0.0], nan_ok=True)


@dataclass(frozen=True)
class Event:
    """In the place of one of CUDA: when the GPU came by, in milliseconds of its own clock."""

    at: float

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        assert later.at >= self.at
        return later.at - self.at


def test_on_a_gpu_a_segment_is_what_the_gpu_spent_on_it_while_the_host_was_ahead() -> None:
    """The host asks for 0.9 s of work within 0.04 s, and waits for it before it commits the step."""
    marks = [
        Mark(None, 100.00, Event(5000)), Mark("input", 100.01, Event(5010)), Mark("forward", 100.02, Event(5310)),
        Mark("backward", 100.03, Event(5810)), Mark("exposed", 100.04, Event(5910)),
        Mark("optimizer", 100.92, Event(5920)), Mark("exposed", 101.0, Event(6000)),
        Mark("optimizer", 101.01, Event(6100)),
    ]  # fmt: skip
    when = moments(marks)
    assert when == pytest.approx([100.0, 100.01, 100.31, 100.81, 100.91, 100.92, 101.0, 101.1])
    assert computed_at(marks, when) == pytest.approx(100.81)
    assert durations(marks, when) == pytest.approx({
        "input": 0.01, "forward": 0.3, "backward": 0.5, "exposed": 0.18, "optimizer": 0.11, "checkpoint": 0, "other": 0,
    })  # fmt: skip


def test_a_step_that_failed_leaves_no_time_behind_and_one_that_is_done_ends_where_the_next_begins() -> None:
    timer = StepTimer(True, CPU)
    timer.mark("input")
    timer.drop()
    timer.mark("forward")
    timer.mark("optimizer")
    marks = timer.take()
    assert [mark.segment for mark in marks] == [None, "forward", "optimizer"]
    timer.mark("input")
    after = timer.take()
    assert [mark.segment for mark in after] == [None, "input"]
    assert after[0].at == marks[-1].at
    off = StepTimer(False, CPU)
    off.mark("forward")
    off.drop()
    assert len(off.take()) == 1


def test_links_are_probed_where_the_network_takes_long_and_not_often() -> None:
    assert not is_probe_due([0.9, 0.9], 20, 0), "the first steps of a world say little"
    assert is_probe_due([0.05, 0.15, 0.15], 30, 0)
    assert not is_probe_due([0.05, 0.05, 0.15], 30, 0)
    assert not is_probe_due([0.9] * 3, 229, 230)
    assert is_probe_due([0.9] * 3, 230, 230)
    assert next_probe(30, took=0.1, step_seconds=0.5) == 30 + PROBE_EVERY
    assert next_probe(30, took=2.0, step_seconds=0.001) == 30 + 2000 * PROBE_REST, "a tenth of a per cent of the time"
    assert links(2) == [(0, 1), (1, 0)]
    assert sorted(links(3)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert len(set(links(5))) == 10
    assert name_of("commit of the step") == "commit"
    assert name_of("all-reduce of gradient bucket 12 (4 bytes)") == "bucket 12"


def test_ranks_exchange_at_each_report_at_first_then_once_a_second_and_at_the_end() -> None:
    profiler = CommunicationProfiler(join_world(DistributedTrainingConfig(world_size=1)), StepTimer(True, CPU))

    def take_step(seconds: float) -> None:
        at = profiler.timer.take()[-1].at
        profiler.timer._marks = [
            Mark(None, at),
            Mark("input", at),
            Mark("backward", at + seconds),
            Mark("exposed", at + seconds),
        ]
        profiler.add(samples=8)

    for step in range(1, EAGER_WINDOWS + 1):
        assert profiler.is_due(step, is_last=False)
        take_step(1 / 128)  # exact, however long the machine is up
        window = profiler.exchange(step, (1.5, 8))
        assert window.totals == (1.5, 8)
        assert window.field("samples").tolist() == [[8]]
    lasts = round(128 * WINDOW_SECONDS)
    assert not profiler.is_due(EAGER_WINDOWS + lasts - 1, is_last=False)
    assert profiler.is_due(EAGER_WINDOWS + 1, is_last=True)
    assert profiler.is_due(EAGER_WINDOWS + lasts, is_last=False)
    for _ in range(lasts):
        take_step(1e-5)
    assert profiler.exchange(EAGER_WINDOWS + lasts).values.shape[1] == lasts, "no step is left out"
    assert profiler.is_due(EAGER_WINDOWS + lasts + MOST_STEPS, is_last=False), "before steps would be dropped"
    assert not profiler.is_due(EAGER_WINDOWS + lasts + MOST_STEPS - 1, is_last=False)
    assert not CommunicationProfiler(profiler.world, StepTimer(False, CPU)).is_due(1, is_last=True)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_a_gpu_holds_between_steps_is_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(kind)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda where: 5_000 if where == device else 0)
    profiler = CommunicationProfiler(World(RankFacts(), device, "gloo"), StepTimer(False, CPU))
    found = profiler.report(window([[0.1]]), samples_at_once=8, micro_batches=2, parameters_bytes=400)
    assert found.get("held_bytes") == (5_000 if kind == "cuda" else None)
    assert found["parameters_bytes"] == 400


PLANTED = 0.4
PLANTS = [("input", 1, 2), ("forward", 1, 4), ("backward", 1, 6), ("optimizer", 1, 8), ("save", 0, 11)]
"""Where, on which node, in which step; windows are of two steps, and what is late in the first of them is waited for in
one of them."""


@pytest.mark.slow
def test_planted_delays_are_found_on_their_rank_in_their_segment(new_job: Callable[..., Job]) -> None:
    faults = ", ".join(
        f'{{"kind": "sleep", "at": "{at}", "node": {node}, "step": {step}, "seconds": {PLANTED}}}'
        for at, node, step in PLANTS
    )
    nodes = {"DTRAIN_FAULTS": f"[{faults}]", "LOCAL_WORLD_SIZE": "1"}
    job = new_job(
        environment=nodes, world_size=2, gradient_accumulation_steps=1, max_steps=12, log_frequency=2,
        checkpoint_frequency=11,
    )  # fmt: skip
    assert job.run(2) == [0, 0], job.log()
    windows = {item["step"]: item for item in job.events("timing")}
    assert sorted(windows) == [2, 4, 6, 8, 10, 12]
    unexplained = []
    for (at, node, step), item in zip(PLANTS, list(windows.values())[1:], strict=True):
        segments, other = item["segments"], 1 - node
        assert item["step"] == step + (1 if at == "save" else 2)
        assert segments["checkpoint" if at == "save" else at][node] >= PLANTED / 2, at
        # Steps end together, so what one rank works longer the other waits longer.
        ahead = segments["waiting"][other] - segments["waiting"][node]
        work = [sum(seconds[rank] for name, seconds in segments.items() if name != "waiting") for rank in range(2)]
        late = item["typical"]["late"]
        assert late[node] - late[other] == pytest.approx(ahead, abs=1e-6)
        assert segments["communication"][0] == segments["communication"][1]
        bucket, commit = item["collectives"]
        assert (bucket["name"], bucket["bytes"], commit["name"]) == ("bucket 0", item["parameters_bytes"], "commit")
        waited = bucket["waiting_seconds"][other] - bucket["waiting_seconds"][node]
        unexplained.append((abs(ahead - (work[node] - work[other])), abs(ahead - waited)))
        assert bucket["bandwidth_bytes_per_second"] > 0
        assert np.mean(np.sum(list(segments.values()), axis=0)) == pytest.approx(item["seconds"], abs=1e-6)
        assert (item["steps"], item["nodes"], item["topology"]) == (2, [0, 1], "all-reduce")
        assert sum(item["samples"]) == 2 * 64
    # In most windows: a busy machine holds up a rank at other places, too, where the other does not wait for it.
    assert max(np.median(unexplained, axis=0)) < PLANTED / 4
    assert min(item["segments"]["communication"][0] for item in windows.values()) < PLANTED / 4, "it was no network"
    assert set(SEGMENTS) - {"exposed"} | {"communication", "waiting"} == set(segments)

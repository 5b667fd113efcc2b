"""The bill and its ledger: exact for any history, and right for histories whose causes are known."""

from __future__ import annotations

import itertools
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs import export
from dtrain_dagster.costs.ledger import Ledger, ledger
from dtrain_dagster.costs.money import SECOND, digits_of, shown, split, total_shown
from dtrain_dagster.costs.tracker import CostTracker, bill_usage
from dtrain_dagster.costs.usage import NodeUsage

SPRING, AUTUMN = 1774746000.0, 1792890000.0
"""When clocks in Europe change in 2026: 29 March and 25 October, 01:00 UTC."""
SKUS = ("Standard_NC6s_v3", "Standard_NC24ads_A100_v4", "Standard_ND40rs_v2")

moments = st.builds(
    lambda around, offset: around + offset, st.sampled_from((SPRING, AUTUMN)), st.floats(-5e4, 5e4, allow_nan=False)
)
stays = st.builds(
    lambda node, start, length, sku, tier, is_probe, checked, kept: NodeUsage(
        node_id=node,
        sku=sku,
        started_at=start,
        ended_at=start + length,
        tier=tier,
        is_probe=is_probe,
        preflight_until=None if checked is None else start + checked,
        kept_since=None if kept is None else start + length - kept,
    ),
    st.integers(0, 5),
    st.one_of(moments, st.just(AUTUMN)),
    st.one_of(st.floats(-3600, 2e5), st.sampled_from((0.0, 1e-7, -60.0, 3600.0, float("nan")))),
    st.sampled_from(SKUS),
    st.sampled_from((None, "dedicated", "low_priority", "spot")),
    st.sampled_from((False, False, True)),
    st.sampled_from((None, None, 2.5, 1e6, float("nan"))),
    st.sampled_from((None, None, 600.0, 1e6)),
)
histories = st.lists(stays, min_size=1, max_size=12).filter(
    lambda usage: not any(item.sku == SKUS[2] and item.tier in ("low_priority", "spot") for item in usage)
)
junk = st.sampled_from((None, "x", -1, float("nan"), 1e308, 5e-324, 10**400, [], {}, [None], True))
numbers = st.one_of(st.integers(-5, 400), st.floats(0, 1e4))
seconds = st.lists(st.one_of(st.floats(0, 10), st.floats(0, 10), junk), min_size=1, max_size=3)
damaged = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(("membership", "phase", "timing", "step", "link", "hang", "end", "checkpoint")),
            "time": st.one_of(moments, moments, moments, junk),
            "rank": st.one_of(st.just(0), st.just(0), junk),
            "generation": st.one_of(st.integers(1, 4), st.integers(1, 4), junk),
        },
        optional={
            "name": st.sampled_from(("startup", "data", "training", "evaluation", "checkpoint", "finalise", "odd")),
            "nodes": st.one_of(st.lists(st.integers(0, 5), min_size=1, max_size=3), junk),
            "joined": st.one_of(st.lists(st.integers(0, 5), max_size=3), junk),
            "seconds": st.one_of(numbers, junk),
            "step": st.one_of(st.integers(0, 400), junk),
            "steps": st.one_of(st.integers(0, 50), junk),
            "step_seconds": st.one_of(st.floats(0, 100), junk),
            "waited_seconds": st.one_of(numbers, junk),
            "status": st.sampled_from(("succeeded", "stopped", "failed")),
            "segments": st.one_of(
                st.dictionaries(st.sampled_from(("input", "forward", "waiting", "checkpoint", "other")), seconds), junk
            ),
        },
    ),
    max_size=20,
)


@st.composite
def trainings(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Generations that form, work and break off, among damaged events; the clock may step back."""
    told, now = draw(damaged), AUTUMN - draw(st.floats(0, 4e4))
    for generation in range(1, draw(st.integers(1, 5))):
        nodes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        now += draw(st.floats(-3600, 3600))
        joined = draw(st.sampled_from((nodes, [], nodes[:1])))
        step, waits = draw(st.integers(0, 100)), draw(st.floats(0, 600))
        told.append(at("membership", now, generation, nodes=nodes, joined=joined, step=step, seconds=waits))
        for kind in draw(st.lists(st.sampled_from(("phase", "timing", "hang", "link")), max_size=8)):
            now += draw(st.floats(0, 1800))
            name = draw(st.sampled_from(("startup", "training", "evaluation", "checkpoint", "finalise")))
            step += 10
            values = draw(st.lists(st.floats(0, 50), min_size=len(nodes), max_size=len(nodes)))
            segments = {"forward": values, "waiting": values[::-1], "checkpoint": [0.1] * len(nodes)}
            fields = {
                "phase": {"name": name},
                "timing": {"step": step, "steps": 10, "nodes": nodes, "segments": segments},
            }
            told.append(at(kind, now, generation, **fields.get(kind, {}), waited_seconds=30.0))
    return told


@given(histories, trainings(), st.booleans())
def test_the_ledger_is_the_bill_whatever_happened(usage, told, running):
    usage = [*usage, stay(1, AUTUMN - 5e4, AUTUMN + 5e4)]  # so that there is something to divide
    tracker = CostTracker("local", usage, "dedicated")
    found = ledger(tracker.nodes, told, running)
    assert found.units == tracker.total_units == sum(node.units for node in tracker.nodes)
    assert found.microseconds == sum(node.microseconds for node in tracker.nodes)
    assert all(entry.units > 0 and entry.microseconds > 0 for entry in found.entries)
    by_node: dict[int, int] = defaultdict(int)
    for entry in found.entries:
        by_node[entry.node_id] += entry.units
    for node in tracker.nodes:
        by_node[node.node_id] -= node.units
    assert not any(by_node.values())
    amounts = [row.units for row in found.causes().values()]
    digits = digits_of(found.units)
    assert sum(shown(amounts, digits), Decimal(0)) == total_shown([found.units], digits)
    for places in (2, export.DIGITS):
        tables = (
            export.ledger_rows(found, places),
            export.node_rows(tracker, places),
        )
        for rows in tables:
            assert sum((row["usd"] for row in rows), Decimal(0)) == total_shown([found.units], places)


@given(histories)
def test_each_node_is_paid_once_for_each_moment(usage):
    """Against counting moment by moment between all starts and ends."""
    intervals, notes = bill_usage(usage)
    valid = [item for item in usage if item.ended_at >= item.started_at]
    bounds = sorted({round(at * SECOND) for item in valid for at in (item.started_at, item.ended_at)})
    expected = sum(
        end - begin
        for node in {item.node_id for item in valid}
        for begin, end in itertools.pairwise(bounds)
        if any(
            item.node_id == node and round(item.started_at * SECOND) <= begin and end <= round(item.ended_at * SECOND)
            for item in valid
        )
    )
    assert sum(item.microseconds for item in intervals) == expected
    assert any("clock" in note for note in notes) == (len(valid) < len(usage))


@given(st.integers(0, 10**15), st.lists(st.floats(0, 1e9), min_size=1, max_size=8).filter(any))
def test_a_split_is_whole_and_fair(total, weights):
    parts = split(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert part >= 0
        assert part == pytest.approx(total * weight / sum(weights), abs=1 + 1e-9 * total)


def at(kind: str, time: float, generation: int = 1, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "rank": rank, "generation": generation, **fields}


def window(time: float, step: int, nodes: list[int], generation: int = 1, **segments: list[float]) -> dict[str, Any]:
    """Ten steps of a second each."""
    return at("timing", time, generation, step=step, steps=10, seconds=1.0, nodes=nodes, segments=segments)


def stay(node: int, started_at: float, ended_at: float) -> NodeUsage:
    return NodeUsage(node_id=node, sku=SKUS[0], started_at=started_at, ended_at=ended_at)


def seconds_of(found: Ledger) -> dict[str, float]:
    return {str(cause): row.seconds for cause, row in found.causes().items()}


def test_pre_flights_and_nodes_that_are_kept_have_causes_of_their_own():
    """Node 1 fails its pre-flight, and another takes its place; node 0 fails at the end and is kept."""
    told = [
        at("membership", 115.0, nodes=[0, 1], joined=[0, 1], step=0, seconds=1.0),
        at("phase", 116.0, name="startup"),
        window(126.0, 10, [0, 1], forward=[1.0, 1.0]),
        at("phase", 126.0, name="training"),
        at("end", 127.0, status="failed"),
    ]
    usage = [
        NodeUsage(node_id=0, sku=SKUS[0], started_at=100.0, ended_at=188.0, preflight_until=103.0, kept_since=128.0),
        NodeUsage(node_id=1, sku=SKUS[0], started_at=100.0, ended_at=104.0, preflight_until=104.0),
        NodeUsage(node_id=1, sku=SKUS[0], started_at=105.0, ended_at=128.0, preflight_until=107.0),
    ]
    tracker = CostTracker("local", usage, "dedicated")
    found = ledger(tracker.nodes, told)
    seconds = seconds_of(found)
    assert (seconds["pre-flight"], seconds["kept for debugging"]) == (9.0, 60.0)
    assert found.units == tracker.total_units
    assert "idle" not in seconds
    assert sum(seconds.values()) == 88.0 + 4.0 + 23.0


def test_each_second_of_a_run_that_lost_a_node_has_its_cause():
    """Two nodes come ten seconds apart, start for five, train; node 1 dies, its place is taken, they finish."""
    half = {"forward": [0.5, 0.4], "communication": [0.2, 0.2], "waiting": [0.2, 0.4], "input": [0.1, 0.0]}
    told = [
        at("membership", 115.0, nodes=[0, 1], joined=[0, 1], step=0, seconds=1.0),
        at("phase", 116.0, name="startup"),
        window(126.0, 10, [0, 1], **half),
        at("phase", 126.0, name="training"),
        at("phase", 129.0, name="evaluation"),
        at("phase", 131.0, name="checkpoint"),
        # Rank 0 is held up for two of the ten seconds, and node 1 waits for it.
        window(139.0, 20, [0, 1], forward=[0.8, 0.8], checkpoint=[0.2, 0.0], waiting=[0.0, 0.2]),
        # Four more steps; node 1 is killed at 143, which is noticed after six seconds; two more to regroup.
        at("membership", 151.0, 2, nodes=[0], joined=[], lost=[1], step=24, seconds=2.0),
        at("phase", 151.0, 2, name="regroup"),
        window(161.0, 34, [0], 2, forward=[0.9], other=[0.1]),
        at("membership", 163.0, 3, nodes=[0, 1], joined=[1], lost=[], step=34, seconds=2.0),
        window(173.0, 44, [0, 1], 3, forward=[1.0, 1.0]),
        at("phase", 173.0, 3, name="training"),
        at("phase", 180.0, 3, name="finalise"),
        at("end", 180.0, 3, status="succeeded"),
    ]
    usage = [stay(0, 100.0, 182.0), stay(1, 110.0, 143.0), stay(1, 150.0, 182.0)]
    found = ledger(CostTracker("local", usage, "dedicated").nodes, told)
    assert seconds_of(found) == pytest.approx({
        "productive": 5 + 4 + 8 + 8 + 4 * 0.8 + 4 * 0.8 + 10 + 10 + 10,
        "exposed communication": 2 + 2,
        "waiting for a straggler": 2 + 4,
        "input": 1,
        "checkpoint": 2 + 2 + 4 * 0.2 + 4 * 0.2,
        "evaluation": 3 + 3,
        "finish": 7 + 7 + 2 + 2,
        "provisioning": 10,
        "start-up": 5 + 1 + 5 + 1 + 13,
        "lost to a failure": (6 + 2) + 2,
    }, rel=1e-5)  # fmt: skip
    assert found.goodput == pytest.approx((61.4 + 4 + 6 + 1) / 147)


def test_work_that_was_done_again_and_nodes_that_were_frozen_are_lost():
    told = [
        at("membership", 10.0, nodes=[0, 1], joined=[0, 1], step=0, seconds=0.0),
        window(20.0, 10, [0, 1], forward=[1.0, 1.0]),
        window(30.0, 20, [0, 1], forward=[1.0, 1.0]),
        # Node 1 is stopped, and is paid for until the end; the launch ends, and the next resumes from step 15.
        at("membership", 32.0, 2, nodes=[0], joined=[], lost=[1], step=20, seconds=2.0),
        at("membership", 60.0, 3, nodes=[0], joined=[0], step=15, seconds=1.0),
        window(70.0, 25, [0], 3, forward=[1.0]),
        at("end", 70.0, 3, status="succeeded"),
    ]
    usage = [stay(0, 0.0, 40.0), stay(1, 0.0, 40.0), stay(0, 50.0, 70.0)]
    assert seconds_of(ledger(CostTracker("local", usage, "dedicated").nodes, told)) == pytest.approx({
        "productive": 10 + 10 + 5 + 5 + 10, "start-up": 10 + 10 + 10, "lost to a failure": 5 + 5 + 10 + 10,
    })  # fmt: skip


def test_a_node_that_froze_and_came_back_was_lost_time_and_no_slow_network():
    told = [
        at("membership", 0.0, nodes=[0, 1], joined=[0, 1], step=0, seconds=0.0),
        at("hang", 27.0, rank=1, step=3, waited_seconds=20.0),
        at("hang", 47.0, rank=0, step=3, waited_seconds=40.0),
        window(50.0, 10, [0, 1], forward=[0.8, 0.8], communication=[4.2, 4.2]) | {"seconds": 5.0},
    ]
    nodes = CostTracker("local", [stay(0, 0.0, 50.0), stay(1, 0.0, 50.0)], "dedicated").nodes
    assert seconds_of(ledger(nodes, told)) == pytest.approx(
        {"productive": 16, "exposed communication": 4, "lost to a failure": 80}, rel=1e-5
    )


@pytest.mark.parametrize("kind", ["membership", "step"])
def test_a_step_that_cannot_be_is_left_out(kind):
    told = [
        at("membership", 100.0, nodes=[0], joined=[0], step=0, seconds=0.0),
        *(at("step", 100.0 + 10 * number, step=10 * number, step_seconds=1.0) for number in range(1, 4)),
        at("end", 140.0, status="succeeded"),
    ]
    usage = CostTracker("local", [stay(0, 90.0, 140.0)], "dedicated").nodes
    good = ledger(usage, told, False)
    bad = at(kind, 99.0, nodes=[0], joined=[0], step=10**12, seconds=0.0, step_seconds=1.0)
    found = ledger(usage, [bad, *told], False)
    assert seconds_of(found) == seconds_of(good)
    assert any("1 event" in note for note in found.notes)


def test_reports_that_come_sooner_and_later_leave_no_time_without_a_cause():
    """Windows of ten seconds each, reported up to 0.3 s after their last step; then a pause that nothing tells of."""
    late = [0.1, 0.3, 0.1, 0.2, 0.0, 0.3]
    told = [
        at("membership", 0.0, nodes=[0], joined=[0], step=0, seconds=0.0),
        *(window(10.0 * place + more, 10 * place, [0], forward=[1.0]) for place, more in enumerate(late, 1)),
        window(75.3, 70, [0], forward=[1.0]),
    ]
    found = ledger(CostTracker("local", [stay(0, 0.0, 75.3)], "dedicated").nodes, told)
    assert seconds_of(found) == pytest.approx({"productive": 70.0, "start-up": 0.1, "unexplained": 0.2 + 5.0}, rel=1e-5)


def test_no_window_outlasts_its_generation():
    """Node 1 is not in the second generation, though a window of the first was reported after that had begun."""
    told = [
        at("membership", 10.0, nodes=[0, 1], joined=[0, 1], step=0, seconds=0.0),
        window(20.0, 10, [0, 1], forward=[1.0, 1.0]),
        window(30.0, 20, [0, 1], forward=[1.0, 1.0]),
        at("membership", 22.0, 2, nodes=[0], joined=[0], step=10, seconds=0.0),
        window(32.0, 20, [0], 2, forward=[1.0]),
        at("end", 32.0, 2, status="succeeded"),
    ]
    nodes = CostTracker("local", [stay(0, 0.0, 32.0), stay(1, 0.0, 32.0)], "dedicated").nodes
    assert seconds_of(ledger(nodes, told))["lost to a failure"] == pytest.approx(2 + 2 + 10)


def test_without_timing_causes_are_coarser_and_it_is_said():
    told = [
        at("membership", 10.0, nodes=[0], joined=[0], step=0, seconds=0.0),
        *(at("step", 10.0 + 5 * place, step=10 * place, step_seconds=0.5) for place in (1, 2, 3)),
        at("phase", 25.0, name="training"),
        at("phase", 29.0, name="checkpoint"),
        at("step", 34.0, step=40, step_seconds=0.5),
        at("phase", 34.0, name="training"),
        at("phase", 36.0, name="checkpoint"),
        at("phase", 39.0, name="finalise"),
        at("end", 39.0, status="succeeded"),
        {"kind": "timing", "time": "noon"},
        {"kind": "phase"},
    ]
    found = ledger(CostTracker("local", [stay(0, 0.0, 39.0)], "dedicated").nodes, told)
    assert seconds_of(found) == pytest.approx({"productive": 20, "checkpoint": 4 + 2, "finish": 3, "start-up": 10})
    assert "2 event(s) could not be read" in found.notes[0]
    assert "training.timing" in found.notes[1]


def test_a_launch_that_never_trained_was_starting_up():
    nodes = CostTracker("local", [stay(0, 0.0, 30.0), stay(0, 100.0, 108.0), stay(1, 100.0, 120.0)], "dedicated").nodes
    assert seconds_of(ledger(nodes, [])) == {"start-up": 58}
    assert seconds_of(ledger(nodes, [], is_script=True)) == {"script": 58}
    assert seconds_of(ledger(nodes, [{"kind": "step"}])) == {"unexplained": 58}
    told = [
        at("membership", 10.0, nodes=[0], joined=[0], step=0, seconds=0.0),
        window(20.0, 10, [0], forward=[2.0], input=[-1.0]),
        window(30.0, 10, [0], forward=[2.0]),
        at("end", 30.0, status="failed"),
    ]
    found = ledger(nodes, told)
    assert seconds_of(found) == {"start-up": 10 + 8 + 10, "productive": 20, "idle": 10}
    assert "1 event(s) could not be read" in found.notes[0]


def test_neighbouring_windows_of_a_long_training_are_taken_together(monkeypatch):
    told = [at("membership", 0.0, nodes=[0, 1], joined=[0, 1], step=0, seconds=0.0)]
    told += [window(10.0 * place, 10 * place, [0, 1], forward=[0.5, 0.9], waiting=[0.5, 0.1]) for place in range(1, 8)]
    told += [window(80.0, 60, [0], 2, forward=[1.0]), at("end", 90.0, 2, status="succeeded")]
    nodes = CostTracker("local", [stay(0, 0.0, 90.0), stay(1, 0.0, 90.0)], "dedicated").nodes
    whole = ledger(nodes, told)
    monkeypatch.setattr("dtrain_dagster.costs.timeline.MOST_SPANS", 3)
    assert seconds_of(ledger(nodes, told)) == pytest.approx(seconds_of(whole), rel=1e-5)
    assert seconds_of(whole)["waiting for a straggler"] == pytest.approx(5 * 5 + 5 * 1)


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("succeeded", {"finish": 70, "idle": 40}),
        ("failed", {"lost to a failure": 10, "finish": 60, "idle": 40}),
    ],
)
def test_nodes_that_are_kept_after_the_end_close_for_a_minute_and_are_idle_then(status, after):
    told = [
        at("membership", 10.0, nodes=[0], joined=[0], step=0, seconds=0.0),
        at("phase", 10.0, name="startup", seconds=10.0),
        window(20.0, 10, [0], forward=[1.0]),
        at("phase", 20.0, name="training", seconds=10.0),
        at("end", 30.0, status=status),
    ]
    nodes = CostTracker("local", [stay(0, 0.0, 130.0)], "dedicated").nodes
    assert seconds_of(ledger(nodes, told)) == {"start-up": 10, "productive": 10, **after}


def test_a_job_that_runs_is_accounted_for_until_now():
    told = [
        at("membership", 10.0, nodes=[0], joined=[0], step=0, seconds=0.0),
        window(20.0, 10, [0], forward=[0.5], input=[0.5]),
    ]
    nodes = CostTracker("local", [stay(0, 0.0, 24.0)], "dedicated").nodes
    assert seconds_of(ledger(nodes, told, running=True)) == {"start-up": 10, "productive": 7, "input": 7}

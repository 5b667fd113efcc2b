"""What a running job will have cost, when that is worth an alarm, and what would save how much."""

from __future__ import annotations

import itertools
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.prices import price_table
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.view import JobView, fold
from dtrain_dagster.planning.optimizer import BaseRun, change_table, rest_of, savings
from dtrain_dagster.planning.projection import Projection, TimeLeft, overruns, project, time_left

V100, T4 = "Standard_NC6s_v3", "Standard_NC4as_T4_v3"
HOURLY = price_table()[V100].usd_per_hour("dedicated")
BEGAN = 1_000_000.0
PHASES = {"startup": 60.0, "evaluation": 80.0, "checkpoint": 10.0, "finish": 40.0}


def usage(seconds: float, nodes: int = 2, sku: str = V100, began: float = BEGAN) -> list[NodeUsage]:
    return [NodeUsage(node_id=node, sku=sku, started_at=began, ended_at=began + seconds) for node in range(nodes)]


def plan(seconds: float = 3600.0, **more: Any) -> dict[str, Any]:
    """Two nodes for so long: 1000 steps, four evaluations, ten checkpoints."""
    usd = 2 * HOURLY * seconds / 3600
    estimate = {
        "usd": {"low": 0.8 * usd, "expected": usd, "high": 1.2 * usd},
        "seconds": {"low": 0.8 * seconds, "expected": seconds, "high": 1.2 * seconds},
    }
    work = {"steps": 1000, "evaluations": 4, "checkpoints": 10}
    return {"estimate": estimate, "work": work, "phases": PHASES, "tier": "dedicated", **more}


def steps(last: int, seconds: float, began: float = BEGAN + 60, every: int = 10) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "time": began + step * seconds, "step": step, "step_seconds": seconds}
        for step in range(every, last + 1, every)
    ]


def projected(intervals: list[NodeUsage], events: list[dict[str, Any]], the_plan: Any = None) -> Projection:
    return project(CostTracker("c", intervals, "dedicated"), the_plan or plan(), fold(JobView(), events))


@pytest.mark.parametrize(
    ("intervals", "events", "seconds", "counts"),
    [
        ([], [], 3600, False),  # nothing has happened: the estimate
        (usage(50), [], 3600, False),  # starting, as planned
        (usage(360), [], 3900, False),  # five minutes more than planned
        (usage(60 + 1500), steps(500, 3.0), 1560 + 500 * 3 + 2 * 20 + 5 + 40, True),
        (usage(60 + 120), steps(40, 3.0), 180 + 960 * 3 + 0.96 * (80 + 10) + 40, False),  # too early to count
        (usage(3200), steps(1000, 3.0), 3240, True),  # all steps done
    ],
)
def test_the_cost_at_the_end(intervals, events, seconds, counts):
    found = projected(intervals, events)
    assert found.at_end is not None
    assert found.at_end.low <= found.at_end.expected <= found.at_end.high
    assert found.counts is counts
    assert found.at_end.expected == pytest.approx(2 * HOURLY * seconds / 3600, rel=0.01)


def finish(at: float, stage: str = "test split") -> dict[str, Any]:
    return {"kind": "finish", "time": at, "stage": stage}


def test_the_time_left_includes_the_finish_and_runs_down_while_it_lasts():
    trained, end = steps(1000, 3.0), BEGAN + 3060
    half = fold(JobView(), steps(500, 3.0))
    assert time_left(half, plan(), BEGAN + 1560) == TimeLeft(seconds=500 * 3 + 40 + 5 + 40, has_finish=True)
    assert time_left(half, plan(), BEGAN + 1575).seconds == 495 * 3 + 40 + 5 + 40, "five steps since the report"
    done = fold(JobView(), trained)
    assert time_left(done, plan(), end) == TimeLeft(seconds=40, has_finish=True), "not 0 s with the finish to come"
    pace = fold(done, [finish(end + 20)])
    assert time_left(pace, plan(), end + 30).seconds == 30
    pace = fold(pace, [finish(end + 40, "baselines")])
    assert time_left(pace, plan(), end + 50).seconds == 10
    assert time_left(pace, plan(), end + 70) is None, "longer than planned: nobody knows how much"
    again = fold(pace, [finish(end + 100)])
    assert time_left(again, plan(), end + 110).seconds == 30, "a node was lost, and the others begin it again"
    anew = fold(pace, [{"kind": "step", "time": end + 200, "step": 990, "step_seconds": 3.0}])
    assert time_left(anew, plan(), end + 200).seconds > 30, "a launch was lost, and another trains again"


def test_without_a_plan_the_time_left_is_to_the_last_step():
    reports = [{**report, "eta_seconds": (1000 - report["step"]) * 3.0} for report in steps(500, 3.0)]
    pause = {"kind": "evaluation", "time": BEGAN + 900, "split": "valid", "seconds": 20.0}
    left = time_left(fold(JobView(), [*reports, pause]), None, BEGAN + 1560)
    assert left == TimeLeft(seconds=1500 + 20, has_finish=False)
    assert left.words == "25 min 20 s to the last step"
    assert time_left(fold(JobView(), [*reports, finish(BEGAN + 1600)]), None, BEGAN + 1601) is None
    assert time_left(JobView(), plan(), BEGAN) is None
    assert time_left(fold(JobView(), reports), {"work": 3}, BEGAN) is None, "a plan of another version"


@pytest.mark.parametrize("stopped_at", [1000, 600])
def test_what_was_paid_of_the_finish_is_not_projected_again(stopped_at):
    pace = [*steps(stopped_at, 3.0), finish(BEGAN + 60 + 3 * stopped_at)]
    whole = 60 + 3 * stopped_at + 40
    for into in (0, 10, 39):
        found = projected(usage(60 + 3 * stopped_at + into), pace).at_end
        assert found is not None
        assert found.expected == pytest.approx(2 * HOURLY * whole / 3600, rel=1e-6)


def test_what_was_measured_takes_the_place_of_what_was_planned_and_the_last_speed_counts():
    pauses = [
        {"kind": "evaluation", "time": BEGAN + 900, "split": "valid", "seconds": 200.0},
        {"kind": "checkpoint", "time": BEGAN + 901, "stall_seconds": 30.0},
    ]
    slower = steps(200, 3.0) + pauses + steps(600, 9.0)[20:]
    found = projected(usage(5460), slower)
    assert found.at_end is not None
    left = 400 * 9.0 + 0.4 * (4 * 200 + 10 * 30) + 40
    assert found.at_end.expected == pytest.approx(2 * HOURLY * (5460 + left) / 3600, rel=0.001)


def test_steps_since_the_last_report_count_once_and_a_pause_counts_as_lost():
    at_the_report, between, in_a_pause = (
        projected(usage(60 + 1500 + more), steps(500, 3.0)).at_end for more in (0, 15, 330)
    )
    assert at_the_report is not None
    assert between is not None
    assert in_a_pause is not None
    assert between.expected == pytest.approx(at_the_report.expected)
    assert in_a_pause.expected - at_the_report.expected == pytest.approx(2 * HOURLY * 300 / 3600)


def stays(node: int, *times: tuple[float, float]) -> list[NodeUsage]:
    return [NodeUsage(node_id=node, sku=V100, started_at=BEGAN + at, ended_at=BEGAN + to) for at, to in times]


@pytest.mark.parametrize(
    ("intervals", "events", "node_seconds"),
    [
        (  # one node, then two that are twice as fast
            stays(0, (0, 680)) + stays(1, (500, 680)),
            steps(110, 4.0) + steps(200, 2.0, began=BEGAN + 280)[11:],
            680 + 180 + 800 * 4.0,
        ),
        (  # two launches with ten hours between them
            stays(0, (0, 460), (36000, 36460)),
            steps(100, 4.0) + steps(200, 4.0, began=BEGAN + 35660)[10:],
            2 * 460 + 800 * 4.0,
        ),
        (  # half of the steps are done again from a checkpoint
            stays(0, (0, 2060), (2060, 2520)),
            steps(500, 4.0) + steps(350, 4.0, began=BEGAN + 1120)[25:],
            2520 + 650 * 4.0,
        ),
    ],
)
def test_worlds_and_launches_that_change_cost_by_the_step_what_each_step_cost(intervals, events, node_seconds):
    found = projected(intervals, events, plan(phases={}))
    assert found.at_end is not None
    assert found.at_end.expected == pytest.approx(HOURLY * node_seconds / 3600, rel=0.001)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e5), st.floats(0.1, 1e4)), max_size=6),
    st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-3, 100), st.floats(0, 1e5)), max_size=30),
)
def test_any_history_has_an_end_that_costs_no_less_than_what_was_paid(stays, reports):
    """Restarts, nodes lost, steps done anew, clocks that step."""
    intervals = [
        NodeUsage(node_id=node, sku=V100, started_at=BEGAN + at, ended_at=BEGAN + at + took) for node, at, took in stays
    ]
    events = [
        {"kind": "step", "time": BEGAN + at, "step": step, "step_seconds": took}
        for step, took, at in sorted(reports, key=lambda report: report[2])
    ]
    found = projected(intervals, events)
    assert found.at_end is not None
    assert 0 <= found.so_far <= found.at_end.low <= found.at_end.expected <= found.at_end.high
    assert found.at_end.high < float("inf")


@pytest.mark.parametrize("damage", [{}, {"estimate": None}, {"estimate": {"usd": {"expected": 0}}}])
def test_a_damaged_plan_is_an_error_and_strange_events_are_nothing(damage):
    with pytest.raises((KeyError, TypeError, ValueError)):
        project(CostTracker("c", usage(10), "dedicated"), damage, JobView())
    strange = [{"kind": "step"}, {"kind": "step", "step": 5, "step_seconds": "fast"}, {"kind": "evaluation"}, {}]
    assert fold(JobView(), strange) == JobView()


def told(actual: float, end: float, before: float | None, known: set[str] = frozenset(), counts: bool = True):  # type: ignore[assignment]
    interval = None if end is None else projected([], []).at_end
    assert interval is not None
    at_end = type(interval)(low=end, expected=end, high=end)
    found = overruns(Projection(so_far=actual, estimated=1.0, at_end=at_end, counts=counts), known, before)
    return [(item.kind, item.threshold) for item in found]


@pytest.mark.parametrize(
    ("actual", "end", "before", "counts", "expected"),
    [
        (1.25, 1.25, 0.25, True, []),
        (1.26, 1.26, None, True, [("actual", 0.25)]),
        (0.5, 1.3, 0.3, True, [("projected", 0.25)]),
        (0.5, 1.3, None, True, []),  # one look is none
        (0.5, 1.3, 0.2, True, []),  # nor are two that do not agree
        (0.5, 9.0, 9.0, False, []),  # too early
        (0.5, 1.8, 0.3, True, [("projected", 0.25)]),  # what both looks agree on
        (1.3, 1.3, 0.3, True, [("actual", 0.25)]),  # spent covers projected
        (1.3, 2.5, 1.4, True, [("actual", 0.25), ("projected", 1.0)]),
        (9.0, 9.0, 9.0, True, [("actual", 1.0)]),  # the highest alone
    ],
)
def test_what_is_told_of_an_overrun(actual, end, before, counts, expected):
    assert told(actual, end, before, counts=counts) == expected


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=30))
def test_nothing_is_told_twice(history):
    known: set[str] = set()
    said = []
    for (_, before), (actual, more) in itertools.pairwise([(0.0, 0.0), *history]):
        interval = projected([], []).at_end
        assert interval is not None
        end = actual + more
        at_end = type(interval)(low=end, expected=end, high=end)
        look = Projection(so_far=actual, estimated=1.0, at_end=at_end, counts=True)
        for item in overruns(look, known, before - 1):
            said.append((item.kind, item.threshold))
            known |= set(item.covers)
    assert len(said) == len(set(said)) <= 6


TODAY = date(2025, 9, 1)


def test_without_measurements_prices_alone_speak_and_what_saves_nothing_is_not_said():
    table, seconds = price_table(), 3600.0
    rest, cheapest = (
        BaseRun(price=table[sku], tier=tier, node_count=1, seconds=seconds, usd=table[sku].usd_per_hour(tier))
        for sku, tier in ((V100, "dedicated"), (T4, "spot"))  # type: ignore[attr-defined]
    )
    told = savings(rest, [], [], {}, table, TODAY)
    assert {item.name for item in told} <= {"other SKU", "spot"}
    [spot] = [item for item in told if item.name == "spot"]
    assert "evicted at any time" in spot.text
    assert "**spot**" in change_table(told)
    assert savings(cheapest, [], [], {}, {T4: table[T4]}, TODAY) == ()
    assert "do not suggest any change" in change_table(())


def test_what_is_left_of_a_job_is_that_of_its_nodes_and_a_change_of_them_pays_a_start():
    events, began = steps(500, 3.0), BEGAN
    the_plan = plan(job={"training": {"checkpoint_frequency": 100}})
    intervals = usage(1560, began=began)
    made = projected(intervals, events, the_plan)
    present = [*intervals, *usage(10, nodes=5)]
    rest = rest_of(present, price_table(), made, the_plan, fold(JobView(), events))
    assert (rest.node_count, rest.price.sku) == (2, V100), "nodes that have left are paid for no more"
    assert made.at_end
    assert rest.usd == pytest.approx(made.at_end.expected - made.so_far)
    assert rest.seconds == pytest.approx(500 * 3 + 40 + 5 + 40), "steps, evaluations, saves, finish"
    assert (rest.step_seconds, rest.evaluation_seconds) == (pytest.approx(1500), pytest.approx(40))
    assert rest.restart_seconds == 60 + 100 / 2 * 3.0, "the start-up, and half of what lies between two checkpoints"
    before = rest_of(present, price_table(), projected(usage(50), [], the_plan), the_plan, JobView())
    assert before.restart_seconds == 0.0, "nothing is done that would be done again"
    assert "starting again" in savings(rest, [], [], {}, price_table(), TODAY)[0].text

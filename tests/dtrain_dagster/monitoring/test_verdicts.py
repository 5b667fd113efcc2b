"""A live verdict does not flip between two causes that cost about as much, nor around a limit."""

from __future__ import annotations

from itertools import pairwise

from dtrain_dagster.dashboard.series import PerformanceDashboard
from dtrain_dagster.monitoring.alerts import LiveVerdict, settle_verdict
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause
from tests.dtrain_dagster.simulated_timing import Simulation


def found(cause: SlowdownCause, share: float, *also: Diagnosis, node: int | None = None) -> Diagnosis:
    return Diagnosis(cause=cause, share=share, evidence=f"{cause} {share}", node_id=node, also=also)


HEALTHY = found(SlowdownCause.HEALTHY, 0.0)


def shown_after(*looks: Diagnosis) -> list[SlowdownCause]:
    verdict: LiveVerdict | None = None
    causes = []
    for look in looks:
        verdict = settle_verdict(verdict, look)
        causes.append(verdict.shown.cause)
    return causes


def test_two_causes_that_cost_about_as_much_do_not_take_turns():
    slow, crowded = SlowdownCause.SLOW_COMPUTE, SlowdownCause.CROWDED
    first = found(slow, 0.20, found(crowded, 0.18), node=1)
    second = found(crowded, 0.21, found(slow, 0.19, node=1))
    assert shown_after(*[first, second] * 5) == [slow] * 10
    verdict = settle_verdict(settle_verdict(None, first), second)
    assert verdict.shown.share == 0.19, "the latest figures"
    assert [item.cause for item in verdict.shown.also] == [crowded]
    clearly = found(crowded, 0.40, found(slow, 0.19, node=1))
    assert shown_after(first, clearly, clearly) == [slow, slow, crowded]


def test_what_is_just_above_a_limit_and_just_below_it_is_one_verdict():
    save = found(SlowdownCause.CHECKPOINT, 0.021)
    assert shown_after(HEALTHY, save, HEALTHY, save, HEALTHY) == [SlowdownCause.HEALTHY] * 5
    assert shown_after(save, HEALTHY, save, HEALTHY) == [SlowdownCause.CHECKPOINT] * 4
    assert shown_after(HEALTHY, save, save)[-1] is SlowdownCause.CHECKPOINT
    assert shown_after(save, HEALTHY, HEALTHY)[-1] is SlowdownCause.HEALTHY


def test_a_hang_and_its_end_are_told_at_once():
    hang = found(SlowdownCause.HANG, 0.9)
    assert shown_after(HEALTHY, hang, HEALTHY) == [SlowdownCause.HEALTHY, SlowdownCause.HANG, SlowdownCause.HEALTHY]


def test_the_dashboard_shows_the_settled_verdict_however_often_it_is_read():
    """Two causes that cost about as much, in windows that are noisy: one title after the first verdict."""
    near = Simulation(windows=60, noise=0.1, outliers=0.03, seed=3, late_compute={1: 0.02}, input=0.022)
    dashboard, causes = PerformanceDashboard(), []
    for item in near.events():
        dashboard.take([item])
        verdicts = [dashboard.verdict({}) for _ in range(3)]
        assert verdicts[0] == verdicts[1] == verdicts[2], "a reader changes nothing"
        if verdicts[0] is not None:
            causes.append(verdicts[0]["title"].split(",")[0])
    changes = [(before, after) for before, after in pairwise(causes) if before != after]
    assert len(changes) <= 2, changes

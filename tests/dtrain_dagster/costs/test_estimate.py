"""From what is known of a training to an interval of time and dollars: tables of cases, and what holds for any."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.costs.estimate import (
    MINIMUM_MARGIN,
    PRIOR_SPREAD,
    Forecast,
    Interval,
    LearnedCorrection,
    Measured,
    Sizes,
    Work,
    estimate_cost,
    figures_on,
)
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.planning.build_plan import (
    Limits,
    compare_choices,
    explain_excess,
    most_epochs,
    remedies,
    sure_objection,
)
from dtrain_dagster.planning.evidence import read_measured
from dtrain_dagster.planning.scoring import Score, learn
from tests.dtrain_dagster.planning.planned_nodes import planned_on
from trainer.documents.presences import NodePresence
from trainer.rundir import event

PRICE = price_of("Standard_NC6s_v3")
SIZES = Sizes(
    train_samples=1000, valid_samples=200, test_samples=400, batch_size_per_rank=50, micro_batches_per_rank=1,
    processes_per_node=1, epochs=4, max_steps=None, eval_frequency=None, checkpoint_frequency=15,
)  # fmt: skip
ALONE = Measured(
    node_count=1, startup_seconds=5.0, warm_up_seconds=1.0, step_seconds=0.2, sample_share=0.75, compute_share=0.5,
    evaluation_seconds=2.0, checkpoint_seconds=0.5, finish_seconds=10.0,
)  # fmt: skip
TWO = replace(ALONE, node_count=2, step_seconds=0.25, communication_share=0.2, evaluation_seconds=1.0)


def forecast(*measured: Measured, sizes: Sizes = SIZES, **more: Any) -> Forecast:
    return Forecast(measured=measured, sizes=sizes, basis="probe", basis_words="", **more)


@pytest.mark.parametrize(
    ("per_epoch", "epochs", "most", "eval_every", "save_every", "expected"),
    [
        (128, 4, None, None, 100, (512, 4, 9)),  # saves: 100 200 300 400 500, 128 256 384 512
        (128, 4, 130, 50, 100, (130, 3, 3)),  # saves: 50 100 130
        (10, 1, None, None, 100, (10, 1, 1)),
        (10, 3, 25, None, 5, (25, 3, 5)),
    ],
)
def test_work_is_what_the_trainers_loop_does(per_epoch, epochs, most, eval_every, save_every, expected):
    asked = {"max_steps": most, "eval_frequency": eval_every, "checkpoint_frequency": save_every}
    work = replace(SIZES, train_samples=50 * per_epoch, epochs=epochs, **asked).work(1)
    assert (work.steps, work.evaluations, work.checkpoints) == expected


def test_the_last_batch_of_an_epoch_is_not_a_full_one():
    assert SIZES.work(1) == Work(steps=80, evaluations=4, checkpoints=8, samples=4000)
    assert replace(SIZES, train_samples=1010).work(1).samples == 4040, "10 samples in the 21st step of each epoch"
    assert replace(SIZES, train_samples=1010, max_steps=25).work(1).samples == 1010 + 4 * 50


def test_the_estimate_adds_up():
    parts = forecast(ALONE).parts(1)
    assert (parts.startup, parts.steps, parts.evaluation, parts.checkpoint) == (5.0, 1.0 + 80 * 0.2, 8.0, 4.0)
    assert parts.total == pytest.approx(5 + 17 + 8 + 4 + 10)
    seconds = forecast(ALONE).seconds_at(1)
    assert seconds.expected == pytest.approx(44)
    assert math.log(seconds.high / 44) == pytest.approx(1.645 * PRIOR_SPREAD)
    faster = forecast(ALONE).parts(1, speed=2.0)
    assert faster.steps == pytest.approx(1 + 80 * 0.2 * 0.75), "half of a step is computing"
    assert faster.evaluation == 4.0
    assert faster.finish == 10 - 4 + 2, "of which 400 samples of the test split are judged, the rest is no GPU's work"
    half = replace(SIZES, train_samples=25)  # one step of half a batch
    assert forecast(ALONE, sizes=half).parts(1).steps == pytest.approx(1 + 4 * 0.2 * (1 - 0.75 / 2))


def test_node_counts_that_were_not_measured():
    more = figures_on((ALONE, TWO), 4, SIZES)
    assert more.step_seconds == pytest.approx(0.25 * 1.2), "communication has doubled with the logarithm of the ranks"
    assert more.evaluation_seconds == 0.5
    one = figures_on((TWO,), 1, SIZES)
    assert one.step_seconds == pytest.approx(0.25 * 0.8), "without communication"
    assert one.communication_share == 0
    shared = figures_on((replace(TWO, node_count=4),), 1, replace(SIZES, cores=2))
    assert shared.step_seconds == pytest.approx(0.25 * 0.8 / 2), "four ranks on two cores get half a core each"
    near, far = forecast(TWO).seconds_at(2), forecast(TWO).seconds_at(16)
    assert far.high / far.expected > near.high / near.expected, "a guess says that it is one"
    other = forecast(TWO).seconds_at(2, speed=1.5)
    assert other.high / other.expected > near.high / near.expected


def test_nodes_that_share_a_machine_are_extrapolated_with_a_wider_interval():
    apart, shared = (forecast(TWO, sizes=replace(SIZES, cores=cores)) for cores in (None, 16))
    assert apart.seconds_at(2) == shared.seconds_at(2)
    for count in (1, 4):
        wide, narrow = (item.seconds_at(count) for item in (shared, apart))
        assert wide.high / wide.expected > 1.2 * narrow.high / narrow.expected


def test_early_stopping_only_widens_the_interval_downwards():
    patient = replace(SIZES, early_stopping_patience=1)
    assert patient.least_work(1).steps == 40
    usual, may_stop = forecast(ALONE).seconds_at(1), forecast(ALONE, sizes=patient).seconds_at(1)
    assert (may_stop.expected, may_stop.high) == (usual.expected, usual.high)
    assert may_stop.low < usual.low
    assert replace(patient, epochs=1).least_work(1).steps == 20


positive = st.floats(1e-3, 1e4)
share = st.floats(0, 1)
measurements = st.builds(
    Measured, node_count=st.integers(1, 16), startup_seconds=positive, warm_up_seconds=positive, step_seconds=positive,
    step_spread=share, sample_share=share, compute_share=share, communication_share=share, evaluation_seconds=positive,
    checkpoint_seconds=positive, finish_seconds=positive,
)  # fmt: skip
sizes = st.builds(
    Sizes, train_samples=st.integers(1, 5000), valid_samples=st.integers(1, 900), test_samples=st.integers(1, 900),
    batch_size_per_rank=st.integers(1, 200), micro_batches_per_rank=st.just(1), processes_per_node=st.integers(1, 3),
    epochs=st.integers(1, 9), max_steps=st.none() | st.integers(1, 900), eval_frequency=st.none() | st.integers(1, 99),
    checkpoint_frequency=st.integers(1, 99), early_stopping_patience=st.none() | st.integers(1, 5),
    cores=st.none() | st.integers(1, 9),
)  # fmt: skip


@given(st.lists(measurements, min_size=1, max_size=3), sizes, st.integers(1, 64), st.floats(0.1, 20))
def test_what_holds_for_any_training(measured, size, nodes, speed):
    made = forecast(*measured, sizes=size)
    seconds = made.seconds_at(nodes, speed)
    assert 0 < seconds.low < seconds.expected < seconds.high
    assert seconds.high / seconds.expected >= 1 + MINIMUM_MARGIN
    parts = made.parts(nodes, speed)
    assert min(parts.startup, parts.steps, parts.evaluation, parts.checkpoint, parts.finish) >= 0
    near = 1 + 1e-9
    longer = forecast(*measured, sizes=replace(size, epochs=size.epochs + 1))
    assert longer.seconds_at(nodes, speed).expected * near >= seconds.expected, "more epochs are never cheaper"
    if size.max_steps:
        more = forecast(*measured, sizes=replace(size, max_steps=size.max_steps + 1))
        assert more.seconds_at(nodes, speed).expected * near >= seconds.expected, "nor are more steps"
    assert made.seconds_at(nodes, 2 * speed).expected <= seconds.expected * near, "a faster GPU never takes longer"
    bills = [estimate_cost(seconds, PRICE, "dedicated", count).usd for count in (nodes, nodes + 1)]
    assert 0 < bills[0].low < bills[0].expected < bills[0].high
    assert bills[1].expected > bills[0].expected, "another node for the same time is never cheaper"


def test_a_run_is_read_from_the_records_of_its_last_launch():
    def at(time: float, kind: str, rank: int = 0, **fields: Any) -> dict[str, Any]:
        return event(kind, rank, 1, **fields) | {"time": time}

    timing = {"steps": 4, "nodes": [0, 1], "segments": {"forward": [0.6, 0.6], "communication": [0.4, 0.4]}}
    nodes = [
        NodePresence(node_id=0, launch=1, started_at=0.0, ended_at=50.0),
        NodePresence(node_id=0, launch=2, started_at=100.0, ended_at=130.0),
        NodePresence(node_id=1, launch=2, started_at=101.0, ended_at=131.0),
    ]
    events = [
        at(20.0, "step", step=4, step_seconds=9.0),
        at(109.0, "phase", name="data", seconds=2.0),
        at(110.0, "phase", name="startup", seconds=3.0),
        at(112.0, "step", step=4, step_seconds=0.5),
        at(112.0, "timing", step=4, samples=[20, 20], **timing),
        at(113.0, "step", step=8, step_seconds=0.3),
        at(113.0, "timing", step=8, samples=[20, 20], **timing),
        at(114.0, "step", step=12, step_seconds=0.21),
        at(114.0, "timing", step=12, samples=[10, 10], **timing),
        at(114.5, "phase", name="training", seconds=4.5),
        at(112.9, "evaluation", split="valid", seconds=0.5),
        at(115.0, "evaluation", split="valid", seconds=0.3),
        at(115.0, "phase", name="evaluation", seconds=0.8),
        at(115.2, "phase", name="checkpoint", seconds=0.1),
        at(115.3, "phase", name="checkpoint", seconds=0.3),
        at(115.3, "phase", 1, name="checkpoint", seconds=7.0),
    ]
    took = read_measured(events, nodes, node_count=2, global_batch_size=10, keeps_cache=True)
    assert took.startup_seconds == 110 - 100 - 2, "shards are unpacked once"
    assert took.step_seconds == pytest.approx(0.3), "half full, the last steps took 0.21 = 0.3 x (0.4 + 0.6 / 2)"
    assert took.warm_up_seconds == pytest.approx(4.5 - 4 * (0.3 + 0.3 + 0.21) + 0.2), "the first evaluation is slower"
    assert (took.evaluation_seconds, took.checkpoint_seconds) == (0.3, 0.15)
    assert took.communication_share == pytest.approx(0.4)
    cold = read_measured(events, nodes, node_count=2, global_batch_size=10, keeps_cache=False)
    run = replace(SIZES, train_samples=110, batch_size_per_rank=5, epochs=1, checkpoint_frequency=11)
    parts = forecast(cold, sizes=replace(run, train_samples=120)).parts(2)
    assert parts.startup + cold.finish_seconds + 4.5 + 0.8 + 0.3 == pytest.approx(31), "all of its wall time"


def score(actual: float, expected: float, half_width: float = 0.2, **more: Any) -> Score:
    seconds = Interval(low=expected * (1 - half_width), expected=expected, high=expected * (1 + half_width))
    fields: dict[str, Any] = {"at": 0.0, "job_id": "a", "basis": "probe", "sku": "A"}
    return Score(**{**fields, **more}, seconds=seconds, usd=seconds, actual_seconds=actual, actual_usd=actual)


def test_one_odd_run_teaches_little_and_many_teach_much():
    assert learn([], "probe", "A") == LearnedCorrection()
    once, often = learn([score(200, 100)], "probe", "A"), learn([score(200, 100)] * 25, "probe", "A")
    assert once.factor == 1, "nothing says that the next one errs alike"
    assert once.spread > 2 * PRIOR_SPREAD, "but the next interval is wider"
    assert often.factor > 1.7
    assert learn([score(200, 100)] * 25, "history", "A") == LearnedCorrection(), (
        "what another basis got wrong is not its fault"
    )
    assert learn([score(200, 100)] * 25, "probe", "B") == LearnedCorrection()
    accident = learn([score(9000, 100)], "probe", "A")
    assert accident.factor == pytest.approx(once.factor, rel=0.01)
    corrected = [score(120, 120, learned_factor=1.2)] * 25
    assert learn(corrected, "probe", "A").factor > 1.15, "what is right thanks to the correction still needs it"


@pytest.mark.parametrize(
    ("budget", "hours", "end", "said"),
    [
        (0.0, 0.0, "high", None),
        (1.0, 1.0, "high", None),
        (0.030, 0.0, "expected", r"about \$0.0374 .* budget_usd is \$0.0300"),
        (0.030, 0.0, "low", r"at least \$0.0307, and budget_usd is \$0.0300"),
        (0.033, 0.0, "low", None),
        (0.033, 0.0, "expected", r"about \$0.0374"),
        (0.045, 0.0, "high", r"may cost up to \$0.0456, and budget_usd is \$0.0450"),
        (1.0, 0.01, "expected", r"about 44 s \(36 s to 54 s\), and deadline_hours is 0.01"),
    ],
)
def test_a_plan_keeps_to_budget_and_deadline(budget, hours, end, said):
    estimate = estimate_cost(forecast(ALONE).seconds_at(1), PRICE, "dedicated", 1)
    found = explain_excess(estimate, Limits(budget_usd=budget, deadline_hours=hours), end)
    if said is None:
        assert found is None
    else:
        assert re.search(said, found or "")


def test_what_would_fit_is_said():
    made = forecast(ALONE, TWO)
    limits = Limits(budget_usd=0.040)  # 47 s of one node
    two = estimate_cost(made.seconds_at(2), PRICE, "dedicated", 2)
    assert explain_excess(two, limits)
    planned = replace(planned_on(PRICE, 2), sizes=SIZES)
    table = compare_choices(planned, made, limits, prices=[PRICE], today=date(2025, 1, 1))
    fits = remedies(table, planned, made)
    assert "DTRAIN_NODES=1" in fits[0]
    assert not any("DTRAIN_NODES=2" in text for text in fits)
    epochs = most_epochs(made, limits, PRICE, "dedicated", 2)
    fewer = forecast(ALONE, TWO, sizes=replace(SIZES, epochs=epochs)).seconds_at(2)
    assert explain_excess(estimate_cost(fewer, PRICE, "dedicated", 2), limits) is None
    assert f"epochs={epochs} instead of 4" in fits[1]
    assert most_epochs(made, Limits(budget_usd=0.001), PRICE, "dedicated", 2) == 0
    assert sure_objection(None, planned, Limits(budget_usd=0.001))

"""Clocks that are set while something runs or waits: what is paid, who is given up, and what people are told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.automation import clock as looks
from dtrain_dagster.automation.capacity_queue import WaitingList, decide_turns, new_ticket
from dtrain_dagster.automation.retraining import CLAIM_SECONDS, claim_retraining
from dtrain_dagster.automation.run_liveness import ALIVE_SECONDS, is_heard, seconds_since_setting
from dtrain_dagster.clusters import presence
from dtrain_dagster.clusters.azure_ml.launch_record import launch_durations
from dtrain_dagster.clusters.base import NodePool
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.sensors.idle_cluster import LONGEST_LOOK_SECONDS, look
from tests.abuse import clocks
from tests.dtrain_dagster.automation.test_retraining import World
from tests.trained import record_training
from trainer.documents.presences import NodePresence
from trainer.engine import budget
from trainer.rundir import RunDir
from trainer.runtime.clock import ORIGIN, SteadyClock
from trainer.storage.open import open_storage

HOUR = 3600.0
NOW = 1_800_000_000.0
JUMPS = [48 * HOUR, -48 * HOUR, 10 * 365 * 24 * HOUR]


@pytest.fixture(scope="module")
def measured() -> Iterator[tuple[Future[dict[str, Any]], ...]]:
    """The bills of a job while the clock is set forward, and of one of two launches while it is set back: they run
    beside each other, and wait most of the time."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit(clocks.measured, [48 * HOUR]), pool.submit(clocks.measured, [-48 * HOUR], launches=2)


@pytest.mark.slow
def test_a_clock_that_is_set_bills_nothing_and_is_told(measured: Sequence[Future[dict[str, Any]]]):
    """Neither node is billed for hours that its clock alone has seen."""
    found = measured[0].result()
    assert not clocks.complaints(found, [48 * HOUR])
    assert any("set forward by 48.0 h" in note and "not billed" in note for note in found["notes"])


@pytest.mark.slow
def test_a_clock_that_is_set_back_leaves_the_bill_whole_over_two_launches(measured: Sequence[Future[dict[str, Any]]]):
    found = measured[1].result()
    assert not clocks.complaints(found, [-48 * HOUR], launches=2)


@pytest.mark.long
def test_clocks_are_set_at_random():
    tally = clocks.attack(random.Random(1), rounds=10)
    assert tally.is_clean, tally.findings


def test_a_steady_clock_goes_on_by_the_count_whatever_the_wall_says():
    wall, count = [NOW], [50.0]
    steady = SteadyClock(NOW - 50.0, count=lambda: count[0], wall=lambda: wall[0])
    for jump in JUMPS:
        wall[0], count[0] = NOW + 10 + jump, 60.0
        assert steady.now() == NOW + 10
        assert steady.jump() == jump
    wall[0] = NOW + 10.2  # a time service corrects a little
    assert steady.jump() == 0.0


def test_processes_of_one_launch_share_a_clock_and_damaged_ones_are_ignored():
    steady = SteadyClock.begin()
    assert SteadyClock.of(steady.variables()).origin == steady.origin
    for text in ("", "nan", "inf", "-1e300", "yesterday"):
        assert abs(SteadyClock.of({ORIGIN: text}).jump()) == 0.0


def test_a_clock_goes_on_from_what_was_recorded_where_the_machine_is_behind():
    ahead = SteadyClock.begin().now() + HOUR
    assert SteadyClock.begin(not_before=ahead).now() >= ahead


def stay(**fields: float) -> NodePresence:
    return replace(NodePresence(node_id=1, launch=1, started_at=NOW, last_seen_at=NOW + 100), **fields)


@pytest.mark.parametrize("jump", JUMPS)
def test_before_the_next_sign_of_life_a_running_node_is_billed_a_few_seconds_more_at_most(jump: float):
    [usage] = presence.usage([stay()], "sku", running=True, now=NOW + 101 + jump)
    assert 100 <= usage.ended_at - usage.started_at <= 100 + presence.STALE_SECONDS


@pytest.mark.parametrize("jump", JUMPS)
def test_after_it_the_node_is_there_healthy_and_billed_to_the_second(jump: float):
    node, now = stay(clock_jump_seconds=jump), NOW + 101 + jump
    [usage] = presence.usage([node], "sku", running=True, now=now)
    assert usage.ended_at - usage.started_at == 101
    assert presence.is_here(node, now, presence.STALE_SECONDS)
    assert presence.health("job", node, now).healthy
    # …and by the clock of somebody whose clock was not set, such as an orchestrator on another machine.
    assert presence.is_here(node, NOW + 101, presence.STALE_SECONDS)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_budget_on_the_nodes_does_not_end_for_a_clock(jump: float):
    found = budget.sum_paid([stay(clock_jump_seconds=jump)], 1, NOW + 101 + jump, 10.0)
    assert found == budget.Paid(101.0, 1)


def test_old_records_without_jumps_are_read(tmp_path: Path):
    rundir = RunDir(str(tmp_path))
    rundir.storage.write(
        "nodes/l0001-n001-s001.json",
        json.dumps({"node_id": 1, "launch": 1, "stay": 1, "started_at": NOW, "ended_at": NOW + 5,
                    "last_seen_at": NOW + 5, "exit_codes": [0]}).encode(),
    )  # fmt: skip
    assert rundir.nodes()[0].clock_jump_seconds == 0.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.floats(0, 1e5), st.floats(0, 1e4), st.floats(-1e6, 1e6) | st.just(float("nan"))
        ),
        max_size=6,
    ),
    st.floats(-1e6, 1e6),
)
def test_the_ledger_is_the_bill_for_any_history_of_jumps(stays: list[tuple[int, float, float, float]], shift: float):
    nodes = [
        NodePresence(node_id=node, launch=1, incarnation=number + 1, started_at=NOW + began,
                     last_seen_at=NOW + began + lasted, clock_jump_seconds=jump)
        for number, (node, began, lasted, jump) in enumerate(stays)
    ]  # fmt: skip
    tracker = CostTracker("c", presence.usage(nodes, "Standard_NC6s_v3", True, NOW + shift), "dedicated")
    longest = sum(lasted + presence.STALE_SECONDS for _, _, lasted, _ in stays)
    assert tracker.node_hours * HOUR <= longest + 1
    book = ledger(tracker.nodes, [])
    assert book.units == tracker.total_units


def test_a_node_of_the_cloud_cannot_have_been_there_for_longer_than_its_launch():
    past = {"launch": 1, "submitted_at": NOW, "ended_at": NOW + 600}
    record = {"launch": 2, "submitted_at": NOW + 700, "history": [past]}
    assert launch_durations(record, NOW + 1000) == {1: 600.0, 2: 300.0}


@pytest.mark.parametrize(
    ("jump", "idle"), [(0.0, 60.0), *((jump, LONGEST_LOOK_SECONDS if jump > 0 else 0.0) for jump in JUMPS)]
)
def test_an_idle_cluster_idles_no_longer_for_a_clock(jump: float, idle: float):
    pool = NodePool(name="c", sku="s", states={"idle": 2}, node_count=2, work=(), used_at=None)
    before = look(None, pool, 1.0, NOW)
    after = look(before, pool, 1.0, NOW + 60 + jump)
    assert after.idle_seconds == idle


@pytest.mark.parametrize("jump", JUMPS)
def test_who_waits_for_capacity_goes_on_waiting_for_as_long_as_before(tmp_path: Path, jump: float):
    """A deadline is not passed because a clock was set forward."""
    queue = WaitingList(str(tmp_path))
    queue.put(new_ticket("run12345", (), {}, "no nodes", NOW, 24 * HOUR))
    came_since = new_ticket("run67890", (), {}, "no nodes", NOW + 10 + jump, 24 * HOUR)
    queue.put(came_since)
    now = NOW + 20 + jump
    tickets = queue.shift(queue.tickets(), jump, now)
    assert {item.ticket: item for item in tickets} == {item.ticket: item for item in queue.tickets()}
    assert not decide_turns(tickets, frozenset(), frozenset(), now).expired
    [first] = [item for item in tickets if item.run_id == "run12345"]
    assert first.deadline_at - now == pytest.approx(24 * HOUR - 20)
    assert next(item for item in tickets if item.run_id == "run67890") == came_since


def test_a_set_clock_is_told_from_time_that_has_passed():
    reading = {"boot": "a", "origin": NOW}
    assert looks.set_by(reading, {"boot": "a", "origin": NOW + 48 * HOUR}) == 48 * HOUR
    assert looks.set_by(reading, {"boot": "a", "origin": NOW - 48 * HOUR}) == -48 * HOUR
    assert looks.set_by(reading, {"boot": "a", "origin": NOW + 5}) == 0.0
    assert looks.set_by(reading, {"boot": "b", "origin": NOW + 48 * HOUR}) == 0.0
    for damaged in (None, {}, [], {"boot": "a"}, {"boot": "a", "origin": "x"}, {"boot": "a", "origin": float("nan")}):
        assert looks.set_by(damaged, reading) == 0.0
    assert looks.set_by(looks.reading(), looks.reading()) == 0.0


class Machine:
    """Its clock, which can be set, and the seconds that its kernel counts. Both go on when a test says so."""

    def __init__(self) -> None:
        self.now, self.count = NOW, 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now, self.count = self.now + seconds, self.count + seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("time.time", made)
    monkeypatch.setattr("trainer.runtime.clock.elapsed", lambda: made.count)
    monkeypatch.setattr("dtrain_dagster.automation.clock._boot", lambda: "one")
    return made


@pytest.fixture
def here(tmp_path: Path, machine: Machine) -> Iterator[World]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield World(tmp_path, instance, machine)  # type: ignore[arg-type]


def started(here: World) -> dg.DagsterRun:
    """A run that is at work, and has no job yet."""
    asked = frozenset({dg.AssetKey("trained_checkpoint")})
    run = here.instance.add_run(
        dg.DagsterRun(job_name="graph", status=dg.DagsterRunStatus.STARTED, asset_selection=asked)
    )
    here.instance.report_engine_event("begins", run)
    return run


@pytest.mark.parametrize("jump", JUMPS)
def test_a_run_that_lives_is_heard_though_the_clock_was_set(here: World, machine: Machine, jump: float):
    """Silence counts from when that was noticed; so a run that is dead is found to be, half an hour later."""
    run = started(here)

    def heard() -> bool:
        [record] = here.instance.get_run_records(dg.RunsFilter(run_ids=[run.run_id]))
        return is_heard(here.instance, record, machine.now)

    machine.wait(60)
    assert heard()
    machine.now += jump
    assert heard()
    machine.wait(ALIVE_SECONDS - 1)
    assert heard()
    machine.wait(2)
    assert not heard()
    here.instance.report_engine_event("goes on", run)
    assert heard()
    machine.wait(ALIVE_SECONDS + 1)
    assert not heard()


def test_what_was_said_while_the_clock_was_ahead_between_two_looks_is_heard(here: World, machine: Machine):
    assert seconds_since_setting(here.instance) == float("inf")
    machine.now += 48 * HOUR
    run = started(here)
    machine.now -= 48 * HOUR
    [record] = here.instance.get_run_records(dg.RunsFilter(run_ids=[run.run_id]))
    assert is_heard(here.instance, record, machine.now)
    machine.wait(ALIVE_SECONDS + 1)
    assert not is_heard(here.instance, record, machine.now), "it said nothing since"


@pytest.mark.parametrize("jump", JUMPS)
def test_a_training_is_not_ended_and_started_twice_for_a_clock(here: World, machine: Machine, jump: float):
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02")
    run = started(here)
    here.tick("orphans")
    assert "read once it has not changed" in here.tick("new_data").skip_message
    machine.wait(11 * 60)
    machine.now += jump
    assert f"waits for run {run.run_id[:8]}" in here.tick("new_data").skip_message
    [same] = here.instance.get_runs()
    assert same.status is dg.DagsterRunStatus.STARTED


@pytest.mark.parametrize("jump", JUMPS)
def test_a_price_file_is_read_once_it_was_quiet_whatever_the_clock_says(here: World, machine: Machine, jump: float):
    """Half of it would be trained on, and be paid for; or it would not be looked at for days."""
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02")
    here.tick("new_data")
    machine.wait(60)
    machine.now += jump
    assert "another 9 min" in here.tick("new_data").skip_message
    machine.wait(9 * 60 + 1)
    assert here.tick("new_data").run_requests


@pytest.mark.parametrize("jump", JUMPS)
def test_who_has_asked_for_a_run_holds_the_claim_though_the_clock_was_set(
    tmp_path: Path, machine: Machine, jump: float
):
    """Else another cause asks for one as well before the first can be seen."""
    storage = open_storage(str(tmp_path))
    assert claim_retraining(storage, "one", machine.now) == ""
    machine.wait(5)
    machine.now += jump
    assert claim_retraining(storage, "two", machine.now) == "one"
    machine.wait(CLAIM_SECONDS)
    assert claim_retraining(storage, "two", machine.now) == ""

"""Clocks that are set while something runs: what is paid, and what people are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.clusters import presence
from dtrain_dagster.clusters.azure_ml.launch_record import launch_durations
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.tracker import CostTracker
from trainer.documents.presences import NodePresence
from trainer.engine import budget
from trainer.runtime.clock import ORIGIN, SteadyClock

HOUR = 3600.0
NOW = 1_800_000_000.0
JUMPS = [48 * HOUR, -48 * HOUR, 10 * 365 * 24 * HOUR]


SET_CLOCK = """
import os, time
_real = time.time
def _time():
    try:
        with open(os.environ["ABUSE_CLOCK"]) as file:
            return _real() + float(file.read() or 0)
    except (OSError, ValueError, KeyError):
        return _real()
time.time = _time
"""
"""A sitecustomize that shifts `time.time` by the number in a file, at each moment; the kernel's monotonic clock goes
on."""
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.tracker import CostTracker
from trainer.rundir import RunDir
home, jumps = Path(sys.argv[1]), json.loads(sys.argv[2])
manager, looks = LocalClusterManager(home), []
manager.provision_cluster(2, "Standard_NC6s_v3")
rundir = RunDir(str(home / "storage" / "jobs" / "one"))
began = time.monotonic()
for jump in jumps:
    manager.submit_job(JobSpec(job_id="one", command=("sh", "-c", "sleep 4; exit 3"), node_count=2,
                               processes_per_node=1, run_dir=rundir.uri, env={}))
    time.sleep(0.5)
    Path(os.environ["ABUSE_CLOCK"]).write_text(str(jump))
    looks.append(sum(item.hours for item in manager.node_usage("one")) * 3600)
    time.sleep(2.6)  # a sign of life comes every two seconds
    assert not manager.job_status("one").state.is_final
    health = manager.monitor_health()
    while not manager.job_status("one").state.is_final:
        time.sleep(0.1)
tracker = CostTracker("local", manager.node_usage("one"), "dedicated")
book = ledger(tracker.nodes, rundir.events())
print(json.dumps({
    "seconds": tracker.node_hours * 3600, "looks": looks, "notes": tracker.notes, "healthy": health.healthy,
    "took": time.monotonic() - began, "sum_is_exact": book.units == tracker.total_units,
}))
"""
"""Program that runs a job of two nodes once for each jump, shifts the clock meanwhile, and prints the bill."""


@pytest.mark.slow
def test_a_clock_that_is_set_forward_and_back_bills_nothing_and_is_told(tmp_path: Path):
    """Neither node is billed for hours that its clock alone has seen, over two launches."""
    (tmp_path / "sitecustomize.py").write_text(SET_CLOCK)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{tmp_path}/home", json.dumps([48 * HOUR, -48 * HOUR])],
        env={**os.environ, "PYTHONPATH": path, "ABUSE_CLOCK": f"{tmp_path}/clock"}, cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    most = 2 * (found["took"] + presence.STALE_SECONDS)
    assert all(seconds <= most for seconds in (*found["looks"], found["seconds"]))
    assert found["seconds"] >= 2 * 2 * 3.0, "nodes slept for four seconds in each launch"
    assert found["sum_is_exact"]
    assert found["healthy"]
    assert any("the clock of node" in note and "not billed" in note for note in found["notes"]), found["notes"]


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

"""Set the machine's clock forward or back while a job runs: the bill must not follow the clock."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.abuse.tally import Tally

ROOT = Path(__file__).parents[2]
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
home, jumps, launches = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
manager, looks = LocalClusterManager(home), []
manager.provision_cluster(2, "Standard_NC6s_v3")
rundir = RunDir(str(home / "storage" / "jobs" / "one"))
began = time.monotonic()
for launch in range(launches):
    manager.submit_job(JobSpec(job_id="one", command=("sh", "-c", "sleep 4; exit 3"), node_count=2,
                               processes_per_node=1, run_dir=rundir.uri, env={}))
    for jump in jumps:
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
    "seconds": tracker.node_hours * 3600, "looks": looks, "notes": tracker.notes, "usd": tracker.total_usd,
    "healthy": health.healthy, "took": time.monotonic() - began, "sum_is_exact": book.units == tracker.total_units,
}))
"""
"""Program that runs a job of two nodes, shifts the clock meanwhile, and prints the bill."""
SLACK_SECONDS = 15.0
"""Seconds of a node that may be billed too much: a late sign of life (`dtrain_dagster.clusters.presence.STALE_SECONDS`)
on a busy machine."""


def measured(jumps: list[float], launches: int = 1) -> dict[str, Any]:
    """Return the bill of a job of two nodes during which the clock was shifted by ``jumps``; raise RuntimeError if it
    could not be run."""
    with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as scratch:
        (Path(scratch) / "sitecustomize.py").write_text(SET_CLOCK)
        path = os.pathsep.join([scratch, str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"{scratch}/home", json.dumps(jumps), str(launches)],
            env={**os.environ, "PYTHONPATH": path, "ABUSE_CLOCK": f"{scratch}/clock"},
            cwd=scratch,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def complaints(found: dict[str, Any], jumps: list[float], launches: int = 1) -> list[str]:
    """Return the faults of a bill, each as a phrase."""
    most = 2 * (found["took"] + SLACK_SECONDS)
    said = [f"{seconds:,.0f} s were billed" for seconds in (*found["looks"], found["seconds"]) if seconds > most]
    if found["seconds"] < 2 * launches * 3.0:  # nodes slept for four seconds in each launch
        said.append(f"only {found['seconds']:.1f} s were billed")
    if not found["sum_is_exact"]:
        said.append("the ledger is not the bill")
    if not found["healthy"]:
        said.append("nodes that are there are called unhealthy")
    if jumps[-1] != 0 and not any("the clock of node" in note for note in found["notes"]):
        said.append("nobody is told")
    return said


def attack(random: random.Random, rounds: int) -> Tally:
    """Run ``rounds`` jobs, in each of which the clock is set once or twice, by up to a hundred hours, forward or
    back."""
    tally = Tally()
    for number in range(rounds):
        signs = [1, -1] if number % 2 == 0 else [-1, 1]
        jumps = [sign * random.uniform(0.5, 100.0) * 3600 for sign in signs[: random.randint(1, 2)]]
        launches = random.choice((1, 1, 2))
        tally.tried += 1
        if said := complaints(measured(jumps, launches), jumps, launches):
            tally.accepted += 1
            hours = ", ".join(f"{jump / 3600:+.1f} h" for jump in jumps)
            tally.findings.append(f"clock set by {hours}, {launches} launch(es): {'; '.join(said)}")
    return tally

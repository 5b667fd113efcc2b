"""Measure what the exclusion of bad hosts saves: nodes that are lost per node-hour, with it and without it.

Run `python -m benchmarks.flaky_hosts`. Trainings of three nodes follow each other on real, small clusters on this
machine (`harness/engines`), twice: on SLURM and Ray with machines to spare, on Kubernetes on two machines that share
the nodes. One host is flaky: the agent of each node there is killed `ALIVE_SECONDS` after it began. Another one is
slow: the processes of the nodes there are stopped half of the time. Once hosts are excluded as they always are; once a
person lifts each exclusion at once, as `dtrain status --lift` does.

    <engine>_with_per_node_hour      nodes lost per hour of one node, where hosts are excluded
    <engine>_without_per_node_hour   the same where each exclusion is lifted
    <engine>_with_losses, ..._without_losses, ..._with_node_hours, ..._without_node_hours   what they are made of
    <engine>_with_steps, ..._without_steps   optimizer steps that were done
    <engine>_slow_excluded           whether the slow host was ever excluded; it must not be
    failed                           engines without figures, and the reasons
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host import in_parts, note, options_of, stop_on_signals, tell
from benchmarks.launchers import NODES, Cluster
from benchmarks.recovery import TRAINING, engine
from harness.engines.machines import Machines
from harness.waiting import until
from harness.worlds import build
from trainer.node.processes import signal_all

ENGINES = ("slurm", "kubernetes", "ray")
ALIVE_SECONDS = 12.0
"""Seconds that a node lives on the flaky host."""
SLICE_SECONDS = 0.1
"""Seconds for which a node on the slow host is stopped, and then goes on."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at which nodes are there."""


@contextlib.contextmanager
def slowed(cluster: Cluster, machines: Machines, host: str) -> Iterator[None]:
    """Let the nodes on a host run only half of the time meanwhile."""
    ended = threading.Event()

    def slow() -> None:
        pids, looked_at = set[int](), -math.inf
        while not ended.is_set():
            if time.monotonic() - looked_at > LOOK_SECONDS:
                pids = {pid for job in at_work(cluster, machines, host) for pid in cluster.pids(job.node_id)}
                looked_at = time.monotonic()
            signal_all(pids, signal.SIGSTOP)
            time.sleep(SLICE_SECONDS)
            signal_all(pids, signal.SIGCONT)
            ended.wait(SLICE_SECONDS)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def at_work(cluster: Cluster, machines: Machines, host: str) -> list[Any]:
    """Return the jobs of the engine that run on a host for this training."""
    return [job for job in machines.jobs(cluster.launch()) if job.host == host and job.state == "running"]


@dataclass
class Found:
    """What some trainings have come to."""

    lost: int = 0
    """Nodes that were lost."""
    node_seconds: float = 0.0
    steps: int = 0
    slow_excluded: bool = False


def train(cluster: Cluster, machines: Machines, seconds: float, planted: list[str], lifts: bool) -> Found:
    """Train for so many seconds beside a flaky and a slow host, the two in ``planted``, which the first training
    chooses. ``lifts``: whether a person lifts each exclusion."""
    cluster.submit()
    record, lost, found = cluster.manager.host_record(), set[tuple[int, int]](), Found()
    assert record is not None
    if not planted:
        until(lambda: len([each for each in machines.jobs(cluster.launch()) if each.host]) == NODES, "places", 120.0)
        planted += sorted({job.host for job in machines.jobs(cluster.launch())})[:2]
    flaky, slow = planted
    deadline = math.inf
    with slowed(cluster, machines, slow):
        while time.monotonic() < deadline and cluster.running:
            if deadline == math.inf and cluster.step() > 20:
                deadline = time.monotonic() + seconds
            for job in at_work(cluster, machines, flaky):
                agents = cluster.processes(f"--node {job.node_id} --incarnation {job.incarnation}")
                if agents and time.time() - min(each.create_time() for each in agents) > ALIVE_SECONDS:
                    signal_all({each.pid for each in agents}, signal.SIGKILL)
                    lost.add((job.node_id, job.incarnation))
            for excluded in record.excluded(time.time()):
                found.slow_excluded = found.slow_excluded or excluded.host == slow
                if lifts:
                    record.lift(excluded.host, time.time())
            time.sleep(0.5)
    if not cluster.running:
        raise RuntimeError(f"the job ended: {cluster.status().message}")
    found.lost, found.steps = len(lost), cluster.step()
    cluster.close()
    found.node_seconds = sum(node.ended_at - node.started_at for node in cluster.manager.node_usage("one"))
    return found


def measure(kind: str, folder: Path, config: dict[str, Any], trainings: int, seconds: float) -> dict[str, Any]:
    """Return the figures of an engine."""
    figures: dict[str, Any] = {f"{kind}_slow_excluded": False}
    with engine(kind, NODES + 1) as machines:
        assert machines is not None
        planted: list[str] = []
        for half in ("with", "without"):
            found, before = list[Found](), None
            for number in range(trainings):
                home = folder / f"{kind}-{half}-{number}"
                if before is not None:  # the record of hosts that the trainings of one home share
                    shutil.copytree(before / "clusters", home / "clusters")
                cluster, before = Cluster(home, config, machines=machines), home
                try:
                    found.append(train(cluster, machines, seconds, planted, half == "without"))
                finally:
                    cluster.close()
                note(f"  {half}, training {number + 1}: {found[-1]}")
            lost, hours = sum(each.lost for each in found), sum(each.node_seconds for each in found) / 3600
            figures |= {
                f"{kind}_{half}_per_node_hour": round(lost / hours, 1),
                f"{kind}_{half}_losses": lost,
                f"{kind}_{half}_node_hours": round(hours, 4),
                f"{kind}_{half}_steps": sum(each.steps for each in found),
            }
            figures[f"{kind}_slow_excluded"] |= any(each.slow_excluded for each in found)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if an engine failed, else 0."""
    parser = options_of("flaky_hosts", __doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="engines (all)")
    parser.add_argument("--trainings", type=int, default=6, help="one after the other, on each engine (6)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each training, from its 20th step on (15)")
    options = parser.parse_args(arguments)
    stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="flaky-hosts-") as made:
        folder = Path(made)
        os.environ["DTRAIN_CACHE"] = str(folder / "cache")
        config = {"dataset": {"uri": str(build(folder))}, "tracking": {"tensorboard": False}, "training": TRAINING}

        def part(kind: str) -> dict[str, Any]:
            note(kind)
            return measure(kind, folder, config, options.trainings, options.seconds)

        figures, failed = in_parts({kind: (lambda kind=kind: part(kind)) for kind in options.engine})
    result = {
        "trainings": options.trainings,
        "seconds": options.seconds,
        **figures,
        **({"failed": failed} if failed else {}),
    }
    tell("flaky_hosts", result, options.save)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

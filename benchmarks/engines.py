"""Kill nodes of a training on each engine, and measure what that costs: the same job and kills, other machines below.

Run `python -m benchmarks.engines --engine local slurm kubernetes ray --seed 1 --kills 5`. SLURM, Kubernetes and Ray are
real, small clusters on this machine (`harness/engines`), and three nodes train on each. A kill is SIGKILL to the agent
of a node and to its ranks, at once; on the local cluster to the node's ranks. Then the training goes on to its last
step, and its weights are compared with those of an undisturbed one.

For each engine, with its name before:

    _regroup_p50_seconds  from a kill to the record of the survivors' next generation
    _back_seconds         median, from a kill to the first step of all nodes again
    _steps_redone         completed steps that were done again, over all kills
    _weights_equal        whether the weights are those of an undisturbed training, but for rounding (`TOLERANCE`)
    _left_behind          processes and unfinished jobs 10 s after the end
    _accounted_percent    of the paid node-seconds, the share for which the job's ledger has a cause
    _lived_percent        the paid node-seconds against those in which the nodes' processes were seen to live; on the
                          local cluster, whose nodes have no agent of their own, null
    _kills                kills that were made
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.host import in_parts, is_busy, note, stop_on_signals, tell
from dtrain_dagster.clusters.managers import EngineClusterManager, LocalClusterManager
from dtrain_dagster.clusters.supervision.submit import LaunchSettings
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from harness.engines.engine_training import Training, write_job
from harness.engines.machines import Machines, missing, open_machines
from trainer.elastic.generation_record import generations
from trainer.node.environment import node_mark
from trainer.node.processes import marked

ENGINES = ("local", "slurm", "kubernetes", "ray")
NODES = 3
CALM_SECONDS = 2.0
"""Seconds between two kills, in which all nodes work undisturbed."""
LIMIT_SECONDS = 120.0
LOOK_SECONDS = 0.02
TOLERANCE = 5e-3
"""Sums over another number of ranks are rounded differently, and steps make that larger."""


class LivedTime(threading.Thread):
    """Watches the processes of a job's nodes on this machine, and adds up for how long each node had any."""

    def __init__(self, training: Training) -> None:
        super().__init__(daemon=True)
        self.training = training
        self.seen: dict[tuple[str, str], tuple[float, float]] = {}
        """(node, incarnation) → the start of its first process, and when it was seen last."""
        self._over = threading.Event()

    def run(self) -> None:
        """Look again and again, until it is closed."""
        while not self._over.wait(0.1):
            for process in self.training.processes("trainer.node"):
                with contextlib.suppress(psutil.Error, ValueError):
                    words = process.cmdline()
                    key = words[words.index("--node") + 1], words[words.index("--incarnation") + 1]
                    began = self.seen.get(key, (process.create_time(), 0.0))[0]
                    self.seen[key] = began, time.time()

    def close(self) -> float:
        """End the watch, and return the seconds of all nodes."""
        self._over.set()
        self.join()
        return sum(last - first for first, last in self.seen.values())


def kill_node(training: Training, node: int) -> float:
    """Kill a node's processes at once, and return when."""
    newest = max(item.incarnation for item in training.rundir.nodes() if item.node_id == node)
    words = f"--node {node} --incarnation {newest}"
    agents = [process for process in training.processes("trainer.node") if words in " ".join(process.cmdline())]
    ranks = [psutil.Process(pid) for pid in marked(node_mark(training.launch(), node, newest))]
    killed_at = time.time()
    for process in {*agents, *ranks}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return killed_at


def wait_for(training: Training, holds: Any, what: str) -> Any:
    """Return what holds once it does. Raise RuntimeError if it takes too long, or if the job ends before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := holds()):
        if time.monotonic() > deadline or training.status().state.is_final:
            raise RuntimeError(f"no {what}\n{training.said()[-3000:]}")
        time.sleep(LOOK_SECONDS)
    return found


def all_train(training: Training, nodes: int) -> float | None:
    """Return the time of the first step of the newest generation if all nodes are in it and have made one."""
    found = generations(training.rundir.storage)
    if not found or len(found[-1].members) < nodes:
        return None
    steps = [event["time"] for event in training.rundir.events("step") if event["generation"] == found[-1].number]
    return min(steps, default=None)


def disturb(training: Training, nodes: int, kills: int, draw: random.Random) -> dict[str, list[float]]:
    """Kill nodes one after the other, each once all train again. Return the seconds of each kill."""
    figures: dict[str, list[float]] = {"regroup": [], "back": []}
    for _ in range(kills):
        wait_for(training, lambda: all_train(training, nodes), "step of all nodes")
        time.sleep(CALM_SECONDS)
        before = len(generations(training.rundir.storage))
        killed_at = kill_node(training, draw.randrange(nodes))
        wait_for(training, lambda: len(generations(training.rundir.storage)) > before, "generation of survivors")  # noqa: B023
        formed_at = generations(training.rundir.storage)[before].formed_at
        back_at = wait_for(training, lambda: all_train(training, nodes), "step of all nodes again")
        figures["regroup"].append(formed_at - killed_at)
        figures["back"].append(back_at - killed_at)
        note(f"    survivors after {formed_at - killed_at:.2f} s, all back after {back_at - killed_at:.2f} s")
    return figures


def measure(machines: Machines | None, steps: int, kills: int, seed: int, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one engine (None: the local cluster)."""
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        folder = Path(name)
        manager: Any = LocalClusterManager(folder, max_replacements=1000)
        if machines is not None:
            settings = LaunchSettings(engine=machines.kind, cluster_name="engine", max_replacements=1000)
            manager = EngineClusterManager(folder, settings, machines.options(folder))
        training = Training(manager, write_job(folder, steps, NODES), NODES)
        lived = LivedTime(training)
        lived.start()
        training.submit()
        try:
            figures = disturb(training, NODES, kills, random.Random(seed))
            made = training.outcome()
        finally:
            training.close()
        seconds = lived.close()
        told = [event["step"] for event in training.rundir.events("step")]
        time.sleep(1.0)
        deadline = time.monotonic() + 10
        while (left := left_behind(training, machines)) and time.monotonic() < deadline:
            time.sleep(0.2)
        usage = manager.node_usage("one")
        paid = sum(node.ended_at - node.started_at for node in usage)
        bill = ledger(CostTracker("engine", usage, "dedicated").nodes, training.rundir.events(strict=True))
        unexplained = bill.causes().get(CostCause.UNEXPLAINED)
        return {
            "regroup_p50_seconds": round(statistics.median(figures["regroup"]), 3) if kills else None,
            "back_seconds": round(statistics.median(figures["back"]), 2) if kills else None,
            "steps_redone": len(told) - len(set(told)),
            "weights_equal": made[:3] == expected["outcome"][:3]
            and all(
                torch.allclose(one, expected["outcome"].weights[key], rtol=TOLERANCE, atol=TOLERANCE)
                for key, one in made.weights.items()
            ),
            "left_behind": left,
            "accounted_percent": round(100 - 100 * unexplained.seconds / paid, 3) if unexplained else 100.0,
            "lived_percent": round(100 * paid / seconds, 1) if machines is not None else None,
            "kills": len(figures["regroup"]),
        }


def left_behind(training: Training, machines: Machines | None) -> int:
    """Return the number of processes and of unfinished jobs that are left of a training."""
    jobs = [job for job in machines.jobs(training.launch()) if job.state != "ended"] if machines else []
    return len(training.processes()) + len(jobs)


@contextmanager
def engine(kind: str) -> Iterator[Machines | None]:
    """Start an engine; None for the local cluster. Raise RuntimeError where it cannot run."""
    if kind == "local":
        yield None
        return
    if why := missing(kind):
        raise RuntimeError(why)
    with open_machines(kind, NODES) as machines:
        yield machines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES, help="engines to measure")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of nodes")
    parser.add_argument("--kills", type=int, default=5, help="nodes that are killed on each engine")
    parser.add_argument("--steps", type=int, default=6000, help="steps of the training")
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    options = parser.parse_args(arguments)
    stop_on_signals()
    load = os.getloadavg()[0]
    expected: dict[str, Any] = {}

    def undisturbed() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="engines-") as folder:
            training = Training(LocalClusterManager(Path(folder)), write_job(Path(folder), options.steps, NODES), NODES)
            training.submit()
            expected["outcome"] = training.outcome()
        return {}

    def part(kind: str) -> dict[str, Any]:
        note(f"  {kind}")
        with engine(kind) as machines:
            found = measure(machines, options.steps, options.kills, options.seed, expected)
        note(f"    {found}")
        return {f"{kind}_{name}": value for name, value in found.items()}

    parts = {"undisturbed": undisturbed} | {kind: (lambda kind=kind: part(kind)) for kind in options.engine}
    figures, failed = in_parts(parts)
    about = {"nodes": NODES, "seed": options.seed, "steps": options.steps, "load_before": round(load, 2)}
    tell(
        "engines",
        about | figures | ({"busy": True} if is_busy(load) else {}) | ({"failed": failed} if failed else {}),
        options.save,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

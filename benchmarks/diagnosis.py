"""Plant causes of slowness in real trainings of three ranks, and count how often the report names the planted cause.

Run `python -m benchmarks.diagnosis`. A plant is made from its seed: a rank that computes, reads or saves slowly, a link
that is throttled (hosts are network namespaces), batches that are too small, a rank that never enters a collective, or
no fault at all. Compute is emulated: the stock model with a pause for each micro-batch, as on a processor of another
kind, so that three ranks fit on few cores. The delays, collectives, links and records are real.

    plants, right_percent   planted causes; percent named right (the cause, and the rank where it is one rank's)
    healthy, false_alarms   trainings without a plant; those in which the report blamed something
    mild_right_percent      percent named right of the plants that cost less than 15 % of a step
    confusion               planted cause → named cause → number of plants
    wrong                   seed, planted cause, named cause, and the evidence given for it
    skipped                 plants that need a network of hosts, where the kernel does not allow one
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "trainer")]

from hosts import NODES, Hosts, Preload  # noqa: E402
from network import Network, NoNetworkError  # noqa: E402
from worlds import build  # noqa: E402

from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose  # noqa: E402

RESULTS = Path(__file__).parent / "results"
STEPS, WARM_UP, WINDOW = 72, 8, 6
PAUSE_SECONDS, MICRO_BATCHES = 0.02, 2
STEP_SECONDS = 0.048
"""Seconds of a healthy step, about: the share of a plant refers to it."""
LIMIT_SECONDS = 60.0
"""Longest time of one training."""
HANG_SECONDS = 2.0
ELASTIC = {"health_check_seconds": 0.5, "peer_timeout_seconds": 30.0, "collective_timeout_seconds": 12.0}
TRAINING = {
    "world_size": NODES,
    "batch_size_per_gpu": 32,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "max_steps": STEPS,
    "epochs": 50,
    "eval_frequency": STEPS,
    "checkpoint_frequency": STEPS,
    "warmup_steps": 3,
    "log_frequency": WINDOW,
    "threads_per_rank": 1,
    "monitor_interval_seconds": 1.0,
    "hang_seconds": HANG_SECONDS,
    **ELASTIC,
}
CAUSES = (
    SlowdownCause.SLOW_COMPUTE,
    SlowdownCause.SLOW_INPUT,
    SlowdownCause.SLOW_LINK,
    SlowdownCause.SMALL_BATCHES,
    SlowdownCause.CHECKPOINT,
    SlowdownCause.HANG,
)


@dataclass(frozen=True, slots=True)
class Plant:
    """The fault of one training."""

    seed: int
    cause: SlowdownCause
    share: float = 0.0
    """Cost of the plant in each step, about, as a share of a healthy step."""
    node: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    pause_seconds: float = PAUSE_SECONDS
    bytes_per_second: float | None = None
    """Rate of the node's links in both directions; None: not throttled."""

    def __str__(self) -> str:
        where = "" if self.node is None else f" on node {self.node}"
        return f"{self.cause}{where}" + (f", {self.share:.0%} of a step" if self.share else "")


def make(seed: int, gradient_bytes: int) -> Plant:
    """Return the plant of a seed: causes take turns, strength and place are random."""
    chance = random.Random(f"diagnosis {seed}")
    cause, node = CAUSES[seed % len(CAUSES)], chance.randrange(NODES)
    share = round(chance.choice((0.05, 0.07, 0.1, 0.2, 0.5, 1.0)), 3)
    seconds = share * STEP_SECONDS
    if cause is SlowdownCause.SLOW_COMPUTE:
        at = chance.choice(("forward", "backward"))
        return Plant(seed, cause, share, node, faults=[_sleep(at, node, seconds / MICRO_BATCHES)])
    if cause is SlowdownCause.SLOW_INPUT:
        return Plant(seed, cause, share, node, faults=[_sleep("input", node, seconds)])
    if cause is SlowdownCause.SLOW_LINK:
        rate = 2 * (NODES - 1) / NODES * gradient_bytes / seconds
        return Plant(seed, cause, share, node, bytes_per_second=rate)
    if cause is SlowdownCause.SMALL_BATCHES:
        size = chance.choice((1, 2, 4))
        few = {"batch_size_per_gpu": size, "gradient_accumulation_steps": 1, "max_steps": 10 * STEPS}
        often = {"eval_frequency": 10 * STEPS, "checkpoint_frequency": 10 * STEPS, "log_frequency": 10 * WINDOW}
        return Plant(seed, cause, training=few | often, pause_seconds=0.0)
    if cause is SlowdownCause.CHECKPOINT:
        every = chance.choice((2, 3, 6))
        stall = [_sleep("save", other, every * seconds) for other in range(NODES)]
        return Plant(seed, cause, share, training={"checkpoint_frequency": every}, faults=stall)
    at_step = chance.randrange(20, 40)
    hang = {"kind": "sleep", "at": "forward", "step": at_step, "node": node, "seconds": 3600}
    return Plant(seed, cause, node=node, faults=[hang])


def _sleep(at: str, node: int, seconds: float) -> dict[str, Any]:
    return {"kind": "sleep", "at": at, "node": node, "seconds": seconds, "every": True}


class Clinic:
    """Runs one training after the other; dataset, processes and network are made when needed, and kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, None
        self.dataset, self.preload = build(folder), Preload()

    def close(self) -> None:
        """End the processes and remove the network."""
        self.preload.close()
        if self.network is not None:
            self.network.close()

    def events(self, plant: Plant, name: str) -> list[dict[str, Any]]:
        """Train with this plant and return the recorded events; raise `NoNetworkError` if it needs hosts and there are
        none."""
        network = self._network() if plant.bytes_per_second else None
        config = {
            "dataset": {"uri": str(self.dataset)},
            "tracking": {"tensorboard": False},
            "model": {"factory": "paced:tcn", "args": {"dropout": 0.0, "pause_seconds": plant.pause_seconds}},
            "training": {**TRAINING, **plant.training},
        }
        environment = {"DTRAIN_CACHE": str(self.folder / "cache"), "DTRAIN_STOP_GRACE_SECONDS": "1"}
        hosts = Hosts(self.preload, self.folder / name, config, environment, network, max_replacements=0)
        if network is not None and plant.node is not None and plant.bytes_per_second:
            for other in range(NODES):
                if other != plant.node:
                    network.throttle(plant.node, other, plant.bytes_per_second)
        try:
            hosts.start(plant.faults)
            began = time.monotonic()
            while hosts.running and time.monotonic() - began < LIMIT_SECONDS:
                hosts.look()
                if (
                    plant.cause is SlowdownCause.HANG
                    and len({item["rank"] for item in hosts.rundir.events("hang")}) == NODES
                ):
                    break  # all ranks have reported the hang: no need to wait for the timeout
                time.sleep(0.05)
        finally:
            hosts.close()
            if network is not None:
                network.restore_all()
        return list(hosts.rundir.events())

    def _network(self) -> Network:
        if self.network is None:
            self.network = Network(NODES)
        return self.network


def is_right(plant: Plant, found: Diagnosis) -> bool:
    """Return whether the diagnosis names the planted cause as the one that costs most, and its place."""
    if found.cause is not plant.cause:
        return False
    return plant.node is None or found.node_id == plant.node


def gradient_bytes(events: Sequence[dict[str, Any]]) -> int:
    """Return the bytes of gradients that one step sums, as a healthy run has recorded them."""
    timing = next(item for item in events if item["kind"] == "timing")
    return sum(entry["bytes"] for entry in timing["collectives"] if entry["name"].startswith("bucket"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 0 if 95 % are right and nothing healthy was
    blamed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--plants", type=int, default=48, help="number of plants; causes take turns")
    parser.add_argument("--healthy", type=int, default=20, help="trainings without a plant")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first plant; each further one has the next")
    parser.add_argument("--only", type=int, metavar="SEED", help="only the plant of this seed")
    parser.add_argument("--keep", metavar="FOLDER", help="folder in which the run directories are kept")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the nodes end with this process
    seeds = [options.only] if options.only is not None else range(options.seed, options.seed + options.plants)
    healthy = 0 if options.only is not None else options.healthy
    confusion: dict[str, Counter[str]] = {}
    wrong: list[dict[str, Any]] = []
    mild: list[bool] = []
    right = skipped = alarms = 0

    def judge(plant: Plant, name: str) -> bool:
        events = clinic.events(plant, name)
        found = diagnose(events)
        good = is_right(plant, found)
        confusion.setdefault(str(plant.cause), Counter())[str(found.cause)] += 1
        if not good:
            named = f"{found.where} ({found.share:.1%})"
            wrong.append({"name": name, "planted": str(plant), "named": named, "evidence": found.evidence})
        if not options.json:
            print(f"{name}: {plant} -> {found.where}, {found.share:.1%}: {'ok' if good else 'WRONG'}", file=sys.stderr)
        return good

    began = time.time()
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        clinic = Clinic(folder)
        try:
            size = gradient_bytes(clinic.events(Plant(-1, SlowdownCause.HEALTHY), "warm-up"))
            for number in range(healthy):
                alarms += not judge(Plant(number, SlowdownCause.HEALTHY), f"healthy-{number}")
            for seed in seeds:
                plant = make(seed, size)
                try:
                    good = judge(plant, f"plant-{seed}")
                except NoNetworkError as error:
                    print(f"plant {seed} is skipped: {error}", file=sys.stderr)
                    skipped += 1
                    continue
                right += good
                if 0 < plant.share < 0.15:
                    mild.append(good)
        finally:
            clinic.close()
    played = len(seeds) - skipped
    result = {
        "benchmark": "diagnosis",
        "plants": played,
        "right_percent": round(100 * right / played, 1) if played else None,
        "mild_plants": len(mild),
        "mild_right_percent": round(100 * sum(mild) / len(mild), 1) if mild else None,
        "healthy": healthy,
        "false_alarms": alarms,
        "confusion": {planted: dict(named) for planted, named in confusion.items()},
        "wrong": wrong,
        "skipped": skipped,
        "first_seed": seeds[0],
        "seconds": round(time.time() - began, 1),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, no GPU",
    }
    line = json.dumps(result)
    print(line)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "diagnosis.json").write_text(line + "\n")
    return 0 if played and right >= 0.95 * played and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())

"""Trainings with a planted cause of slowness, each made from a seed, and the `Clinic` that runs them.

All thirteen causes that the diagnosis knows, and no cause at all. Ranks really compute: products of matrices, of which
a slow rank has more. What waits for a disk or a network sleeps or is throttled, as it would there.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtrain_dagster.monitoring.diagnosis import SlowdownCause
from harness.faults.hosts import NODES, Hosts, Preload
from harness.faults.network import Network
from harness.worlds import build
from trainer.runtime.cores import available_cores

STEPS, WINDOW, MICRO_BATCHES = 112, 8, 2
COMPUTE_SECONDS = 0.032
"""Seconds that a healthy rank computes in a step beside the stock model, on a core of its own."""
STEP_SECONDS = 0.038
"""Seconds of a healthy step, about: the share of a plant refers to it."""
SHARES = (0.05, 0.07, 0.1, 0.2, 0.5, 1.0)
MILD = 0.15
"""The share of a step below which a plant is mild."""
LARGE_GRADIENTS = 50_000
"""Parameters more, where the network is the plant: then bytes decide, not latency."""
HEALTHY_RANKS = min(2, available_cores())
CAUSES = (
    SlowdownCause.SLOW_COMPUTE,
    SlowdownCause.SLOW_INPUT,
    SlowdownCause.SLOW_LINK,
    SlowdownCause.SMALL_BATCHES,
    SlowdownCause.CHECKPOINT,
    SlowdownCause.HANG,
    SlowdownCause.CROWDED,
    SlowdownCause.COMMUNICATION,
    SlowdownCause.MEMORY,
    SlowdownCause.INPUT,
    SlowdownCause.UNEVEN,
    SlowdownCause.SLOW_RANK,
)
LIMIT_SECONDS = 60.0
"""Longest time of one training."""
HANG_SECONDS = 2.0
ELASTIC = {"health_check_seconds": 0.5, "peer_timeout_seconds": 30.0, "collective_timeout_seconds": 12.0}
TRAINING = {
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """The fault of one training."""

    seed: int
    cause: SlowdownCause
    ranks: int = 2
    """Ranks that train, each as a node of its own."""
    share: float = 0.0
    """Cost of the plant in each step, about, as a share of a healthy step."""
    node: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    bytes_per_second: float | None = None
    """Rate of the throttled links, in both directions: those of ``node``, or all where it is None. None: no link is."""

    def __str__(self) -> str:
        where = "" if self.node is None else f" on node {self.node}"
        return f"{self.cause}{where}" + (f", {self.share:.0%} of a step" if self.share else "")

    @property
    def is_mild(self) -> bool:
        """Whether it costs less than `MILD` of a step."""
        return 0 < self.share < MILD

    @property
    def is_crowded(self) -> bool:
        """Whether its ranks are more than the cores: then cores are shared besides what is planted."""
        return self.ranks > available_cores()


def make_plant(seed: int, cause: SlowdownCause, round_seconds: float, gradient_bytes: int) -> Plant:
    """Return a plant of a cause: strength and place are drawn. ``round_seconds``: see `seconds_of_round`;
    ``gradient_bytes``: what a step sums with large gradients."""
    chance = random.Random(f"diagnosis {seed} {cause}")
    ranks = 3 if cause in (SlowdownCause.SLOW_LINK, SlowdownCause.UNEVEN) else HEALTHY_RANKS
    node, share = chance.randrange(ranks), chance.choice(SHARES)
    seconds = share * STEP_SECONDS
    rounds = round(COMPUTE_SECONDS / MICRO_BATCHES / round_seconds)
    model = {"rounds": rounds}
    plain = Plant(seed=seed, cause=cause, ranks=ranks, share=share, model=model)
    if cause is SlowdownCause.HEALTHY:
        return Plant(seed=seed, cause=cause, ranks=ranks, model={"rounds": round(chance.uniform(0.6, 1.6) * rounds)})
    if cause is SlowdownCause.SLOW_COMPUTE:
        more = max(1, round(seconds / MICRO_BATCHES / round_seconds))
        return replace(plain, node=node, model={**model, "slow_node": node, "more": more})
    if cause in (SlowdownCause.SLOW_INPUT, SlowdownCause.SLOW_RANK):
        at = "input" if cause is SlowdownCause.SLOW_INPUT else "report"
        return replace(plain, node=node, faults=[_pause(at, node, seconds)])
    if cause is SlowdownCause.INPUT:
        strong = max(share, 0.1)
        pauses = [_pause("input", other, strong * STEP_SECONDS) for other in range(ranks)]
        return replace(plain, share=strong, faults=pauses)
    if cause in (SlowdownCause.SLOW_LINK, SlowdownCause.COMMUNICATION):
        one = cause is SlowdownCause.SLOW_LINK
        strong = max(share, 0.1) if one else chance.choice((0.6, 1.0, 2.0))
        rate = 2 * (ranks - 1) / ranks * gradient_bytes / (strong * STEP_SECONDS)
        model = {"rounds": rounds // 2 if one else rounds, "ballast": LARGE_GRADIENTS}
        return replace(plain, share=strong, node=node if one else None, bytes_per_second=rate, model=model)
    if cause is SlowdownCause.SMALL_BATCHES:
        few = {"batch_size_per_gpu": chance.choice((1, 2, 4)), "gradient_accumulation_steps": 1}
        often = dict.fromkeys(("max_steps", "eval_frequency", "checkpoint_frequency"), 10 * STEPS)
        return replace(plain, share=0.0, training={**few, **often, "log_frequency": 10 * WINDOW}, model={})
    if cause is SlowdownCause.CHECKPOINT:
        every = chance.choice((2, 3, 6))
        stall = [_pause("save", other, every * seconds) for other in range(ranks)]
        return replace(plain, training={"checkpoint_frequency": every}, faults=stall)
    if cause is SlowdownCause.UNEVEN:  # one of three nodes is lost: two have three micro-batches
        lost = {"kind": "kill", "at": "forward", "step": 3, "node": 2}
        return replace(plain, share=0.0, training={"gradient_accumulation_steps": 1}, faults=[lost])
    if cause is SlowdownCause.MEMORY:
        return replace(plain, share=0.0, model={**model, "fits": chance.choice((8, 16, 24))})
    if cause is SlowdownCause.CROWDED:
        return replace(plain, share=0.0, ranks=available_cores() + 1, node=None)
    hang = {"kind": "sleep", "at": "forward", "step": chance.randrange(20, 60), "node": node, "seconds": 3600}
    return replace(plain, share=0.0, node=node, faults=[hang])


def make_laptop_run(seed: int) -> Plant:
    """Return the training that `make run` begins with on a machine with one core less than nodes: the stock model, its
    batch and its reports."""
    batch = {"batch_size_per_gpu": 128, "gradient_accumulation_steps": 1, "log_frequency": 10}
    often = dict.fromkeys(("max_steps", "eval_frequency", "checkpoint_frequency"), 3 * STEPS)
    return Plant(seed=seed, cause=SlowdownCause.CROWDED, ranks=available_cores() + 1, training={**batch, **often})


def _pause(at: str, node: int, seconds: float) -> dict[str, Any]:
    return {"kind": "sleep", "at": at, "node": node, "seconds": seconds, "every": True}


def seconds_of_round(rounds: int = 400) -> float:
    """Return the processor seconds of one product of matrices of `paced.Busy` on this machine."""
    import torch

    from harness.own_models.paced import multiply

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    multiply(rounds)
    began = time.thread_time()
    multiply(rounds)
    torch.set_num_threads(threads)
    return (time.thread_time() - began) / rounds


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
            "model": {"factory": "paced:busy_tcn", "args": plant.model},
            "training": {**TRAINING, "world_size": plant.ranks, **plant.training},
        }
        environment = {"DTRAIN_CACHE": str(self.folder / "cache"), "DTRAIN_STOP_GRACE_SECONDS": "1"}
        folder = self.folder / name
        hosts = Hosts(self.preload, folder, config, environment, network, max_replacements=0, nodes=plant.ranks)
        if network is not None and plant.bytes_per_second:
            for one, other in itertools.combinations(range(plant.ranks), 2):
                if plant.node in (None, one, other):
                    network.throttle(one, other, plant.bytes_per_second)
        try:
            hosts.start(plant.faults)
            began = time.monotonic()
            while hosts.running and time.monotonic() - began < LIMIT_SECONDS:
                hosts.look()
                if (
                    plant.cause is SlowdownCause.HANG
                    and len({item["rank"] for item in hosts.rundir.events("hang")}) == plant.ranks
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

"""Measure how long a training stops when a node is killed: on clusters of this project, and under torchrun.

Run `python -m benchmarks.recovery`. The same trainer trains the same model on three nodes of this machine; only the
launcher differs (`benchmarks.launchers`). A whole node gets SIGKILL; every other time it is the one with rank 0.
``--engine`` chooses launchers: the local cluster, torchrun tuned, torchrun by default (`DEFAULT_KILLS` only), and real,
small clusters on this machine: SLURM, Kubernetes and Ray (`harness/engines`). With ``--steps`` the trainings on
clusters go on to their last step, and their weights are compared with those of an undisturbed one.

With ``--fault freeze`` a node of the local cluster gets SIGSTOP instead, and with ``--fault cut`` the link of its host
is taken down: nothing tells the others but its silence. Once they train without it, it goes on, or its link is brought
up. For a cut, each node is in a network namespace of its own (`harness.namespaces`; root). With ``--fault warned`` a
machine of a real SLURM is told by an emulation of Azure's metadata service that it is taken away in 30 s: its
successor is ordered at once, and takes over once it runs. There the pause is the time between the last step with the
node and the first one without it. Times come from the events of the trainer: each optimizer step is one, with its
generation (the number of the group that formed) and its time.

    *_p50_seconds, *_p95_seconds     from the fault to the end of the survivors' first step (p95: nearest rank)
    *_regroup_p50_seconds            from the fault to the record of the generation that made this step; clusters only
    *_back_seconds                   median, from the fault to the first step of all three nodes again
    *_without_p50_seconds            from the first step without the node to the first one of all three again
    *_back_to_three_p50_seconds      the same from the start of the replacement, or from the end of the freeze or cut
    *_steps_redone_max               completed steps that had to be repeated
    *_repeats                        kills
    *_survivors_lost                 kills after which no step came for `LIMIT_SECONDS`, or the job ended
    *_never_back_to_three            kills after which the survivors went on, and the job failed when it was to grow
    *_weights_equal                  with ``--steps``: whether the weights are those of an undisturbed training, but for
                                     rounding (`TOLERANCE`)
    *_accounted_percent              with ``--steps``: the share of the paid node-seconds for which the ledger has a
                                     cause
    suspicions, soak_seconds         with ``--fault none``: how often a node took another for lost though none was
                                     touched, while as many processes as there are cores only computed; for how long
    soak_regroupings                 groups that formed meanwhile; each would be a consequence of a suspicion
    links_watched, beats_due         ways on which one node listens for another, and the signs of life that were due on
                                     all of them by the setting ``health_check_seconds``
    soak_load_mean, _highest         load of the machine meanwhile
    failed                           launchers without figures, and the reasons
    busy                             other work kept the machine busy before this began, so that the seconds are not
                                     those of a quiet machine. Such a line is saved with --busy only
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.host import busy_beside, in_parts, is_busy, note, options_of, stop_on_signals, tell
from benchmarks.launchers import NODES, Cluster, Torchrun
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from harness.engines.engine_training import Outcome
from harness.engines.machines import Machines, missing, open_machines
from harness.metadata_service import metadata_service
from harness.namespaces import Hosts, NoNamespacesError
from harness.worlds import build
from trainer.config import DistributedTrainingConfig
from trainer.elastic.generation_record import generations
from trainer.rundir import LOGS, SeenFiles

CLUSTERS = ("local", "slurm", "kubernetes", "ray")
TORCHRUN = ("torchrun_tuned", "torchrun_default")
LIMIT_SECONDS = 180.0
"""Seconds without a step after which a job counts as lost."""
CALM_SECONDS = 3.0
"""Seconds between two kills, in which the nodes work undisturbed."""
POLL_SECONDS = 0.05
DEFAULT_KILLS = 2
"""Kills under torchrun by default, each in a job of its own: it takes up to 3 minutes."""
TOLERANCE = 5e-3
"""Sums over another number of ranks are rounded differently, and steps make that larger."""
TRAINING = {
    "world_size": NODES,
    "batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "epochs": 10**6,
    "eval_frequency": 10**6,
    "checkpoint_frequency": 100,
    "log_frequency": 1,
    "threads_per_rank": 1,
}
Launcher = Cluster | Torchrun


class LostError(RuntimeError):
    """The job ended, or made no step for too long."""


@dataclass
class Figures:
    """The figures of one launcher, over all its kills."""

    pauses: list[float] = field(default_factory=list)
    regrouped: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    back_to_three: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    repeats: int = 0


class Steps:
    """The steps of a job, as its ranks report them."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._seen = SeenFiles()
        self.steps: list[dict[str, Any]] = []
        self._ranks: dict[int, set[int]] = defaultdict(set)

    def look(self) -> None:
        """Read the events that are new."""
        for event in self.launcher.rundir.follow(self._seen):
            self._ranks[event["generation"]].add(event["rank"])
            if event["kind"] == "step":
                self.steps.append(event)
        self.steps.sort(key=lambda event: event["time"])

    @property
    def generation(self) -> int:
        """The newest generation that reported a step; 0 if none did."""
        return max((event["generation"] for event in self.steps), default=0)

    def wait_for(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first step for which ``what`` holds; raise `LostError` if none comes for too long or the job
        ends."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            self.look()
            for event in self.steps:
                if what(event):
                    return event
            if time.monotonic() > deadline or not self.launcher.running:
                raise LostError("the job ended" if time.monotonic() < deadline else f"no step in {LIMIT_SECONDS} s")
            time.sleep(POLL_SECONDS)

    def is_new(self, event: dict[str, Any], before: int) -> bool:
        """Return whether it is a step of a generation after ``before``. A new rank 0 also reports steps that the
        generation before had done and had no time to write; those are not new."""
        generation = event["generation"]
        return generation > before and event["step"] > self.launcher.begins_at(generation)

    def is_of_three(self, event: dict[str, Any]) -> bool:
        """Return whether it is a step of a generation with three ranks, which is known once each has reported
        something."""
        return len(self._ranks[event["generation"]]) == NODES


def measure_one(launcher: Launcher, steps: Steps, rank: int, figures: Figures) -> None:
    """Strike the node of a rank, let it come back, and wait until all three ranks train again."""
    node = launcher.node_of_rank(rank)
    steps.look()
    before = steps.generation
    struck_at = launcher.strike(node)
    first = steps.wait_for(lambda event: event["time"] > struck_at and steps.is_new(event, before))
    old = [event["time"] for event in steps.steps if event["generation"] <= before]
    paused_at = max(struck_at, *old) if launcher.warns else struck_at
    figures.pauses.append(first["time"] - paused_at)
    if isinstance(launcher, Cluster):
        figures.regrouped.append(launcher.generation(first["generation"]).formed_at - paused_at)
    done = {event["step"] for event in steps.steps if event["generation"] <= before}
    note(f"  rank {rank}: {figures.pauses[-1]:.2f} s")
    launcher.mend(node)
    try:
        full = steps.wait_for(lambda event: steps.is_new(event, first["generation"]) and steps.is_of_three(event))
    except LostError as error:
        raise LostError(f"never back to three: {error}") from error
    finally:
        again = {event["step"] for event in steps.steps if event["generation"] == first["generation"]}
        figures.redone.append(len(done & again))
    figures.back.append(full["time"] - struck_at)
    figures.without.append(full["time"] - first["time"])
    figures.back_to_three.append(full["time"] - launcher.returned_at(node))
    note(f"    back to three in {figures.back_to_three[-1]:.2f} s, {figures.redone[-1]} steps redone")


def strike_all(launcher: Launcher, figures: Figures, kills: int) -> None:
    """Start a job, and strike its nodes one after the other, each once all three ranks have worked undisturbed for a
    while."""
    launcher.submit()
    steps = Steps(launcher)
    for _ in range(kills):
        steps.wait_for(lambda event: event["generation"] == steps.generation and steps.is_of_three(event))
        time.sleep(CALM_SECONDS)
        rank = 0 if figures.repeats % 2 == 0 else 1 + figures.repeats // 2 % (NODES - 1)
        figures.repeats += 1
        measure_one(launcher, steps, rank, figures)


def measure(
    make: Callable[[str], Launcher], name: str, kills: int, undisturbed: Outcome | None = None
) -> dict[str, Any]:
    """Return the figures of a launcher. Another job replaces one that is lost. ``undisturbed``: the outcome of the same
    training without kills, to compare with. Raise `LostError` if a job is lost before the first kill, or if one that is
    compared is lost."""
    figures, found, number = Figures(), dict[str, Any](), 0
    by_default = name == TORCHRUN[1]
    kills = min(kills, DEFAULT_KILLS) if by_default else kills
    while figures.repeats < kills:
        number += 1
        launcher = make(f"{name}-{number}")
        try:
            strike_all(launcher, figures, 1 if by_default else kills - figures.repeats)
            if undisturbed and isinstance(launcher, Cluster):
                found = compare(launcher, undisturbed)
        except LostError as error:
            note(f"  the job is lost: {error}")
            if figures.repeats == 0 or undisturbed:
                raise
        finally:
            launcher.close()
    return {f"{name}_{key}": value for key, value in (summary(figures) | found).items()}


def compare(cluster: Cluster, undisturbed: Outcome) -> dict[str, Any]:
    """Wait for the end of a training that lost nodes, and return whether its weights are those of an undisturbed one,
    and how much of its nodes' time the ledger explains."""
    made = cluster.outcome()
    usage = cluster.manager.node_usage("one")
    bill = ledger(CostTracker("one", usage, "dedicated").nodes, cluster.rundir.events(strict=True))
    unexplained = bill.causes().get(CostCause.UNEXPLAINED)
    paid = sum(node.ended_at - node.started_at for node in usage)
    equal = made[:3] == undisturbed[:3] and all(
        torch.allclose(one, undisturbed.weights[key], rtol=TOLERANCE, atol=TOLERANCE)
        for key, one in made.weights.items()
    )
    accounted = round(100 - 100 * unexplained.seconds / paid, 3) if unexplained else 100.0
    return {"weights_equal": equal, "accounted_percent": accounted}


@contextlib.contextmanager
def engine(kind: str, count: int = NODES) -> Iterator[Machines | None]:
    """Start an engine with so many machines; None for the local cluster. Raise RuntimeError where it cannot run."""
    if kind == "local":
        yield None
        return
    if why := missing(kind):
        raise RuntimeError(why)
    with open_machines(kind, count) as machines:
        yield machines


def soak(launcher: Cluster, seconds: float) -> dict[str, Any]:
    """Train beside a load on every core, touch no node, and return how often one was taken for lost all the same. Raise
    `LostError` if the job ends meanwhile."""
    try:
        launcher.submit()
        steps = Steps(launcher)
        steps.wait_for(lambda event: steps.is_of_three(event))
        groups, silences = len(generations(launcher.rundir.storage)), count_silences(launcher)
        began, loads = time.monotonic(), list[float]()
        with busy_beside(os.cpu_count() or 1):
            while time.monotonic() - began < seconds:
                if not launcher.running:
                    raise LostError(f"the job ended after {time.monotonic() - began:.0f} s of the soak")
                time.sleep(1.0)
                loads.append(os.getloadavg()[0])
        lasted = time.monotonic() - began
        pause = DistributedTrainingConfig(**TRAINING).health_check_seconds
        links = NODES * (NODES - 1)
        return {
            "soak_seconds": round(lasted),
            "suspicions": count_silences(launcher) - silences,
            "soak_regroupings": len(generations(launcher.rundir.storage)) - groups,
            "links_watched": links,
            "beats_due": round(links * lasted / pause),
            "soak_load_mean": round(statistics.fmean(loads), 2),
            "soak_load_highest": round(max(loads), 2),
        }
    finally:
        launcher.close()


def count_silences(launcher: Cluster) -> int:
    """Return how often a node has said in its log that it took another for silent."""
    logs = Path(launcher.rundir.uri).glob(f"{LOGS}/node-*.log")
    return sum(log.read_text(errors="replace").count("nothing heard from") for log in logs)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile by nearest rank; None if there is no value."""
    ordered = sorted(values)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else None


def summary(figures: Figures) -> dict[str, Any]:
    """Return the figures of one launcher. Pure."""
    medians = {
        "p50_seconds": figures.pauses,
        "regroup_p50_seconds": figures.regrouped,
        "back_seconds": figures.back,
        "back_to_three_p50_seconds": figures.back_to_three,
        "without_p50_seconds": figures.without,
    }
    values = {
        **{key: statistics.median(found) if found else None for key, found in medians.items()},
        "p95_seconds": percentile(figures.pauses, 95),
        "steps_redone_max": max(figures.redone, default=None),
        "repeats": figures.repeats,
        "survivors_lost": figures.repeats - len(figures.pauses),
        "never_back_to_three": len(figures.pauses) - len(figures.back_to_three),
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a launcher failed, else 0."""
    parser = options_of("recovery", __doc__)
    parser.add_argument("--engine", nargs="+", choices=CLUSTERS + TORCHRUN, help="launchers (local and torchrun)")
    parser.add_argument("--kills", type=int, default=10, help="kills for each launcher (10)")
    parser.add_argument("--steps", type=int, default=0, help="steps of trainings on clusters (0: up to the last kill)")
    parser.add_argument("--busy", action="store_true", help="save also beside other work; the line is marked busy")
    faults = ("kill", "freeze", "cut", "warned", "none")
    parser.add_argument("--fault", choices=faults, default="kill", help="of a node (kill)")
    parser.add_argument("--seconds", type=float, default=600.0, help="with --fault none: how long nothing happens")
    options = parser.parse_args(arguments)
    usual = {"kill": ["local", *TORCHRUN], "warned": ["slurm"]}
    names = options.engine or usual.get(options.fault, ["local"])
    if options.fault != "kill" and names != usual.get(options.fault, ["local"]):
        where = "SLURM" if options.fault == "warned" else "the local cluster"
        parser.error(f"--fault {options.fault} happens on {where} only")
    load = os.getloadavg()[0]
    if options.save and is_busy(load) and not options.busy:
        parser.error(f"the load is {load:.1f}: wait until other work has ended, or mark the result with --busy")
    stop_on_signals()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-")))
        hosts: Hosts | None = None
        if options.fault == "cut":
            try:
                hosts = stack.enter_context(Hosts(NODES))
            except NoNamespacesError as error:
                parser.error(str(error))
        warned = options.fault == "warned"
        metadata = stack.enter_context(metadata_service()) if warned else None
        config = {"dataset": {"uri": str(build(folder))}, "tracking": {"tensorboard": False}, "training": TRAINING}
        ending: dict[str, Any] = {}
        if options.steps:  # at a rate at which rounding of sums is not blown up over many steps
            ending = {"max_steps": options.steps, "eval_frequency": options.steps, "learning_rate": 2e-5}
        of_clusters = {**config, "training": TRAINING | ending}
        os.environ["DTRAIN_CACHE"] = str(folder / "cache")
        undisturbed: Outcome | None = None
        if options.steps:
            alone = Cluster(folder / "undisturbed", of_clusters)
            alone.submit()
            undisturbed = alone.outcome()

        def part(name: str) -> dict[str, Any]:
            note(name)
            if name in TORCHRUN:
                return measure(lambda job: Torchrun(folder / job, config, name == TORCHRUN[0]), name, options.kills)
            with engine(name, NODES + warned) as machines:
                if options.fault == "none":
                    return soak(Cluster(folder / "soak", config), options.seconds)
                cluster = partial(
                    Cluster, config=of_clusters, fault=options.fault, hosts=hosts, machines=machines,
                    metadata=metadata,
                )  # fmt: skip
                return measure(lambda job: cluster(folder / job), name, options.kills, undisturbed)

        figures, failed = in_parts({name: (lambda name=name: part(name)) for name in names if options.kills})
    result = {"fault": options.fault, "steps": options.steps, **figures, **({"failed": failed} if failed else {})}
    result |= {"load_before": round(load, 2), **({"busy": True} if is_busy(load) else {})}
    saved_as = "recovery" if options.fault == "kill" else f"recovery_{options.fault}"
    tell("recovery", result, options.save, "recovery_engines" if options.steps else saved_as)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

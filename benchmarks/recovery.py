"""Measure how long a training stops when a node is killed: local cluster, torchrun tuned, torchrun by default.

Run `python -m benchmarks.recovery`. The same trainer trains the same model on three nodes of this machine; only the
launcher differs (`benchmarks.launchers`). A whole node gets SIGKILL; every other time it is the one with rank 0. With
``--fault freeze`` it gets SIGSTOP instead, and with ``--fault cut`` the link of its host is taken down: nothing tells
the others but its silence. Once they train without it, it goes on, or its link is brought up. For a cut, each node is
in a network namespace of its own (`harness.namespaces`; root); with ``--namespaces`` also for the other faults.
Times come from the events of the trainer: each optimizer step is one, with its generation (the number of the group that
formed) and its time.

    *_p50_seconds, *_p95_seconds     from the fault to the end of the survivors' first step (p95: nearest rank)
    *_rank0_p50_seconds              the same where rank 0 was killed
    *_back_to_three_p50_seconds      from the start of the replacement node, or the end of the freeze or cut, to
                                     the first step of all three
    *_steps_redone_max               completed steps that had to be repeated
    *_repeats                        kills
    *_survivors_lost                 kills after which no step came for `LIMIT_SECONDS`, or the job ended
    *_never_back_to_three            kills after which the survivors went on, and the job failed when it was to grow
    ours_times_faster_than_default   ratio of the medians
    namespaces                       whether each node had a network namespace, and a link, of its own
    suspicions, soak_seconds         with ``--fault none``: how often a node took another for lost though none was
                                     touched, while as many processes as there are cores only computed; for how long
    soak_regroupings                 groups that formed meanwhile; each would be a consequence of a suspicion
    links_watched, beats_due         ways on which one node listens for another, and the signs of life that were due on
                                     all of them by the setting ``health_check_seconds``
    soak_steps, soak_load_*          steps that the training made, and the load of the machine: its mean, its highest
    load_before, load_after          load of the machine; ``busy``: other work kept it busy before this began, so that
                                     the seconds are not those of a quiet machine. Such a line is saved with --busy only
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.host import is_busy, tell
from benchmarks.launchers import NODES, Cutting, Freezing, Launcher, Ours, Torchrun
from harness.namespaces import Hosts, NoNamespacesError
from harness.worlds import build
from trainer.config import DistributedTrainingConfig
from trainer.elastic.generation_record import generations
from trainer.rundir import LOGS, SeenFiles

LIMIT_SECONDS = 180.0
"""Seconds without a step after which a job counts as lost."""
CALM_SECONDS = 3.0
"""Seconds between two kills, in which the nodes work undisturbed."""
POLL_SECONDS = 0.05
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


FAULTS: dict[str, type[Ours]] = {"kill": Ours, "freeze": Freezing, "cut": Cutting, "none": Ours}
"""What may happen to a node, and the launcher that does it."""


class LostError(RuntimeError):
    """The job ended, or made no step for too long."""


@dataclass
class Figures:
    """The figures of one launcher, over all its kills."""

    pauses: list[float] = field(default_factory=list)
    rank_0_pauses: list[float] = field(default_factory=list)
    back_to_three: list[float] = field(default_factory=list)
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
    """Kill the node of a rank, let another replace it, and wait until all three ranks train again."""
    node = launcher.node_of_rank(rank)
    steps.look()
    before = steps.generation
    killed_at = time.time()
    launcher.kill(node)
    first = steps.wait_for(lambda event: event["time"] > killed_at and steps.is_new(event, before))
    pause = first["time"] - killed_at
    figures.pauses.append(pause)
    if rank == 0:
        figures.rank_0_pauses.append(pause)
    done = {event["step"] for event in steps.steps if event["generation"] <= before}
    print(f"  rank {rank}: {pause:.2f} s", file=sys.stderr, flush=True)
    launcher.replace(node)
    try:
        full = steps.wait_for(lambda event: steps.is_new(event, first["generation"]) and steps.is_of_three(event))
    except LostError as error:
        raise LostError(f"never back to three: {error}") from error
    finally:
        again = {event["step"] for event in steps.steps if event["generation"] == first["generation"]}
        figures.redone.append(len(done & again))
    figures.back_to_three.append(full["time"] - launcher.replaced_at(node))
    redone = f"{figures.redone[-1]} steps redone"
    print(f"    back to three in {figures.back_to_three[-1]:.2f} s, {redone}", file=sys.stderr, flush=True)


def settle(steps: Steps) -> None:
    """Wait until all three ranks have worked undisturbed for a while."""
    steps.wait_for(lambda event: event["generation"] == steps.generation and steps.is_of_three(event))
    time.sleep(CALM_SECONDS)


def measure(make: Callable[[Path], Launcher], folder: Path, repeats: int, jobs: int, name: str) -> Figures:
    """Kill ``repeats`` nodes in all, distributed over ``jobs`` jobs that run one after the other; another job replaces
    one that is lost. Raise `LostError` if a job is lost before the first kill."""
    figures = Figures()
    per_job = math.ceil(repeats / jobs)
    number = 0
    while figures.repeats < repeats:
        number += 1
        launcher = make(folder / f"{name}-{number}")
        try:
            launcher.start()
            steps = Steps(launcher)
            steps.wait_for(lambda event: steps.is_of_three(event))  # noqa: B023 - used at once
            for _ in range(min(per_job, repeats - figures.repeats)):
                settle(steps)
                rank = 0 if figures.repeats % 2 == 0 else 1 + figures.repeats // 2 % (NODES - 1)
                figures.repeats += 1
                measure_one(launcher, steps, rank, figures)
        except LostError as error:
            print(f"  the job is lost: {error}", file=sys.stderr, flush=True)
            if figures.repeats == 0:
                raise
        finally:
            launcher.close()
    return figures


def soak(launcher: Ours, seconds: float) -> dict[str, Any]:
    """Train beside a load on every core, touch no node, and return how often one was taken for lost all the same. Raise
    `LostError` if the job ends meanwhile."""
    burners = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(os.cpu_count() or 1)]
    try:
        launcher.start()
        steps = Steps(launcher)
        steps.wait_for(lambda event: steps.is_of_three(event))
        groups, silences = len(generations(launcher.rundir.storage)), count_silences(launcher)
        first = steps.steps[-1]["step"]
        for burner in burners:
            burner.start()
        began, loads = time.monotonic(), list[float]()
        while time.monotonic() - began < seconds:
            if not launcher.running:
                raise LostError(f"the job ended after {time.monotonic() - began:.0f} s of the soak")
            time.sleep(1.0)
            loads.append(os.getloadavg()[0])
        lasted = time.monotonic() - began
        steps.look()
        pause = DistributedTrainingConfig(**TRAINING).health_check_seconds
        links = NODES * (NODES - 1)
        return {
            "soak_seconds": round(lasted),
            "suspicions": count_silences(launcher) - silences,
            "soak_regroupings": len(generations(launcher.rundir.storage)) - groups,
            "links_watched": links,
            "beats_due": round(links * lasted / pause),
            "soak_steps": steps.steps[-1]["step"] - first,
            "soak_load_mean": round(statistics.fmean(loads), 2),
            "soak_load_highest": round(max(loads), 2),
        }
    finally:
        for burner in burners:
            if burner.pid is not None:
                burner.kill()
        launcher.close()


def count_silences(launcher: Ours) -> int:
    """Return how often a node has said in its log that it took another for silent."""
    logs = Path(launcher.rundir.uri).glob(f"{LOGS}/node-*.log")
    return sum(log.read_text(errors="replace").count("nothing heard from") for log in logs)


def _burn() -> None:
    while True:
        pass


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile by nearest rank; None if there is no value."""
    ordered = sorted(values)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else None


def summary(name: str, figures: Figures) -> dict[str, Any]:
    """Return the figures of one launcher under the names of the saved results."""
    values = {
        "p50_seconds": statistics.median(figures.pauses) if figures.pauses else None,
        "p95_seconds": percentile(figures.pauses, 95),
        "rank0_p50_seconds": statistics.median(figures.rank_0_pauses) if figures.rank_0_pauses else None,
        "back_to_three_p50_seconds": statistics.median(figures.back_to_three) if figures.back_to_three else None,
        "steps_redone_max": max(figures.redone, default=None),
        "repeats": figures.repeats,
        "survivors_lost": figures.repeats - len(figures.pauses),
        "never_back_to_three": len(figures.pauses) - len(figures.back_to_three),
    }
    return {f"{name}_{key}": round(value, 3) if isinstance(value, float) else value for key, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=10, help="kills for the local cluster and for torchrun tuned")
    parser.add_argument("--default-repeats", type=int, default=10, help="kills for its defaults: up to 3 minutes each")
    parser.add_argument("--only", choices=("ours", "torchrun_tuned", "torchrun_default"), help="only this launcher")
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    parser.add_argument("--busy", action="store_true", help="save also beside other work; the line is marked busy")
    parser.add_argument("--fault", choices=tuple(FAULTS), default="kill", help="what happens to a node")
    parser.add_argument("--namespaces", action="store_true", help="each node in a network namespace; with cut always")
    parser.add_argument("--seconds", type=float, default=600.0, help="with --fault none: how long nothing happens")
    options = parser.parse_args(arguments)
    if options.fault != "kill":
        options.only, options.default_repeats = "ours", 0
    load = os.getloadavg()[0]
    if options.save and is_busy(load) and not options.busy:
        parser.error(f"the load is {load:.1f}: wait until other work has ended, or mark the result with --busy")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the nodes end with this process
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-")))
        hosts: Hosts | None = None
        if options.fault == "cut" or options.namespaces:
            try:
                hosts = stack.enter_context(Hosts(NODES))
            except NoNamespacesError as error:
                parser.error(str(error))
        config = {
            "dataset": {"uri": str(build(folder))},
            "tracking": {"tensorboard": False},
            "training": TRAINING,
        }
        os.environ["DTRAIN_CACHE"] = str(folder / "cache")
        found: dict[str, Figures] = {}
        kind = FAULTS[options.fault]
        makers: list[tuple[str, Callable[[Path], Launcher], int, int]] = [
            ("ours", lambda place: kind(place, config, hosts), 0 if options.fault == "none" else options.repeats, 1),
            ("torchrun_tuned", lambda place: Torchrun(_made(place), config, tuned=True), options.repeats, 1),
            (
                "torchrun_default",
                lambda place: Torchrun(_made(place), config, tuned=False),
                options.default_repeats,
                options.default_repeats,  # a new job for each kill: it allows three restarts only
            ),
        ]
        for name, make, repeats, jobs in makers:
            if repeats and options.only in (None, name):
                print(name, file=sys.stderr, flush=True)
                found[name] = measure(make, folder, repeats, jobs, name)
        soaked = soak(Ours(folder / "soak", config, hosts), options.seconds) if options.fault == "none" else {}
    result: dict[str, Any] = {
        "fault": options.fault,
        **({"namespaces": True} if hosts else {}),
        **soaked,
    }
    for name, figures in found.items():
        result |= summary(name, figures)
    result["steps_redone_max"] = result.get("ours_steps_redone_max")
    ours, default = result.get("ours_p50_seconds"), result.get("torchrun_default_p50_seconds")
    result["ours_times_faster_than_default"] = round(default / ours, 1) if ours and default else None
    result |= {"load_before": round(load, 2), **({"busy": True} if is_busy(load) else {})}
    tell("recovery", result, options.save, None if options.fault == "kill" else f"recovery_{options.fault}")
    return 0


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())

"""Measure how training scales: `dtrain train` for some steps on each number of nodes, one after the other.

Run `python -m benchmarks.scaling`. **Weak**: each rank has the same work, so more ranks make a larger step. **Strong**:
all ranks together do the step of the largest world; numbers of nodes that do not divide it are left out. Without
``--dataset`` the stock model trains on real prices, on the local cluster in a temporary home. With it, the training is
that of your environment (``DTRAIN_CLUSTER``, ``DTRAIN_HOME``, …) and of the options after ``--``; on a cloud it costs
money:

    python -m benchmarks.scaling --dataset latest --nodes 1 2 4 -- --model my_models:make_model

    points                       the trainings: seconds of a step and of its parts, samples per second, communication
                                 over computation, dollars of an epoch
    efficiency_weak, _strong     samples per second of a rank, over those of a rank of the smallest world, by ranks
    verdict                      what limits the largest world that was measured; nothing is said of larger ones

Ways to sum gradients on slow links are measured by `benchmarks.links`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.host import note, options_of, real_dataset, stop_on_signals, tell
from dtrain_dagster.costs.plan import launch_price
from dtrain_dagster.monitoring.windows import windows
from dtrain_dagster.planning.check_job import data_of
from dtrain_dagster.settings.environment import load_settings
from trainer.documents.events import StepEvent, read_events
from trainer.rundir import RunDir

Mode = Literal["weak", "strong"]
LOG_EVERY = 4
"""Steps of a logged window."""
WARM_UP = 1
"""Logged windows of a training that are left out: the first steps warm caches up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One short training. Seconds are medians over its logged windows, per optimizer step, and means over ranks."""

    mode: Mode
    nodes: int
    world_size: int
    global_batch: int
    step_seconds: float
    step_seconds_low: float
    """The fastest logged window; `step_seconds_high` is the slowest."""
    step_seconds_high: float
    compute_seconds: float
    """Forward, backward and update of a rank."""
    network_seconds: float
    """Exposed communication; waiting for slower ranks is not in it."""
    waiting_seconds: float
    """Waiting for slower ranks."""
    usd_per_epoch: float

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.global_batch / self.step_seconds

    @property
    def communication_to_compute(self) -> float:
        """The exposed communication as a share of the computation."""
        return self.network_seconds / self.compute_seconds if self.compute_seconds else 0.0


def read_point(
    events: Sequence[Mapping[str, Any]],
    mode: Mode,
    nodes: int,
    training: Mapping[str, Any],
    samples: int,
    usd_per_node_hour: float,
) -> ScalingPoint:
    """Return the figures of a short training. ``training``: the job's section of that name; ``samples``: the samples of
    an epoch. Raise ValueError if the training has no figures. Pure."""
    told = [item.step_seconds for item in read_events(StepEvent, events) if item.step_seconds is not None]
    seconds, timings = told[WARM_UP:], windows(events)[WARM_UP:]
    if not seconds or not timings:
        raise ValueError("the training is too short: it has logged no step after its warm-up")
    step = statistics.median(seconds)
    batch = training["batch_size_per_gpu"] * training["gradient_accumulation_steps"] * training["world_size"]
    return ScalingPoint(
        mode=mode,
        nodes=nodes,
        world_size=timings[0].world_size,
        global_batch=batch,
        step_seconds=step,
        step_seconds_low=min(seconds),
        step_seconds_high=max(seconds),
        compute_seconds=statistics.median(item.mean("forward", "backward", "optimizer") for item in timings),
        network_seconds=statistics.median(item.mean("communication") for item in timings),
        waiting_seconds=statistics.median(item.mean("waiting") for item in timings),
        usd_per_epoch=nodes * usd_per_node_hour / 3600 * step * math.ceil(samples / batch),
    )


def efficiency(points: Iterable[ScalingPoint], mode: Mode) -> dict[int, float]:
    """Return for each world size the samples per second per rank, as a share of those of the smallest world; 1 is
    perfect. Pure."""
    mine = sorted((point for point in points if point.mode == mode), key=lambda point: point.world_size)
    if not mine:
        return {}
    base = mine[0].samples_per_second / mine[0].world_size
    return {point.world_size: point.samples_per_second / point.world_size / base for point in mine}


def summarize_scaling(points: Sequence[ScalingPoint], cores: float | None) -> str:
    """Return in a sentence how well the training scales here, and what limits it. ``cores``: if all ranks share one
    machine, how many of them it can run at full speed; None: each has its own. Pure."""
    weak = efficiency(points, "weak")
    base, largest = min(weak), max(weak)
    if largest == base:
        return f"{'One rank' if base == 1 else f'{base} ranks'} only: there is nothing to compare with."
    point = next(item for item in points if item.world_size == largest)
    said = f"{largest} ranks work at {weak[largest]:.0%} of the pace of {base} rank(s) each (weak scaling)"
    if cores is not None and largest > cores:
        crowded = 1 - cores / largest / min(1.0, cores / base)
        said += f"; they share {cores:g} core(s), which alone can cost up to {crowded:.0%} of that pace"
    causes = {"communication": point.network_seconds, "waiting for slower ranks": point.waiting_seconds}
    name, seconds = max(causes.items(), key=lambda item: item[1])
    return f"{said}; {name} takes {seconds / point.step_seconds:.0%} of a step."


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train on each number of nodes, on the cluster of the environment, and return the points and what they say."""
    if options.dataset is None:  # a home of its own; a shell that is set to a cloud buys nothing there
        for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
            del os.environ[name]
        os.environ["DTRAIN_HOME"] = str(folder / "home")
        options.dataset = real_dataset(folder / "daily").uri
    settings = load_settings()
    shares_machine = settings.kind.is_this_machine
    if shares_machine:  # else one node alone gets all cores, and two half of them each
        os.environ.setdefault("DTRAIN_THREADS_PER_RANK", "1")
    mark, most = f"{time.time():.0f}", max(options.nodes)
    points: list[ScalingPoint] = []
    runs: list[tuple[Mode, int]] = [("weak", count) for count in sorted(set(options.nodes))]
    accumulation = 1
    while runs:
        mode, nodes = runs.pop(0)
        name = f"scaling-{mark}-{mode}-{nodes}of{most}-{options.node_steps}"
        more = {"gradient_accumulation_steps": accumulation * most // nodes} if mode == "strong" else {}
        train_on(nodes, name, options, more)
        rundir = RunDir(f"{settings.jobs_uri}/{name}")
        job = rundir.read_job()
        if not points:  # with all nodes the two modes are the same training
            accumulation = job.training.gradient_accumulation_steps
            smaller = sorted(set(options.nodes) - {most})
            runs += [("strong", count) for count in smaller if accumulation * most % count == 0]
        training, usd = asdict(job.training), launch_price(rundir, settings.tiers[0]) or 0.0
        point = read_point(list(rundir.events()), mode, nodes, training, data_of(job).samples["train"], usd)
        note(f"{name}: {1000 * point.step_seconds:.1f} ms a step, {point.samples_per_second:,.0f} samples/s")
        points.append(point)
    points += [replace(point, mode="strong") for point in points if (point.mode, point.nodes) == ("weak", most)]
    cores = (os.cpu_count() or 1) / (job.training.threads_per_rank or 1) if shares_machine else None
    derived = ("samples_per_second", "communication_to_compute")
    return {
        "efficiency_weak": efficiency(points, "weak"),
        "efficiency_strong": efficiency(points, "strong"),
        "verdict": summarize_scaling(points, cores),
        "points": [asdict(point) | {name: getattr(point, name) for name in derived} for point in points],
    }


def train_on(nodes: int, name: str, options: argparse.Namespace, more: Mapping[str, Any]) -> None:
    """Train a job of this name on so many nodes, with these settings; raise RuntimeError if it fails."""
    ends = dict.fromkeys(("max_steps", "eval_frequency", "checkpoint_frequency"), options.node_steps)
    own = [f"training.{field}={value}" for field, value in {**ends, "log_frequency": LOG_EVERY, **more}.items()]
    command = [str(Path(sys.executable).parent / "dtrain"), "train", "--dataset", options.dataset]
    command += ["--nodes", str(nodes), "--name", name, *options.train_options]
    command += [word for item in own for word in ("--set", item)]
    environment = {**os.environ, "DTRAIN_OPTIONS": "command_tracking=off"}
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed with exit code {done.returncode}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments."""
    parser = options_of("scaling", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3], help="numbers of nodes (1 2 3)")
    parser.add_argument("--node-steps", type=int, default=96, help="steps of a training (96)")
    parser.add_argument("--dataset", help="data of the trainings, as `dtrain train` has it (the bundled prices)")
    parser.add_argument("train_options", nargs="*", help="more options of `dtrain train`, after --")
    options = parser.parse_args(arguments)
    if min(options.nodes) < 1 or options.node_steps < 3 * LOG_EVERY:
        parser.error(f"--nodes must be at least 1, --node-steps at least {3 * LOG_EVERY}")
    stop_on_signals()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scaling-", ignore_cleanup_errors=True) as folder:
        figures = measure(Path(folder), options)
    tell("scaling", {**figures, "seconds": round(time.monotonic() - began, 1)}, options.save)


if __name__ == "__main__":
    main()

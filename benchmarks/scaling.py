"""Measure the gain from more ranks: two on two cores, and three hosts on links of three rates, with each way to sum.

Run `python -m benchmarks.scaling`. Two ranks: three worlds train the stock model at its default batch, one thread to a
rank, in intervals of steps that alternate in random order: one rank alone, two worlds of one rank at once, and one
world of two.

    efficiency_2_ranks           samples per second of the world of two, over the sum of those of two worlds of one that
                                 train at the same time without a connection: the cost of summing gradients and of
                                 waiting for each other. Both sides share the cores alike
    efficiency_2_ranks_lockstep  the same for a world that exchanges nothing, but where each step ends when the later of
                                 two ranks is done: computed from the single steps of those two worlds of one. It limits
                                 synchronous training where two cores are not equally fast at each moment
    efficiency_2_ranks_by_start  the first one, for each start of the worlds
    efficiency_2_ranks_alone     over twice the samples per second of one rank while the other core idles: this includes
                                 what the cores take from each other (caches, memory, clocks)

Three hosts: network namespaces with a rank each, joined by links of 10 Gbit/s, 1 Gbit/s and 100 Mbit/s; real prices;
the stock model at its default batch, and a wide one, whose gradients are megabytes and which trains **8 samples per
rank and step**: chosen so that a step waits for the link. With larger batches, communication weighs less. (Sums by node
differ from plain ones where nodes have several ranks: they have rows of their own, with two ranks on each of two
hosts.) At the lowest rate, allreduce and top-k train twice, once at each end of the series. This part needs root.

    topk_vs_allreduce_100mbit              duration of a step of the wide model with allreduce over that with top-k:
                                           geometric mean of the two rounds; ``…_rounds``: each of them
    topk_vs_allreduce_100mbit_whole_run    the same by the clock, over the whole run: it includes everything that
                                           happens between steps
    …_stock                                both for the stock model
    topk_loss_difference_percent           how much worse the wide model's validation is after the same samples: a
                                           difference of d nats is a sample whose likelihood is lower by 1 - exp(-d).
                                           From two separate trainings, ``--loss-steps`` long, with allreduce and with
                                           top-k, over the fastest link, which changes no number of these
    loss_rows                              these two trainings; topk_loss_samples: samples of each
    rows                                   all others: seconds of a step, exposed communication, losses
    failed                                 parts without figures, and the reasons
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "trainer"), str(ROOT / "tests" / "faults")]

import switch  # noqa: E402
import worlds  # noqa: E402

from benchmarks.host import in_parts, lockstep, tell  # noqa: E402
from benchmarks.namespaces import RATES, Hosts, NoNamespacesError  # noqa: E402
from benchmarks.scaling_figures import LATEST, after_a_fixed_time, against_plain, round_figure  # noqa: E402
from dtrain_dagster.data.prices import write_prices  # noqa: E402
from dtrain_dagster.data.sharding import DatasetParams, build_dataset  # noqa: E402
from dtrain_dagster.data.sources import price_source  # noqa: E402
from dtrain_dagster.data.validation import validate_prices  # noqa: E402
from trainer.config import parse_job  # noqa: E402
from trainer.data.loader import Batch  # noqa: E402
from trainer.engine.trainer import DistributedTrainer  # noqa: E402

WARM_UP = 220
"""Steps before the first interval: at the beginning, every report ends a window of the communication profile."""
MODELS = {
    "stock": ({"factory": "tcn", "args": {}}, 128, 2),
    "wide": ({"factory": "tcn", "args": {"channels": 256}}, 8, 1),
}
"""Model, samples in a micro-batch, micro-batches of a rank."""
MODES = ("allreduce", "fp16", "topk")
"""Ways to sum gradients that are compared."""
SETTLING = 10
"""Steps at the beginning of a training that its typical step leaves out."""
COMMON = {
    "epochs": 1000, "log_frequency": 10, "checkpoint_frequency": 10**9, "eval_frequency": 10**9, "warmup_steps": 10,
    "threads_per_rank": 1, "collective_timeout_seconds": 120, "hang_seconds": 1e6,
}  # fmt: skip
"""Settings of all trainings."""


class TimedTrainer(DistributedTrainer):
    """A training in intervals: after each it sends the seconds of its steps, and waits for the order to begin the
    next."""

    def __init__(self, job: Any, pipe: Connection, steps: int) -> None:
        super().__init__(job)
        self.pipe, self.interval, self.ends_at = pipe, steps, WARM_UP
        self.began: list[float] = []
        """Times at which the steps of this interval began, by `time.monotonic`."""

    def train_epoch(self, dataloader: Iterable[Batch], epoch: int = 0) -> dict[str, float]:
        """Train an epoch, and pause where an interval ends."""
        return super().train_epoch(self._in_intervals(dataloader), epoch)

    def _in_intervals(self, dataloader: Iterable[Batch]) -> Iterator[Batch]:
        for batch in dataloader:
            if self.steps_done == self.ends_at:
                self.pipe.send([end - begin for begin, end in pairwise([*self.began, time.monotonic()])])
                self.pipe.recv()
                self.session.world.barrier()
                self.session.step.timer.drop()
                self.ends_at, self.began = self.ends_at + self.interval, []
            self.began.append(time.monotonic())
            yield batch


def be_timed(config: str, environment: dict[str, str], log: str, pipe: Connection, steps: int) -> None:
    """Run a rank that trains in intervals until its process is ended."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    trainer = TimedTrainer(parse_job(Path(config).read_text()), pipe, steps)
    trainer.initialize_distributed()
    trainer.setup()
    with contextlib.suppress(EOFError):
        trainer.train()


def two_ranks(folder: Path, dataset: Path, starts: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the efficiencies of two ranks. All three worlds are started several times: another start, minutes later,
    has not always confirmed the figures of one."""
    found: dict[str, list[float]] = {"alone": [], "busy": [], "both": [], "lockstep": []}
    for start in range(starts):
        print(f"two ranks: start {start + 1} of {starts}", file=sys.stderr, flush=True)
        for kind, seconds in in_turns(folder / str(start), dataset, start, rounds, steps).items():
            found[kind] += seconds
    # A step of the world of two is as much work for each rank as one of a world of one.
    busy, alone, waiting = (
        [one / other for one, other in zip(found[kind], found[against], strict=True)]
        for kind, against in (("busy", "both"), ("alone", "both"), ("busy", "lockstep"))
    )
    return {
        "efficiency_2_ranks": statistics.median(busy),
        "efficiency_2_ranks_quartiles": [
            round(value, 4) for value in statistics.quantiles(busy, n=4, method="inclusive")[::2]
        ],
        "efficiency_2_ranks_lockstep": statistics.median(waiting),
        "efficiency_2_ranks_alone": statistics.median(alone),
        "efficiency_2_ranks_by_start": [
            round(statistics.median(busy[place : place + rounds]), 4) for place in range(0, len(busy), rounds)
        ],
        **{f"step_seconds_{kind}": statistics.median(seconds) for kind, seconds in found.items()},
    }


def in_turns(folder: Path, dataset: Path, start: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step, round by round: in one world of one, in each of two worlds at once, in the world of
    two; and those of a world that waits for the later of the two worlds at once."""
    model, batch, accumulation = MODELS["stock"]
    settings = {**COMMON, "batch_size_per_gpu": batch, "gradient_accumulation_steps": accumulation}
    processes, pipes = [], {}
    try:
        for name, size in (("one", 1), ("other", 1), ("both", 2)):
            job = worlds.Job(folder / name, dataset, {"model": model}, {**settings, "world_size": size})
            path, port, pipes[name] = job.write(), worlds.free_port(), []
            for rank in range(size):
                ours, theirs = worlds.FORKS.Pipe()
                environment = ranks_environment(rank, rank, size, 2, "127.0.0.1", port, dataset)
                arguments = (str(path), environment, str(job.run_dir / f"log-{rank}.txt"), theirs, steps)
                process = worlds.FORKS.Process(target=be_timed, args=arguments, daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
                pipes[name].append(ours)
        for name in pipes:
            took(pipes, name)
        order, found, together = random.Random(start), {"alone": [], "busy": [], "both": []}, []  # type: ignore[var-annotated]
        for number in range(rounds):
            for kind in order.sample(list(found), 3):
                names = {"alone": ["one", "other"][number % 2 :][:1], "busy": ["one", "other"], "both": ["both"]}[kind]
                for name in names:
                    for pipe in pipes[name]:
                        pipe.send("go")
                intervals = [took(pipes, name) for name in names]
                # Of two worlds the speeds add up, so that the mean of their durations is the harmonic one.
                found[kind].append(statistics.harmonic_mean([sum(interval) for interval in intervals]) / steps)
                if kind == "busy":
                    together.append(lockstep(intervals) / steps)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {**found, "lockstep": together}


def took(pipes: dict[str, list[Connection]], name: str) -> list[float]:
    """Return the seconds of each step of a world's interval, of the rank that took longest."""
    return max((pipe.recv() for pipe in pipes[name]), key=sum)


def ranks_environment(
    rank: int, local: int, size: int, per_node: int, address: str, port: int, dataset: Path
) -> dict[str, str]:  # fmt: skip
    """Return the environment variables of a rank."""
    facts = {
        "RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": min(size, per_node),
        "NODE_RANK": rank // per_node, "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return {**{name: str(value) for name, value in facts.items()}, "DTRAIN_CACHE": str(dataset.parent / "cache")}


def be_host(namespace: str, config: str, environment: dict[str, str], log: str) -> None:
    """Run a rank on one of the hosts."""
    switch.enter(namespace)
    worlds.be_rank(["--config", config], {**os.environ, **environment, "GLOO_SOCKET_IFNAME": "eth0"}, log)


def train(
    hosts: Hosts,
    folder: Path,
    dataset: Path,
    rate: str,
    model: str,
    mode: str,
    steps: int,
    per_host: int = 1,
    turn: int = 0,
) -> dict[str, Any]:
    """Train once, and return the row of the table; raise RuntimeError if a rank fails."""
    size = 3 if per_host == 1 else 2 * per_host
    factory, batch, accumulation = MODELS[model]
    settings = {
        **COMMON, "world_size": size, "batch_size_per_gpu": batch, "gradient_accumulation_steps": accumulation,
        "max_steps": steps, "communication": mode,
    }  # fmt: skip
    job = worlds.Job(folder / f"{rate}-{model}-{mode}-{size}-{steps}-{turn}", dataset, {"model": factory}, settings)
    path, port, processes = str(job.write()), worlds.free_port(), []
    try:
        for rank in range(size):
            host = rank // per_host
            environment = ranks_environment(rank, rank % per_host, size, per_host, hosts.address(0), port, dataset)
            log = str(job.run_dir / f"log-{rank}.txt")
            arguments = (hosts.paths[host], path, environment, log)
            process = worlds.FORKS.Process(target=be_host, args=arguments, daemon=True)
            process.start()
            processes.append(process)
        for process in processes:
            process.join(3600)
        if [process.exitcode for process in processes] != [0] * size:
            raise RuntimeError(f"{job.run_dir.name} failed: {job.result().get('error')}\n{job.log()[-2000:]}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    row = {"rate": rate, "model": model, "communication": mode, "ranks": size, "hosts": size // per_host}
    return {**row, "round": turn, **measured(job, steps)}


def samples_per_rank(settings: Mapping[str, Any]) -> int:
    """Return the samples that a rank trains in one step."""
    return int(settings["batch_size_per_gpu"] * settings["gradient_accumulation_steps"])


def measured(job: worlds.Job, steps: int) -> dict[str, Any]:
    """Return the figures of a training that has ended, from its events."""
    timing, reports = job.events("timing"), job.events("step")
    steady = [item for item in timing if item["step"] - item["steps"] >= SETTLING] or timing[-1:]
    exposed = [statistics.fmean(item["segments"]["communication"]) for item in steady]
    began = reports[0]["time"] - reports[0]["step_seconds"] * reports[0]["step"]
    return {
        "steps": steps,
        "samples": steps * job.training["world_size"] * samples_per_rank(job.training),
        "step_seconds": statistics.median(item["seconds"] for item in steady),
        "exposed_seconds": statistics.median(exposed),
        "whole_run_step_seconds": (reports[-1]["time"] - began) / steps,
        "gradient_bytes": sum(item["bytes"] for item in steady[-1]["collectives"] if "bucket" in item["name"]),
        "bandwidth_bytes_per_second": max(
            (item["bandwidth_bytes_per_second"] or 0 for item in steady[-1]["collectives"] if "bucket" in item["name"]),
            default=None,
        ),
        "train_loss": statistics.fmean(item["loss"] for item in reports[-LATEST:]),
        "valid_loss": job.events("evaluation")[-1]["loss"] if job.events("evaluation") else None,
        "curve": [[round(item["time"] - began, 3), item["loss"]] for item in reports],
    }


def three_hosts(
    folder: Path,
    dataset: Path,
    rates: Sequence[str],
    models: Sequence[str],
    steps: int,
    steps_slow: int,
    loss_steps: int,
) -> dict[str, Any]:
    """Train on three hosts at all rates with all models and ways to sum; return the comparisons and the rows."""
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    last = rates[-1]
    with Hosts(3) as hosts:
        for rate in rates:
            hosts.limit(rate)
            plan = [(model, mode, 1, 0) for model in models for mode in MODES]
            if rate == last:
                plan += [("wide", mode, 2, 0) for mode in ("allreduce", "hierarchical") if "wide" in models]
                plan += [(model, mode, 1, 1) for model in models for mode in ("topk", "allreduce")]
            for model, mode, per_host, turn in plan:
                count = steps_slow if rate == last and per_host == 1 else steps
                rows.append(train(hosts, folder, dataset, rate, model, mode, count, per_host, turn))
                shown = {name: value for name, value in rows[-1].items() if name != "curve"}
                print(json.dumps(shown), file=sys.stderr, flush=True)
        if loss_steps and "wide" in models:
            figures |= losses(hosts, folder, dataset, loss_steps)
    after_a_fixed_time(rows)
    for model in models:
        name = "" if model == "wide" else f"_{model}"
        figures |= against_plain(rows, last, model, f"topk_vs_allreduce_{last}{{}}{name}")
    return {**figures, "rows": [{key: round_figure(value) for key, value in row.items()} for row in rows]}


def losses(hosts: Hosts, folder: Path, dataset: Path, steps: int) -> dict[str, Any]:
    """Train the wide model long, with allreduce and with top-k, and return how much the loss differs in the end."""
    quickest = max(RATES, key=lambda name: RATES[name])
    hosts.limit(quickest)
    rows = [train(hosts, folder, dataset, quickest, "wide", one, steps) for one in ("allreduce", "topk")]
    gap = rows[-1]["valid_loss"] - rows[0]["valid_loss"]
    kept = ("communication", "steps", "samples", "train_loss", "valid_loss")
    return {
        "topk_loss_difference_percent": 100 * -math.expm1(-gap),
        "topk_loss_samples": rows[0]["samples"],
        "loss_rows": [{key: round_figure(row[key]) for key in kept} for row in rows],
    }


def build(folder: Path, window: int, **params: Any) -> Path:
    """Build a dataset of the bundled prices."""
    folder.mkdir()
    ref = write_prices(price_source("sp500_panel"), str(folder))
    checked = validate_prices(ref)
    return Path(build_dataset(ref, checked, str(folder), DatasetParams(window=window, **params), None).uri)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a part failed, else 0."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=5, help="starts of the worlds of one and two ranks (5)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of three intervals in each start (4; 0: none)")
    parser.add_argument("--interval", type=int, default=100, help="steps in an interval (100)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a training on three hosts (60; 0: none)")
    parser.add_argument("--steps-slow", type=int, default=120, help="steps of one at the lowest rate (120)")
    parser.add_argument("--loss-steps", type=int, default=600, help="steps of the two for the losses (600; 0: none)")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="link rates, lowest last (all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models on three hosts (all)")
    parser.add_argument("--folder", help="folder of the trainings (a temporary one)")
    parser.add_argument("--save", action="store_true", help="also write the line to benchmarks/results/scaling.json")
    options = parser.parse_args(arguments)
    if options.rounds == 1 or options.rounds < 0 or options.interval < 10 or options.starts < 1:
        parser.error("--rounds must be 0 or at least 2, --interval at least 10, --starts at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and namespaces are removed first
    began, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="scaling-", ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def ranks() -> dict[str, Any]:
            return two_ranks(folder, build(folder / "daily", 60), options.starts, options.rounds, options.interval)

        def hosts() -> dict[str, Any]:
            dataset = build(folder / "short", 20, train_last="2021-06-30", valid_last="2022-03-31")
            lengths = (options.steps, options.steps_slow, options.loss_steps)
            try:
                return three_hosts(folder, dataset, options.rates, options.models, *lengths)
            except NoNamespacesError as error:
                return {"three_hosts": f"skipped: {error}"}

        parts = {"two_ranks": ranks} if options.rounds else {}
        figures, failed = in_parts(parts | ({"three_hosts": hosts} if options.steps else {}))
    result = {key: round_figure(value) for key, value in figures.items()}
    spent = {"seconds": round(time.monotonic() - began, 1), "load_before": round(load_before, 2)}
    tell("scaling", {**result, "failed": failed, **spent}, options.save)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Measure how training scales: on one node up to several, and on links of three rates with each way to sum.

Run `python -m benchmarks.scaling`. By nodes: `dtrain train` trains for some steps on each number of nodes, one after
the other. **Weak**: each rank has the same work, so more ranks make a larger step. **Strong**: all ranks together do
the step of the largest world; numbers of nodes that do not divide it are left out. Without ``--dataset`` the stock
model trains on real prices, on the local cluster in a temporary home. With it, the training is that of your environment
(``DTRAIN_CLUSTER``, ``DTRAIN_HOME``, …) and of the options after ``--``; on a cloud it costs money:

    python -m benchmarks.scaling --dataset latest --nodes 1 2 4 --steps 0 -- --model my_models:make_model

    points                       the trainings: seconds of a step and of its parts, samples per second, communication
                                 over computation, dollars of an epoch
    efficiency_weak, _strong     samples per second of a rank, over those of a rank of the smallest world, by ranks
    verdict, checks              what limits scaling here; the model of `benchmarks.scaling_model`, fitted without the
                                 largest world, against it
    curves                       efficiency of 1 to 256 ranks as modelled: (ranks, lower bound, expected, upper bound);
                                 none where the model missed the largest world by more than 20 %: ``withheld`` says so

Three hosts: network namespaces with a rank each, joined by links of 10 Gbit/s, 1 Gbit/s and 100 Mbit/s; real prices;
the stock model at its default batch, and a wide one, whose gradients are megabytes and which trains **8 samples per
rank and step**: chosen so that a step waits for the link. With larger batches, communication weighs less. (Sums by node
differ from plain ones where nodes have several ranks: they have rows of their own, with two ranks on each of two
hosts.) At the lowest rate, trainings are twice as long, and those of the wide model with allreduce and top-k are done
twice, once at each end of the series. This part needs root.

    topk_vs_allreduce_100mbit              duration of a step of the wide model with allreduce over that with top-k:
                                           geometric mean of the two rounds; ``…_rounds``: each of them
    topk_vs_allreduce_100mbit_whole_run    the same by the clock, over the whole run: it includes everything that
                                           happens between steps
    topk_loss_difference_percent           how much worse the wide model's validation is after the same samples: a
                                           difference of d nats is a sample whose likelihood is lower by 1 - exp(-d).
                                           From two separate trainings, ten times ``--steps`` long, with allreduce and
                                           with top-k, over the fastest link, which changes no number of these
    loss_rows                              these two trainings; topk_loss_samples: samples of each
    rows                                   all others: seconds of a step, exposed communication, bytes of gradients
    failed                                 parts without figures, and the reasons
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.host import in_parts, note, options_of, real_dataset, stop_on_signals, tell
from benchmarks.scaling_figures import (
    LATEST,
    against_plain,
    efficiency,
    read_point,
    round_figure,
)
from benchmarks.scaling_model import study
from dtrain_dagster.costs.plan import launch_price
from dtrain_dagster.planning.check_job import data_of
from dtrain_dagster.settings.environment import load_settings
from harness import worlds
from harness.faults import switch
from harness.namespaces import RATES, Hosts, NoNamespacesError
from trainer.rundir import RunDir

LOG_EVERY = 4
"""Steps of a logged window of a training by nodes."""
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
    "epochs": 1000,
    "log_frequency": 10,
    "checkpoint_frequency": 10**9,
    "eval_frequency": 10**9,
    "warmup_steps": 10,
    "threads_per_rank": 1,
    "collective_timeout_seconds": 120,
    "hang_seconds": 1e6,
}
"""Settings of all trainings."""


def by_nodes(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return points of weak and strong scaling, and what they say: by `dtrain train`, on the cluster of the
    environment."""
    if options.dataset is None:  # a home of its own; a shell that is set to a cloud buys nothing there
        for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
            del os.environ[name]
        os.environ["DTRAIN_HOME"] = str(folder / "home")
        options.dataset = real_dataset(folder / "daily").uri
    settings = load_settings()
    shares_machine = settings.kind.is_this_machine
    if shares_machine:  # else one node alone gets all cores, and two half of them each
        os.environ.setdefault("DTRAIN_THREADS_PER_RANK", "1")
    mark, most, points = f"{time.time():.0f}", max(options.nodes), []
    runs = [("weak", count) for count in sorted(set(options.nodes))]
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
    found = study(points, cores)
    derived = ("samples_per_second", "communication_to_compute")
    return {
        **{f"efficiency_{mode}": efficiency(points, mode) for mode in ("weak", "strong")},
        "verdict": found.verdict,
        "points": [asdict(point) | {name: getattr(point, name) for name in derived} for point in points],
        "checks": [asdict(check) | {"error": check.error} for check in found.checks],
        "curves": [{"link": curve.link.name, "mode": curve.mode, "rows": curve.rows} for curve in found.curves],
        "withheld": found.withheld,
    }


def train_on(nodes: int, name: str, options: argparse.Namespace, more: Mapping[str, Any]) -> None:
    """Train a job of this name on so many nodes, with these settings; raise RuntimeError if it fails."""
    ends = dict.fromkeys(("max_steps", "eval_frequency", "checkpoint_frequency"), options.node_steps)
    own = [f"training.{field}={value}" for field, value in {**ends, "log_frequency": LOG_EVERY, **more}.items()]
    command = [str(Path(sys.executable).parent / "dtrain"), "train", "--dataset", options.dataset]
    command += [
        "--nodes",
        str(nodes),
        "--name",
        name,
        *options.train_options,
        *(word for item in own for word in ("--set", item)),
    ]
    environment = {**os.environ, "DTRAIN_COMMAND_TRACKING": "off"}
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed with exit code {done.returncode}")


def ranks_environment(
    rank: int, local: int, size: int, per_node: int, address: str, port: int, dataset: Path
) -> dict[str, str]:
    """Return the environment variables of a rank."""
    facts = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": min(size, per_node),
        "NODE_RANK": rank // per_node,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
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
        **COMMON,
        "world_size": size,
        "batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "communication": mode,
    }
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
        "train_loss": statistics.fmean(item["loss"] for item in reports[-LATEST:]),
        "valid_loss": job.events("evaluation")[-1]["loss"] if job.events("evaluation") else None,
    }


def three_hosts(folder: Path, dataset: Path, steps: int) -> dict[str, Any]:
    """Train on three hosts at all rates with all models and ways to sum; return the comparisons and the rows."""
    rows: list[dict[str, Any]] = []
    last = list(RATES)[-1]
    with Hosts(3) as hosts:
        for rate in RATES:
            hosts.limit(rate)
            plan = [(model, mode, 1, 0) for model in MODELS for mode in MODES]
            if rate == last:
                plan += [("wide", mode, 2, 0) for mode in ("allreduce", "hierarchical")]
                plan += [("wide", mode, 1, 1) for mode in ("topk", "allreduce")]
            for model, mode, per_host, turn in plan:
                count = 2 * steps if rate == last and per_host == 1 else steps
                rows.append(train(hosts, folder, dataset, rate, model, mode, count, per_host, turn))
                note(json.dumps(rows[-1]))
        long = losses(hosts, folder, dataset, 10 * steps)
    compared = against_plain(rows, last, "wide", f"topk_vs_allreduce_{last}{{}}")
    return {**long, **compared, "rows": [{key: round_figure(value) for key, value in row.items()} for row in rows]}


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a part failed, else 0."""
    parser = options_of("scaling", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3], help="numbers of nodes (1 2 3)")
    parser.add_argument("--node-steps", type=int, default=96, help="steps of a training by nodes (96; 0: none)")
    parser.add_argument(
        "--dataset", help="data of the trainings by nodes, as `dtrain train` has it (the bundled prices)"
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of a training on three hosts (60; 0: none)")
    parser.add_argument("train_options", nargs="*", help="more options of `dtrain train`, after --")
    options = parser.parse_args(arguments)
    if min(options.nodes) < 1 or 0 < options.node_steps < 3 * LOG_EVERY:
        parser.error(f"--nodes must be at least 1, --node-steps 0 or at least {3 * LOG_EVERY}")
    stop_on_signals()  # so that ranks and namespaces are removed first
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scaling-", ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def hosts() -> dict[str, Any]:
            dataset = Path(
                real_dataset(folder / "short", window=20, train_last="2021-06-30", valid_last="2022-03-31").uri
            )
            try:
                return three_hosts(folder, dataset, options.steps)
            except NoNamespacesError as error:
                return {"three_hosts": f"skipped: {error}"}

        parts = {"by_nodes": lambda: by_nodes(folder, options)} if options.node_steps else {}
        figures, failed = in_parts(parts | ({"three_hosts": hosts} if options.steps else {}))
    result = {key: round_figure(value) for key, value in figures.items()}
    tell("scaling", {**result, "failed": failed, "seconds": round(time.monotonic() - began, 1)}, options.save)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

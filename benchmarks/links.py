"""Measure trainings on links of three rates with each way to sum gradients: three hosts in network namespaces.

Run `python -m benchmarks.links` as root. The hosts have a rank each and are joined by links of 10 Gbit/s, 1 Gbit/s and
100 Mbit/s; real prices; the stock model at its default batch, and a wide one, whose gradients are megabytes and which
trains **8 samples per rank and step**: chosen so that a step waits for the link. With larger batches, communication
weighs less. (Sums by node differ from plain ones where nodes have several ranks: they have rows of their own, with two
ranks on each of two hosts.) At the lowest rate, trainings are twice as long, and those of the wide model with allreduce
and top-k are done twice, once at each end of the series.

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
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.host import note, options_of, real_dataset, stop_on_signals, tell
from harness import worlds
from harness.faults import switch
from harness.namespaces import RATES, Hosts, NoNamespacesError

LATEST = 5
"""Number of reports over which the training loss is averaged."""
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


def against_plain(rows: Sequence[Mapping[str, Any]], rate: str, model: str, key: str) -> dict[str, Any]:
    """Return by how much top-k is faster than allreduce, in a typical step and over the whole run. ``key`` is the
    template of the figures' names. Pure."""
    found: dict[str, Any] = {}
    for name, field in (("", "step_seconds"), ("_whole_run", "whole_run_step_seconds")):
        plain, compressed = (
            {
                row["round"]: row[field]
                for row in rows
                if (row["rate"], row["model"], row["communication"], row["hosts"]) == (rate, model, mode, 3)
            }
            for mode in ("allreduce", "topk")
        )
        ratios = [plain[turn] / compressed[turn] for turn in sorted(plain)]
        found |= {key.format(name): statistics.geometric_mean(ratios)}
        found |= {key.format(name) + "_rounds": [round_figure(ratio) for ratio in ratios]}
    return found


def round_figure(value: Any) -> Any:
    """Return a float rounded to five digits, and anything else unchanged."""
    return round(value, 5) if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments."""
    parser = options_of("links", __doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of a training (60)")
    options = parser.parse_args(arguments)
    stop_on_signals()  # so that ranks and namespaces are removed first
    with tempfile.TemporaryDirectory(prefix="links-", ignore_cleanup_errors=True) as folder:
        built = real_dataset(Path(folder, "data"), window=20, train_last="2021-06-30", valid_last="2022-03-31")
        try:
            figures = three_hosts(Path(folder), Path(built.uri), options.steps)
        except NoNamespacesError as error:
            parser.error(str(error))
    tell("links", {key: round_figure(value) for key, value in figures.items()}, options.save)


if __name__ == "__main__":
    main()

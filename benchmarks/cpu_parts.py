"""Measure what the parts that serve CPUs only are worth: a step with all of them, and without one of them at a time.

Run `python -m benchmarks.cpu_parts`. Two ranks of one thread each train the stock model on this machine. In each round
every variant is one training, in random order; each makes its world anew, since connections are made when it forms. Of
each training, the step seconds are the median over its ``step`` events after the first fifth.

    peer_to_peer    small sums over connections between ranks (`trainer.comm.socket_group`); without: gloo

``without_…`` is the time of a step without the part, relative to that with all: median over rounds, and quartiles.
Above 1 the part makes steps faster.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.host import tell
from harness import worlds

RANKS, DAYS, TICKERS, WINDOW = 2, 1500, 20, 60
SETTINGS = {
    "world_size": RANKS,
    "epochs": 1000,
    "log_frequency": 10,
    "checkpoint_frequency": 10**9,
    "eval_frequency": 10**9,
    "schedule": "constant",
    "threads_per_rank": 1,
}


def take_peer_to_peer_away() -> None:
    """Let the ranks of this process's group sum by gloo."""
    import trainer.comm.torch_transport as part

    part.MOST_RANKS = 0


WITHOUT = {"peer_to_peer": take_peer_to_peer_away}
"""The parts, and what takes each away in a rank."""


def step_seconds(folder: Path, dataset: Path, without: str, batch: int, steps: int) -> float:
    """Return the median seconds of a step of one training, without one of the parts or, for "", with all."""
    environment = {"DTRAIN_CACHE": str(dataset.parent / "cache")}
    own = {"max_steps": steps, "batch_size_per_gpu": batch}
    job = worlds.Job(folder, dataset, training={**SETTINGS, **own}, environment=environment)
    if (codes := job.start(RANKS, prepare=WITHOUT.get(without)).wait(600)) != [0] * RANKS:
        raise RuntimeError(f"a training without {without or 'nothing'} ended with {codes}: {job.result().get('error')}")
    told = [event for event in job.events("step") if event["step"] > steps // 5]
    return statistics.median(event["step_seconds"] for event in told)


def measure(folder: Path, dataset: Path, rounds: int, batch: int, steps: int) -> dict[str, Any]:
    """Return the ratios of one batch size."""
    order, found = random.Random(batch), {name: [] for name in ("", *WITHOUT)}
    for number in range(rounds):
        for name in order.sample(sorted(found), len(found)):
            found[name].append(step_seconds(folder / f"{batch}-{number}-{name or 'all'}", dataset, name, batch, steps))
            print(
                f"round {number}: {batch} samples, without {name or 'nothing'}: {1000 * found[name][-1]:.3f} ms",
                file=sys.stderr,
            )
    result: dict[str, Any] = {"batch_size_per_gpu": batch, "step_seconds": round(statistics.median(found[""]), 6)}
    for name in WITHOUT:
        ratios = [without / whole for without, whole in zip(found[name], found[""], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[f"without_{name}"] = round(middle, 4)
        result[f"without_{name}_quartiles"] = [round(low, 4), round(high, 4)]
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cpu_parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="trainings of each variant (8)")
    parser.add_argument("--steps", type=int, default=400, help="steps of a training (400)")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[64, 1024], help="samples per rank and step (64 1024)"
    )
    parser.add_argument("--folder", help="folder of the trainings (a temporary one)")
    parser.add_argument("--save", action="store_true", help="also write the line to benchmarks/results/cpu_parts.json")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.steps < 50:
        parser.error("--rounds must be 2 or more, and --steps 50 or more")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="cpu-parts-") as name:
        folder = Path(name)
        with mock.patch.multiple(worlds, DAYS=DAYS, TICKERS=TICKERS):
            dataset = worlds.build(folder, window=WINDOW)
        rows = [measure(folder, dataset, options.rounds, batch, options.steps) for batch in options.batches]
    figures = {"ranks": RANKS, "rounds": options.rounds, "steps": options.steps, "rows": rows}
    tell("cpu_parts", figures, options.save)


if __name__ == "__main__":
    main()

"""Measure the speed of the same training with this project, with other frameworks, and at most: side by side, here.

Run `python -m benchmarks.throughput`. All frameworks train the same model on the same data (the bundled prices) with
the same loss, optimizer (fused AdamW), clipping and global batch. Each is a pair of processes of one thread, joined by
gloo on loopback, that trains an interval of steps when it is its turn and is stopped (SIGSTOP, with all that it has
started) when it is not. In each round every framework has one interval, in random order. No framework evaluates or
saves checkpoints.

    bound        the same step on batches that are in memory already: no input, no communication, two processes alike,
                 with malloc set as in ours (`trainer.runtime.host_memory.keep_freed_memory`)
    ours         the trainer as it is, with timing, reports, monitor and TensorBoard, at the settings of the others
    tuned        the same with the settings of a short search by this benchmark, which is not that of `dtrain tune`
    plain_ddp    PyTorch's DDP with Dataset, DataLoader, DistributedSampler
    lightning    Lightning's Trainer, barebones
    accelerate, ray     the plain loop, prepared by them
    plain_ddp_tuned     plain DDP with malloc set as in ours and the fastest settings of the space that the search for
                 ``tuned`` has: bf16, micro-batches, half-precision sums, and workers and options as the others
    plain_ddp_malloc    plain DDP, at the same settings, with malloc set as in ours. All others have the defaults of
                 glibc, as most people run them, which cost large batches page faults: the gain of ours over this one
                 does not come from malloc

Each of the others trains with its fastest options, found before, for each batch with the first model: 0, 1 or 2 workers
of its DataLoader, and DDP with or without gradient_as_bucket_view and static_graph. The rendezvous of Lightning,
Accelerate and Ray listens on all interfaces while this runs, as it always does.

``--budget`` is divided among the cells (a model and a batch): the part of a cell's share that the searches leave is for
rounds, at most `ROUNDS`, and losses. Everything that a budget, a signal (SIGTERM, SIGINT) or a failure leaves out
is in ``missing``, by cell, and the line has ``partial``. A framework that fails misses that cell, and is started again
for the next one.

Ratios are medians over rounds of ratios within a round, with a 95 % interval (bootstrap over rounds); above 1 the first
one is faster. Frameworks that are not installed are in ``skipped``, those that failed in ``failed``.

    min_vs_bound                  ours against the bound: the lowest over models and batches
    min_vs_bound_lockstep         the same if each of the bound's steps had ended when it did on the later rank, with
                                  nothing exchanged (computed from its single steps): the limit of synchronous training
                                  where two cores are not equally fast at each moment
    min_vs_any_peer               ours against the fastest of the others at the same settings: the lowest, without
                                  plain_ddp_malloc and plain_ddp_tuned; min_vs_plain_ddp_malloc: against the first
    geomean_tuned_vs_tuned        tuned against plain_ddp_tuned: both chose from the same settings
    geomean_vs_plain_ddp          tuned against plain DDP at the settings of the others; geomean_vs_plain_ddp_equal:
                                  ours against it; geomean_vs_plain_ddp_malloc and …_malloc_equal: against
                                  plain_ddp_malloc
    tuned_loss_difference_percent  by model: how much worse validation is after the same number of samples with the
                                  tuned settings than with those of the others (ours): the same start, order of samples
                                  and seeds. A negative log likelihood has no natural zero, so this is no share of the
                                  loss: a difference of d nats is a validation sample whose likelihood is lower by
                                  1 - exp(-d). Mean over seeds, of several batches the worst; ``cells`` has the least
                                  and largest over seeds, and all losses
    tuned_loss_difference_vs_plain_percent    the same against plain DDP, which draws samples in another order
    cells                         samples per second (median and quartiles), CPU milliseconds of a step (all processes),
                                  ratios, settings and losses of each model and batch
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frameworks.framework_process import FrameworkProcessError
from benchmarks.frameworks.protocol import Case
from benchmarks.frameworks.rounds import (
    FRAMEWORKS,
    LOCKSTEP,
    MALLOC,
    OTHER_DDP,
    OURS,
    SEARCH_SHARE,
    TUNED_PEER,
    Cell,
    Rounds,
)
from benchmarks.host import note, options_of, real_dataset, stop_on_signals, tell

MODELS, RANKS = ("tcn", "lstm", "transformer"), 2
LOSS_DIFFERENCES = {"tuned_loss_difference_percent": "ours", "tuned_loss_difference_vs_plain_percent": "plain_ddp"}
"""Keys of loss differences, and the framework that tuned is compared with."""
TUNED_AGAINST_TUNED = {"tuned_vs_tuned": "ratio", "tuned_vs_tuned_low": "low", "tuned_vs_tuned_high": "high"}
"""Keys of the ratio of both tuned trainings, and of its interval."""
PACKAGES = ("torch", "numpy", "lightning", "accelerate", "ray")
ROUNDS = 6
"""Rounds of a cell at most, of one interval of each framework."""
LOSS_SEEDS = 3
"""Seeds of the losses at the smallest batch."""
LEAST_JUDGED = 50
"""Fewest steps of a training whose loss is compared."""
CHOICE_SHARE = 0.25
"""Share of the remaining time that choosing the options of the others may take, once for each batch."""
CLOSING_SECONDS = 15.0
"""Part of the budget that is kept for the end of the benchmark."""


def interval(rounds: Sequence[Sequence[float]], draws: int = 2000) -> tuple[float, float, float]:
    """Return the geometric mean over cells of the median over rounds, and its 95 % interval by drawing rounds again."""
    chance = np.random.default_rng(0)
    logs = [np.log(values) for values in rounds]
    middle = float(np.mean([np.median(part) for part in logs]))
    drawn = [np.median(part[chance.integers(len(part), size=(draws, len(part)))], axis=1) for part in logs]
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return math.exp(middle), math.exp(low), math.exp(high)


def in_short(figures: tuple[float, float, float]) -> dict[str, float]:
    """Return a ratio and its interval, rounded, under their names."""
    return {name: round(value, 4) for name, value in zip(("ratio", "low", "high"), figures, strict=True)}


def describe(cell: Cell) -> dict[str, Any]:
    """Return the entry of one cell in the result."""
    global_batch = cell.case.batch * cell.case.ranks
    pace = {name: sorted(global_batch / seconds for seconds in cell.seconds(name)) for name in cell.measurements}
    cpu = {name: sum(part.cpu_seconds for part in parts) for name, parts in cell.measurements.items()}
    steps = {name: sum(part.steps for part in parts) for name, parts in cell.measurements.items()}
    against = {
        one: {
            other: in_short(interval([values]))
            for other in cell.measurements
            if other != one and (values := cell.ratios(one, other))
        }
        for one in OURS
    }
    vs_bound = {one: in_short(interval([values])) for one in pace if (values := cell.ratios(one, "bound"))}
    return {
        "model": cell.case.model,
        "batch_per_rank": cell.case.batch,
        "global_batch": global_batch,
        "steps_per_interval": cell.steps,
        "rounds": max(map(len, cell.measurements.values()), default=0),
        "peer_settings": cell.chosen,
        "tuned": cell.tuned,
        "samples_per_second": {
            name: dict(zip(("low", "median", "high"), np.quantile(values, (0.25, 0.5, 0.75)).round(0), strict=True))
            for name, values in pace.items()
        },
        "cpu_ms_per_step": {name: round(1000 * cpu[name] / steps[name], 3) for name in cpu},
        "vs_bound": {name: share for name, share in vs_bound.items() if name != "bound"},
        **{f"{one}_vs": ratios for one, ratios in against.items()},
        "validation_loss": {name: [round(loss, 5) for loss in losses] for name, losses in cell.losses.items()},
        **{key: loss_difference(cell.losses, other) for key, other in LOSS_DIFFERENCES.items()},
    }


def loss_difference(losses: Mapping[str, Sequence[float]], other: str) -> dict[str, float] | None:
    """Return by how many percent a validation sample is less likely with the tuned settings than with another's: the
    mean over seeds, the least and the largest; None where a loss is missing."""
    if not losses.get("tuned") or not losses.get(other):
        return None
    gaps = [tuned - theirs for tuned, theirs in zip(losses["tuned"], losses[other], strict=True)]
    return {
        name: round(100 * -math.expm1(-gap), 3)
        for name, gap in (("mean", statistics.fmean(gaps)), ("low", min(gaps)), ("high", max(gaps)))
    }


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the figures over all cells; a cell without measurements is left out."""
    result: dict[str, Any] = {}
    others = tuple(peer for peer in FRAMEWORKS if peer not in OTHER_DDP)
    rivals_of = {
        "min_vs_bound": ("bound",),
        "min_vs_bound_lockstep": (LOCKSTEP,),
        "min_vs_any_peer": others,
        f"min_vs_{MALLOC}": (MALLOC,),
    }
    for key, rivals in rivals_of.items():
        known = [
            (*interval([values]), cell.case.model, cell.case.batch, rival)
            for cell in cells
            for rival in rivals
            if (values := cell.ratios("ours", rival))
        ]
        if known:
            *figures, model, batch, rival = min(known)
            result[key] = round(figures[0], 4)
            result[f"{key}_where"] = {**in_short(figures), "model": model, "batch_per_rank": batch, "against": rival}
    for other in ("plain_ddp", MALLOC):
        for key, one in ((f"geomean_vs_{other}", "tuned"), (f"geomean_vs_{other}_equal", "ours")):
            rounds = [values for cell in cells if (values := cell.ratios(one, other))]
            if rounds:
                figures = in_short(interval(rounds))
                result |= {key: figures["ratio"], f"{key}_low": figures["low"], f"{key}_high": figures["high"]}
    if rounds := [values for cell in cells if (values := cell.ratios("tuned", TUNED_PEER))]:
        figures = in_short(interval(rounds))
        result |= {f"geomean_{name}": figures[key] for name, key in TUNED_AGAINST_TUNED.items()}
    for key, other in LOSS_DIFFERENCES.items():
        found: dict[str, list[float]] = {}
        for cell in cells:
            if (difference := loss_difference(cell.losses, other)) is not None:
                found.setdefault(cell.case.model, []).append(difference["mean"])
        if found:
            result[key] = {model: max(means) for model, means in found.items()}
    return result


def judged_steps(cell: Cell, options: argparse.Namespace) -> tuple[int, int]:
    """Return the steps of the trainings whose losses are compared, and the number of seeds. The number of samples is
    about that with the smallest batch, which alone has several seeds."""
    least = min(options.batches)
    steps = max(min(LEAST_JUDGED, options.loss_steps), options.loss_steps * least // cell.case.batch)
    return steps, LOSS_SEEDS if cell.case.batch == least else 1


def measure(rounds: Rounds, cell: Cell, options: argparse.Namespace, end: float, left: int) -> None:
    """Measure one model and batch completely; ``left``: number of cells, this one included, until ``end``."""
    began = time.monotonic()
    rounds.gather()
    rounds.measure_out(cell)
    now = time.monotonic()
    rounds.choose(cell, now + CHOICE_SHARE * (end - now))
    now = time.monotonic()
    share = max(0.0, end - now) / left
    note(f"  {cell.chosen} after {now - began:.0f} s; {share:.0f} s for what is left of this cell")
    until = now + share
    rounds.tune_peer(cell, now + SEARCH_SHARE * share / 2)
    cell.tuned = rounds.search(cell, now + SEARCH_SHARE * share)
    note(f"  tuned: {cell.tuned} after {time.monotonic() - began:.0f} s; {cell.steps} steps in an interval")
    steps, seeds = judged_steps(cell, options)
    reserved = rounds.judging_seconds(cell, steps, seeds) if steps else 0.0
    rounds.run(cell, ROUNDS, until - reserved)
    note(f"  rounds: {len(cell.measurements.get('ours', ()))} after {time.monotonic() - began:.0f} s")
    if steps:
        rounds.judge(cell, steps, seeds, until)
    note(f"  done after {time.monotonic() - began:.0f} s")


def measure_all(rounds: Rounds, cells: Sequence[Cell], options: argparse.Namespace, end: float) -> None:
    """Measure cell after cell until the time is up; a failure of one is recorded, and does not affect the others."""
    for number, cell in enumerate(cells):
        seconds = end - time.monotonic()
        if seconds <= 0:
            return
        last = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        note(f"cell {number + 1} of {len(cells)}: {cell.name}; all ends at about {last}, in {seconds:.0f} s")
        try:
            measure(rounds, cell, options, end, len(cells) - number)
        except (FrameworkProcessError, KeyError) as error:  # of the bound or ours, without which there are no ratios
            note(f"  {error}")
            rounds.failed[cell.name] = f"{type(error).__name__}: {error}"
            rounds.rest()
        except SystemExit:
            cell.missing.append("what came after a signal")
            raise


def lacking(cells: Sequence[Cell], names: Sequence[str], failed: Mapping[str, str], losses: bool) -> dict[str, Any]:
    """Return, by cell, the requested parts that are missing."""
    found = {
        cell.name: [
            *(name for name in names if cell.measurements and name not in cell.measurements),
            *(["everything"] if not cell.measurements else ["losses"] if losses and not cell.losses else []),
            *cell.missing,
            *(["what came after a failure"] if cell.name in failed else []),
        ]
        for cell in cells
    }
    return {cell: items for cell, items in found.items() if items}


def versions() -> dict[str, str]:
    """Return the versions of the frameworks that are installed."""
    known = {}
    for package in PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return the exit code of the signal that stopped it, else
    0."""
    parser = options_of("throughput", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 1024], help="samples per rank and step")
    parser.add_argument("--peers", nargs="*", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="others (installed)")
    parser.add_argument("--budget", type=float, default=720, metavar="SECONDS", help="longest total time (720)")
    parser.add_argument("--loss-steps", type=int, default=150, help="loss steps at the smallest batch; 0: none (150)")
    options = parser.parse_args(arguments)
    if min(options.batches) < 1:
        parser.error("--batches must be 1 or more")
    skipped = {
        peer: f"{package} is not installed: pip install 'dtrain[bench]'"
        for peer, package in FRAMEWORKS.items()
        if peer in options.peers and importlib.util.find_spec(package) is None
    } | {peer: "not asked for" for peer in FRAMEWORKS if peer not in options.peers}
    stop_on_signals()
    began = time.monotonic()
    end = began + options.budget - CLOSING_SECONDS
    names = ["bound", *OURS, *(peer for peer in FRAMEWORKS if peer not in skipped)]
    with tempfile.TemporaryDirectory(prefix="throughput-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        rounds = Rounds(names, RANKS, folder)
        dataset = real_dataset(folder).uri
        cells = [
            Cell(Case(model=model, batch=batch, ranks=RANKS, dataset=dataset, folder="", port=0))
            for batch in options.batches
            for model in options.models
        ]
        code = 0
        try:
            try:
                measure_all(rounds, cells, options, end)
            except SystemExit as stopped:
                code = int(stopped.code or 0)
            missing = lacking(cells, names, rounds.failed, bool(options.loss_steps))
            result = {
                "ranks": RANKS,
                "versions": versions(),
                "missing": missing,
                **summary(cells),
                "skipped": skipped,
                "failed": rounds.failed,
                "cells": [describe(cell) for cell in cells if cell.measurements],
                "seconds": round(time.monotonic() - began, 1),
            }
            tell("throughput", result, options.save and bool(result["cells"]))
        finally:
            rounds.close()
    return code


if __name__ == "__main__":
    sys.exit(main())

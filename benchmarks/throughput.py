"""Measure the speed of the same training with this project, with other frameworks, and at most: side by side, here.

Run `python -m benchmarks.throughput`. All frameworks train the same model on the same data (the bundled prices) with
the same loss, optimizer (fused AdamW), clipping and global batch. Each is a pair of processes of one thread, joined by
gloo on loopback, that trains an interval of steps when it is its turn and is stopped (SIGSTOP, with all that it has
started) when it is not. In each round every framework has one interval, in random order. No framework evaluates or
saves checkpoints.

    bound        the same step on batches that are in memory already: no input, no communication, two processes alike,
                 with malloc set as in ours (`trainer.runtime.host_memory.keep_freed_memory`)
    ours         the trainer as it is, with timing, reports, monitor and TensorBoard, at the settings of the others
    plain_ddp    PyTorch's DDP with Dataset, DataLoader, DistributedSampler
    lightning    Lightning's Trainer, barebones
    accelerate, ray     the plain loop, prepared by them
    plain_ddp_malloc    plain DDP, at the same settings, with malloc set as in ours. All others have the defaults of
                 glibc, as most people run them, which cost large batches page faults: the gain of ours over this one
                 does not come from malloc

Each of the others trains with its fastest options, found before, for each batch with the first model: 0, 1 or 2 workers
of its DataLoader, and DDP with or without gradient_as_bucket_view and static_graph. The rendezvous of Lightning,
Accelerate and Ray listens on all interfaces while this runs, as it always does.

``--budget`` is divided among the cells (a model and a batch): the part of a cell's share that the choice of options
leaves is for rounds, at most `ROUNDS`. Everything that a budget, a signal (SIGTERM, SIGINT) or a failure leaves out
is in ``missing``, by cell, and the line has ``partial``. A framework that fails misses that cell, and is started again
for the next one.

Ratios are medians over rounds of ratios within a round, with a 95 % interval (bootstrap over rounds); above 1 the first
one is faster. Frameworks that are not installed are in ``skipped``, those that failed in ``failed``.

    min_vs_bound                  ours against the bound: the lowest over models and batches
    min_vs_bound_lockstep         the same if each of the bound's steps had ended when it did on the later rank, with
                                  nothing exchanged (computed from its single steps): the limit of synchronous training
                                  where two cores are not equally fast at each moment
    min_vs_any_peer               ours against the fastest of the others at the same settings: the lowest, without
                                  plain_ddp_malloc; min_vs_plain_ddp_malloc: against that
    geomean_vs_plain_ddp_equal    ours against plain DDP; geomean_vs_plain_ddp_malloc_equal: against plain_ddp_malloc
    cells                         samples per second (median and quartiles), CPU milliseconds of a step (all processes),
                                  ratios and settings of each model and batch
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
    NEEDED,
    Cell,
    Rounds,
)
from benchmarks.host import in_short, interval, note, options_of, real_dataset, stop_on_signals, tell

MODELS, RANKS = ("tcn", "lstm", "transformer"), 2
PACKAGES = ("torch", "numpy", "lightning", "accelerate", "ray")
ROUNDS = 6
"""Rounds of a cell at most, of one interval of each framework."""
CHOICE_SHARE = 0.25
"""Share of the remaining time that choosing the options of the others may take, once for each batch."""
CLOSING_SECONDS = 15.0
"""Part of the budget that is kept for the end of the benchmark."""


def describe(cell: Cell) -> dict[str, Any]:
    """Return the entry of one cell in the result."""
    global_batch = cell.case.batch * cell.case.ranks
    pace = {name: sorted(global_batch / seconds for seconds in cell.seconds(name)) for name in cell.measurements}
    cpu = {name: sum(part.cpu_seconds for part in parts) for name, parts in cell.measurements.items()}
    steps = {name: sum(part.steps for part in parts) for name, parts in cell.measurements.items()}
    against = {
        other: in_short(interval([values]))
        for other in cell.measurements
        if other != "ours" and (values := cell.ratios("ours", other))
    }
    vs_bound = {one: in_short(interval([values])) for one in pace if (values := cell.ratios(one, "bound"))}
    return {
        "model": cell.case.model,
        "batch_per_rank": cell.case.batch,
        "global_batch": global_batch,
        "steps_per_interval": cell.steps,
        "rounds": max(map(len, cell.measurements.values()), default=0),
        "peer_settings": cell.chosen,
        "samples_per_second": {
            name: dict(zip(("low", "median", "high"), np.quantile(values, (0.25, 0.5, 0.75)).round(0), strict=True))
            for name, values in pace.items()
        },
        "cpu_ms_per_step": {name: round(1000 * cpu[name] / steps[name], 3) for name in cpu},
        "vs_bound": {name: share for name, share in vs_bound.items() if name != "bound"},
        "ours_vs": against,
    }


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the figures over all cells; a cell without measurements is left out."""
    result: dict[str, Any] = {}
    others = tuple(peer for peer in FRAMEWORKS if peer != MALLOC)
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
        if rounds := [values for cell in cells if (values := cell.ratios("ours", other))]:
            figures = in_short(interval(rounds))
            key = f"geomean_vs_{other}_equal"
            result |= {key: figures["ratio"], f"{key}_low": figures["low"], f"{key}_high": figures["high"]}
    return result


def measure(rounds: Rounds, cell: Cell, end: float, left: int) -> None:
    """Measure one model and batch completely; ``left``: number of cells, this one included, until ``end``."""
    began = time.monotonic()
    rounds.gather()
    rounds.measure_out(cell)
    now = time.monotonic()
    rounds.choose(cell, now + CHOICE_SHARE * (end - now))
    now = time.monotonic()
    share = max(0.0, end - now) / left
    note(f"  {cell.chosen} after {now - began:.0f} s; {share:.0f} s for what is left of this cell")
    rounds.run(cell, ROUNDS, now + share)
    note(f"  {len(cell.measurements.get('ours', ()))} rounds after {time.monotonic() - began:.0f} s")


def measure_all(rounds: Rounds, cells: Sequence[Cell], end: float) -> None:
    """Measure cell after cell until the time is up; a failure of one is recorded, and does not affect the others."""
    for number, cell in enumerate(cells):
        seconds = end - time.monotonic()
        if seconds <= 0:
            return
        last = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        note(f"cell {number + 1} of {len(cells)}: {cell.name}; all ends at about {last}, in {seconds:.0f} s")
        try:
            measure(rounds, cell, end, len(cells) - number)
        except (FrameworkProcessError, KeyError) as error:  # of the bound or ours, without which there are no ratios
            note(f"  {error}")
            rounds.failed[cell.name] = f"{type(error).__name__}: {error}"
            rounds.rest()
        except SystemExit:
            cell.missing.append("what came after a signal")
            raise


def lacking(cells: Sequence[Cell], names: Sequence[str], failed: Mapping[str, str]) -> dict[str, Any]:
    """Return, by cell, the requested parts that are missing."""
    found = {
        cell.name: [
            *(name for name in names if cell.measurements and name not in cell.measurements),
            *(["everything"] if not cell.measurements else []),
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
    names = [*NEEDED, *(peer for peer in FRAMEWORKS if peer not in skipped)]
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
                measure_all(rounds, cells, end)
            except SystemExit as stopped:
                code = int(stopped.code or 0)
            missing = lacking(cells, names, rounds.failed)
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

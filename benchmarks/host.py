"""Parts that benchmarks share: options, the line of JSON with its commit and machine, signals, failed parts, other work
beside, stolen processor time, intervals, and the dataset of the bundled prices. Nothing is measured here."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

if TYPE_CHECKING:
    from trainer.config import DatasetRef

RESULTS = Path(__file__).parent / "results"
"""Folder of the saved lines."""
_BEFORE = psutil.cpu_times()
"""Processor times of this machine when the benchmark began."""
_LOAD_BEFORE = os.getloadavg()[0]
BURN = """
import os, random, time
chance, parent = random.Random("beside {number}"), os.getppid()
while os.getppid() == parent:
    share, until = chance.uniform({low}, {high}), time.monotonic() + chance.uniform(5, 30)
    while time.monotonic() < until:
        rested = time.monotonic() + 0.02
        while time.monotonic() < rested - 0.02 * (1 - share): pass
        time.sleep(max(0.0, rested - time.monotonic()))
"""
"""A process that takes a share of a core, in pieces of 20 ms, until its parent is gone."""
QUIET_LOAD_PER_CORE = 0.75
"""Load per core, over the last minute, above which a machine that should be quiet has other work."""


def is_busy(load: float, cores: int | None = None) -> bool:
    """Return whether a machine of so many cores (default: this one) had too much other work at this load for seconds
    that are reported."""
    return load > QUIET_LOAD_PER_CORE * (cores or os.cpu_count() or 1)


def options_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options, with its docstring as the help and with ``--save``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=doc, formatter_class=raw)
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    return parser


@contextlib.contextmanager
def busy_beside(cores: float, seed: int | None = None) -> Iterator[None]:
    """Let processes take this many cores meanwhile, none of them more than one. With ``seed`` it is so many on average:
    at times none and at times twice as many, for 5 to 30 seconds each."""
    count = math.ceil(cores if seed is None else 2 * cores)
    low, high = (1.0, 1.0) if seed is None else (0.0, 2.0)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            share = cores / count
            program = BURN.format(number=(seed or 0) + number, low=low * share, high=high * share)
            started.append(subprocess.Popen([sys.executable, "-c", program]))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def real_dataset(folder: Path, **params: Any) -> DatasetRef:
    """Build a dataset of the bundled prices in ``folder``, with the default parameters but for these."""
    from dtrain_dagster.data.prices import write_prices  # the orchestrator's packages, which a node has not
    from dtrain_dagster.data.sharding import DatasetParams, build_dataset
    from dtrain_dagster.data.sources import price_source
    from dtrain_dagster.data.validation import validate_prices
    from trainer.config import DatasetRef

    prices = write_prices(price_source("sp500_panel"), f"{folder}/storage")
    built = build_dataset(prices, validate_prices(prices), f"{folder}/storage", DatasetParams(**params))
    return DatasetRef(uri=built.uri, dataset_id=built.dataset_id)


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


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def in_parts(parts: Mapping[str, Callable[[], dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all parts of a benchmark, and return their figures and, of those that failed, the reasons: the figures of the
    others are reported all the same. After a part that is stopped by a signal no other one begins."""
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, part in parts.items():
        if "stopped" in failed:
            failed[name] = "it was not begun"
            continue
        try:
            figures |= part()
        except SystemExit:
            failed |= {name: "it was stopped", "stopped": "by a signal"}
        except Exception as error:
            note(traceback.format_exc())
            failed[name] = f"{type(error).__name__}: {error}"
    return figures, failed


def stop_on_signals() -> None:
    """Make SIGTERM and SIGINT raise SystemExit. Only the first of them counts: the benchmark then reports its figures
    so far and ends its processes."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, stop)


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def stolen_percent(before: Any, after: Any) -> float | None:
    """Return the percentage of the processor time wanted between two ``psutil.cpu_times()`` that the host gave to other
    machines instead; None where the system does not count it. Ranks that wait for each other lose it as often as it is
    taken from any of them."""
    if not hasattr(after, "steal"):
        return None
    spent = {name: getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system", "steal")}
    wanted = sum(spent.values())
    return round(100 * spent["steal"] / wanted, 2) if wanted > 0 else 0.0


def lockstep(ranks: Sequence[Sequence[float]]) -> float:
    """Return the seconds that steps take if each ends on all ranks when it ends on the last of them. ``ranks``: of each
    rank, the seconds of its steps without any waiting."""
    return sum(map(max, zip(*ranks, strict=True)))


def tell(name: str, figures: Mapping[str, Any], save: bool, saved_as: str | None = None) -> None:
    """Print the one line on stdout, with date, commit, machine and load, and ``partial`` where something failed or is
    missing; if ``save``, write it to ``benchmarks/results/<saved_as or name>.json`` as well."""
    line = json.dumps(
        {
            "benchmark": name,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
            **({"partial": True} if figures.get("failed") or figures.get("missing") else {}),
            "load_before": round(_LOAD_BEFORE, 2),
            **figures,
            "load_after": round(os.getloadavg()[0], 2),
            "stolen_percent": stolen_percent(_BEFORE, psutil.cpu_times()),
        }
    )
    print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{saved_as or name}.json").write_text(line + "\n")


def _commit() -> str | None:
    """Return the commit of the files that were measured, with a + if some of them differ from it; None without git."""
    git, quiet = ["git", "-C", str(RESULTS.parent)], subprocess.DEVNULL
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=quiet).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], stderr=quiet)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())

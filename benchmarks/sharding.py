"""Measure building shards and reading random windows: rows/s, samples/s and peak memory, beside other tools.

Run `python -m benchmarks.sharding`. Prices are **synthetic** random walks in the shape of the default data (20 tickers
of 8,313 days), and 10 times as many tickers; with ``--sizes 1 10 100`` also 100 times, which takes 5 GB of disk and,
for pandas, more memory than most machines have. A measurement that fails, takes longer than ``--timeout`` or has no
time left in the ``--budget`` has the reason in its place and its key in ``missing``; the line then has ``partial``. A
signal (SIGTERM, SIGINT) ends the benchmark in the same way. Each measurement is a process of its own; the peak is its
resident set (VmHWM), imports included.

Sharding, from one long Parquet file, the same features by the same function:

    ours                   sort and check every cell, validate, features, checksummed shards, manifest
    ray                    the same, with ``DTRAIN_DATA_ENGINE=ray`` (only with ``--engine ray``): its start is counted,
                           and the peak is the sum over all its processes of their proportional sets (PSS), sampled
    pandas                 as most write it: read all, group by ticker, features, to_parquet; no checks, no manifest
    mosaic                 the same features, ticker by ticker, into MDSWriter, one row a sample (mosaicml-streaming);
                           it stops after two minutes, which give its rate (``share_done`` of the rows); the pass over
                           all prices that comes before makes it a little too low
    …_rows_per_second, …_peak_mb, …_cpu_seconds for each size

``--engine ray`` compares the two engines and leaves other tools and reading out; its result is saved apart, and
``same_bytes`` says whether their datasets are equal.

Reading batches of 1,024 random windows (60 x 8, and the target) from the smallest set, which fits in memory:

    ours                   memory-mapped arrays, all samples permuted; ours_blocks: with shuffle_block
    dataloader_N           torch Dataset over the arrays in memory, one window a call, DataLoader with N workers
    mosaic_N               StreamingDataset(shuffle=True) of windows stored one by one, DataLoader with N workers

Then, from the largest set, with a memory limit on the page cache of a quarter of the set (skipped where control groups
are not writable): limited_full, limited_blocks; and without it, from a cold cache: unlimited_…; both in samples/s.
``failed``: sizes of which a part was not even tried, and the reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.sharding_programs import BATCH, COLD, DAYS, READING, SHARDING, TICKERS, WINDOW, read_ours, write_walks

ROOT = Path(__file__).parents[1]
SECONDS = 6.0
"""Seconds of each reading."""
CLOSING_SECONDS = 10.0
"""Part of the budget that is kept for the end of the benchmark."""
PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "duckdb", "ray", "mosaicml-streaming")
"""Packages whose versions the result has."""
LEAST_LIMIT = 64 << 20
"""Smallest memory limit, in bytes: a batch and its bookkeeping must fit besides."""


def peak_mb() -> float:
    """Return the peak of resident memory of this process alone, in MB; ru_maxrss would begin with the peak of its
    parent."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


@contextlib.contextmanager
def peak_of_all() -> Iterator[list[float]]:
    """Yield a list that grows, while this process works, by the memory of it and of all that it started, in MB: each
    page is counted once (PSS), with shared memory. A sample takes a second or more."""
    samples, ended = [0.0], threading.Event()

    def sample() -> None:
        import psutil

        own = psutil.Process()
        while not ended.is_set():
            total = 0.0
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss / 2**20
            samples.append(total)
            ended.wait(1.0)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def be_a_step(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one measurement in this child process, and return its figures."""
    kind, _, what = name.partition(".")
    if kind == "shard":
        import pandas  # noqa: F401
        import pyarrow.parquet  # noqa: F401

        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, the kernel kills this process first
        imported = peak_mb()
        began, cpu = time.monotonic(), time.process_time()
        with peak_of_all() as all_mb:
            rows = SHARDING[what](folder)
        return {
            "rows": rows,
            "rows_per_second": round(rows / (time.monotonic() - began)),
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "peak_mb": round(peak_mb()), "imported_mb": round(imported), "peak_of_all_mb": round(max(all_mb)),
        }  # fmt: skip
    import torch

    torch.set_num_threads(1)
    if kind == "read":
        batches = READING[what](folder)
    else:
        if kind == "limited":
            import memory_group

            memory_group.join(Path(os.environ["DTRAIN_BENCH_GROUP"]))
        batches = read_ours(folder, COLD[what])
    x, y = unpack(next(batches))
    assert (tuple(x.shape), len(y)) == ((BATCH, WINDOW, 8), BATCH), (x.shape, y.shape)
    seen, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        seen += len(unpack(next(batches))[1])
    return {"samples_per_second": round(seen / (time.monotonic() - began)), "peak_mb": round(peak_mb())}


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return windows and target of a batch of any reader."""
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


class Measurements:
    """Runs measurements one after the other while there is time, and keeps their figures."""

    def __init__(self, seconds: float, timeout: float, budget: float) -> None:
        self.seconds, self.timeout = seconds, timeout
        self.began = time.monotonic()
        self.until = self.began + budget
        self.found: dict[str, Any] = {}

    def take(self, key: str, step: str, folder: Path, **environment: str) -> dict[str, Any]:
        """Run one measurement in a child process, and return its figures; ``step`` names it."""
        limit = min(self.timeout, self.until - time.monotonic())
        if limit < self.seconds:
            self.found[key] = {"failed": "no time was left for it"}
        else:
            self.found[key] = {"failed": "it was stopped"}  # replaced if it ends
            self.found[key] = run_step(step, folder, self.seconds, limit, **environment)
        sys.stderr.write(f"{time.monotonic() - self.began:4.0f} s: {key} {self.found[key]}\n")
        return self.found[key]

    @property
    def missing(self) -> list[str]:
        """Keys of the measurements that failed."""
        return [key for key, figures in self.found.items() if isinstance(figures, dict) and "failed" in figures]


def run_step(name: str, folder: Path, seconds: float, timeout: float, **environment: str) -> dict[str, Any]:
    """Run a measurement in a child process, and return its figures, or ``failed`` with the reason."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.sharding", "--step", name, "--folder", str(folder)]
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests/trainer"), os.environ.get("PYTHONPATH"))))
    step = subprocess.Popen(
        [*command, "--seconds", str(seconds)], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path} | environment,
    )  # fmt: skip
    try:
        said, complained = step.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {timeout:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)  # workers of a data loader, too
        step.wait()
    if step.returncode == -signal.SIGKILL:
        return {"failed": "it was killed: the kernel does that where memory ends"}
    if step.returncode:
        return {"failed": (complained.strip().splitlines() or [f"exit code {step.returncode}"])[-1][-300:]}
    return json.loads(said.splitlines()[-1])


def drop_cache(folder: Path) -> None:
    """Remove arrays from the page cache, so that reading begins cold and is counted for the process that reads."""
    os.sync()
    for path in folder.rglob("*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cold(measurements: Measurements, folder: Path) -> None:
    """Measure samples/s from a cold page cache, with and without a limit on it."""
    sys.path.insert(0, str(ROOT / "tests/trainer"))
    from memory_group import memory_group

    from trainer.data.shards import DataShardManager

    shards = DataShardManager(str(next((folder / "ours" / "datasets").glob("*"))), folder / "cache")
    size = sum((shards.folder / f"{name}.npy").stat().st_size for name in ("features", "target"))
    del shards
    measurements.found["read_mb"] = round(size / 1e6)
    for what in COLD:
        drop_cache(folder)
        measurements.take(f"unlimited_{what}", f"unlimited.{what}", folder)
        drop_cache(folder)
        with memory_group(max(size // 4, LEAST_LIMIT)) as group:
            if group is None:
                reason = "no control group with a memory limit can be made here"
                measurements.found[f"limited_{what}"] = {"skipped": reason}
            else:
                measurements.take(f"limited_{what}", f"limited.{what}", folder, DTRAIN_BENCH_GROUP=str(group))


def measure(measurements: Measurements, folder: Path, size: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Take all measurements on data of one of the sizes."""
    has_mosaic = importlib.util.find_spec("streaming") is not None
    if not has_mosaic:
        measurements.found["skipped"] = ["mosaicml-streaming is not installed"]
    here = folder / f"{size}x"
    here.mkdir()
    try:
        write_walks(here / "walks.parquet", TICKERS * size)
        for name in SHARDING:
            if name == "ray" or (name == "mosaic" and not has_mosaic):
                continue
            found = measurements.take(f"shard_{size}x_{name}", f"shard.{name}", here)
            if (share := found.pop("rows", DAYS * TICKERS * size) / (DAYS * TICKERS * size)) < 1:
                found["share_done"] = round(share, 3)
            for left in ("pandas.parquet", "mds"):
                path = here / left
                (shutil.rmtree if path.is_dir() else Path.unlink)(path) if path.exists() else None
        if size == min(sizes):
            for name in READING:
                if has_mosaic or not name.startswith("mosaic"):
                    measurements.take(f"read_{name}", f"read.{name}", here)
        if size == max(sizes):
            read_cold(measurements, here)
    finally:
        shutil.rmtree(here)
    return {}


def compare_engines(measurements: Measurements, folder: Path, size: int) -> dict[str, Any]:
    """Measure the two engines of data on data of one of the sizes; return whether their datasets are the same."""
    here = folder / f"{size}x"
    here.mkdir()
    try:
        write_walks(here / "walks.parquet", TICKERS * size)
        for name in ("ours", "ray"):
            measurements.take(f"shard_{size}x_{name}", f"shard.{name}", here).pop("rows", None)
        stored = [
            sorted(
                (path.relative_to(here / name).as_posix(), digest(path)) for path in (here / name).rglob("*.parquet")
            )
            for name in ("ours", "ray")
        ]
        measurements.found[f"same_bytes_{size}x"] = bool(stored[0]) and stored[0] == stored[1]
    finally:
        shutil.rmtree(here)
    return {}


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if it was stopped, else 0."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.sharding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10], help="multiples of the default data (1 10)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"seconds of each reading ({SECONDS:g})")
    parser.add_argument("--timeout", type=float, default=240, help="longest time of one measurement, in seconds (240)")
    parser.add_argument("--budget", type=float, default=690, metavar="SECONDS", help="longest total time (690)")
    parser.add_argument("--folder", help="folder of the data, on a disk with 5 GB (a temporary one)")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/sharding.json")
    parser.add_argument("--engine", choices=["duckdb", "ray"], default="duckdb", help="ray: compare the two engines")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        print(json.dumps(be_a_step(options.step, Path(options.folder), options.seconds)))
        return 0
    # Imported here because it imports torch, which the processes that make shards do without.
    from benchmarks.host import in_parts, stop_on_signals, tell

    stop_on_signals()
    load_before = os.getloadavg()[0]
    sizes = sorted(set(options.sizes))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="sharding-", ignore_cleanup_errors=True) as name:
        measurements = Measurements(options.seconds, options.timeout, options.budget - CLOSING_SECONDS)
        parts = {f"{size}x": partial(measure, measurements, Path(name), size, sizes) for size in sizes}
        if options.engine == "ray":
            parts = {f"{size}x": partial(compare_engines, measurements, Path(name), size) for size in sizes}
        _, failed = in_parts(parts)
    result = {
        "versions": {
            name: version(name)
            for name in ("torch", "numpy", "pandas", "pyarrow", "duckdb", "ray", "mosaicml-streaming")
        },
        "data": f"synthetic random walks, {TICKERS} tickers of {DAYS} days at 1x",
        "batch": BATCH,
        "missing": measurements.missing,
        **measurements.found,
        "failed": failed,
        "load_before": round(load_before, 2),
    }
    tell("sharding_engines" if options.engine == "ray" else "sharding", result, options.save)
    return int("stopped" in failed)


if __name__ == "__main__":
    sys.exit(main())

"""Trainings under load: many at once, one for very long, and one on a machine that others use up.

All train the stock model on the bundled prices, on the local cluster, as `trained_checkpoint` does.

    rss_slope_mb_per_hour   of all processes of a job of ``--minutes`` or ``--hours`` together: ranks, supervisor,
                            reaper. Theil and Sen's slope over medians of blocks of samples after warm-up, which is
                            the first quarter; ``…_error`` is half the width of its 95 % interval
    memory                  the same for each process, also of anonymous memory alone (``anon``, which nothing can take
                            back), and for the one that follows the job; with what each held at first and at last
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import theilslopes

from benchmarks.workplace import Workplace, note, tell
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.processes import marked
from dtrain_dagster.jobs import follow_job, start_job
from trainer.rundir import LAUNCH, RunDir

SAMPLE_SECONDS = 5.0
BLOCKS = 40
WARM_UP = 0.25
"""Of a run: libraries are opened, the first evaluations and checkpoints are made, buffers grow to their size."""
FOREVER = 10**6


def memory(place: Workplace, ranks: int, seconds: float) -> dict[str, Any]:
    """Train for so long, then end the job; how its processes' memory grew."""
    job = place.job("memory", ranks, epochs=FOREVER)
    rundir, manager = RunDir(job.run_dir), place.manager
    start_job(manager, job, ranks, 1, place.env)
    token = (rundir.read_json(LAUNCH) or {})["token"]
    samples: list[tuple[float, dict[str, dict[str, float]]]] = []
    began, sampled_at, told_at = time.monotonic(), 0.0, 0.0
    for status, progress in follow_job(manager, rundir, job.job_id):
        now = time.monotonic()
        if status.state.is_final:
            raise RuntimeError(f"the job ended by itself after {now - began:.0f} s: {status.state} {status.message}")
        if progress.step and now - sampled_at >= SAMPLE_SECONDS:
            sampled_at = now
            samples.append((now - began, held(token)))
        if now - told_at >= 60.0:
            told_at = now
            sizes = {name: round(size["rss"], 1) for name, size in samples[-1][1].items()} if samples else {}
            note(f"{now - began:.0f} s: step {progress.step}, {sizes} MB")
        if now - began >= seconds:
            break
    manager.cancel_job(job.job_id)
    state, steps = manager.job_status(job.job_id).state, progress.step
    found = growth(samples)
    return {
        "ended": state is JobState.CANCELLED and rundir.latest_checkpoint() is not None,
        "seconds": round(samples[-1][0], 1),
        "ranks": ranks,
        "steps": steps,
        "samples": len(samples),
        "event_files": len(rundir.storage.list("events")),
        **found,
    }


def held(token: str) -> dict[str, dict[str, float]]:
    """Megabytes of each process of the job, by its role, and of this one, which follows it."""
    found = {"follower": size_of(os.getpid())}
    supervisors = []
    for pid in marked(token):
        with contextlib.suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"dtrain_dagster.clusters.supervisor" in command:
                supervisors.append(pid)
                continue
            variables = dict(
                item.split(b"=", 1) for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in item
            )
            name = f"rank {int(variables[b'RANK'])}" if b"trainer" in command else f"other {pid}"
            found[name] = size_of(pid)
    for name, pid in zip(("reaper", "supervisor"), sorted(supervisors), strict=False):
        found[name] = size_of(pid)
    return found


def size_of(pid: int) -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[field].split()[0]) / 1024 for name, field in (("rss", "VmRSS"), ("anon", "RssAnon"))}


def growth(samples: Sequence[tuple[float, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Slopes of the whole job and of each process that was there throughout."""
    last = samples[-1][0]
    settled = [(at, sizes) for at, sizes in samples if at >= WARM_UP * last]
    names = set.intersection(*(set(sizes) for _, sizes in settled))
    series: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for at, sizes in settled:
        for name in names:
            series[name].append((at, sizes[name]["rss"], sizes[name]["anon"]))
        job = [size for name, size in sizes.items() if name != "follower"]
        series["job"].append((at, sum(size["rss"] for size in job), sum(size["anon"] for size in job)))
    by_name = {name: fitted(series[name]) for name in sorted(series)}
    return {
        "rss_slope_mb_per_hour": by_name["job"]["rss_slope_mb_per_hour"],
        "rss_slope_error": by_name["job"]["rss_slope_error"],
        "processes": by_name,
    }


def fitted(points: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    size = max(1, len(points) // BLOCKS)
    blocks = [points[first : first + size] for first in range(0, len(points) - size + 1, size)]
    hours = [statistics.median(at for at, *_ in block) / 3600 for block in blocks]
    found = {}
    for column, name in ((1, "rss"), (2, "anon")):
        values = [statistics.median(point[column] for point in block) for block in blocks]
        slope, _, low, high = theilslopes(values, hours)
        found |= {
            f"{name}_slope_mb_per_hour": round(float(slope), 3),
            f"{name}_slope_error": round(float(high - low) / 2, 3),
            f"{name}_first_mb": round(values[0], 1),
            f"{name}_last_mb": round(values[-1], 1),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of the run whose memory is watched (5)")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--ranks", type=int, default=2, help="of that run (2)")
    parser.add_argument("--only", choices=("memory",), help="one part of it")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the run directories, in this folder, which must be new")
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    options = parser.parse_args(arguments)
    seconds = 3600 * options.hours if options.hours else 60 * options.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="load-") as temporary:
        place = Workplace(Path(options.keep or temporary))
        try:
            found = memory(place, options.ranks, seconds)
        finally:
            place.manager.cleanup_cluster()  # whatever raises: nothing runs on
    figures = {
        "rss_slope_mb_per_hour": found["rss_slope_mb_per_hour"],
        "rss_slope_error": found["rss_slope_error"],
        "memory": found,
        "load_before": round(load_before, 2),
    }
    tell("load", figures, options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())

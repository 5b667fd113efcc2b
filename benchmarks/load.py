"""Measure trainings under load: many at once, one for hours, and one on a machine that other processes use up.

Run `python -m benchmarks.load`. All trainings train the stock model on the bundled prices, on the local cluster, as
`trained_checkpoint` does.

    jobs_ended, jobs_lost   of ``--jobs`` started at once: jobs that succeeded; jobs that lack something: the result,
                            weights with the digest that is reported, the last checkpoint, a step, a sample, an event,
                            the run in MLflow, a microsecond of the bill
    jobs                    figures of all of them, and how the machine was shared (``seconds`` of the first and the
                            last to end; ``fairness`` of their samples per second, 1 where all had the same)
    contention_same_weights whether a training ends with the weights (sha256) of an undisturbed one beside busy loops on
                            every core and a process that writes over ``--hog`` megabytes all the time, and, where
                            control groups can be made, with little more memory than it needs
    rss_slope_mb_per_hour   of all processes of a job of ``--minutes`` or ``--hours`` together: ranks, supervisor,
                            reaper. Theil and Sen's slope over medians of blocks of samples after warm-up, which is
                            the first quarter; ``…_error`` is half the width of its 95 % interval
    failed                  parts without figures, and the reasons
    memory                  the same for each process, also of anonymous memory alone (``anon``, which the kernel cannot
                            reclaim), and for the process that follows the job; with the first and the last size of each
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scipy.stats import theilslopes

from benchmarks.host import Workplace, in_parts, note, stop_on_signals, tell
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.costs.money import SECOND
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs.progress import follow_job, start_job
from trainer.config import JobConfig
from trainer.engine.finalize import MODEL, WEIGHTS
from trainer.node.processes import marked
from trainer.rundir import LAUNCH, RESULT, RunDir

SAMPLE_SECONDS = 5.0
"""Seconds between two samples of memory."""
BLOCKS = 40
"""Number of blocks into which the samples are divided before the slope is fitted."""
LEAST_SAMPLES = 5
"""Fewest samples after warm-up that give a slope."""
WARM_UP = 0.25
"""Share of a run that counts as warm-up: it opens libraries, makes the first evaluations and checkpoints, and lets
buffers grow to their size."""
FOREVER = 10**6
CGROUP = Path("/sys/fs/cgroup/memory/dtrain-load")
"""Control group of the training under contention."""
BUSY = "while True: pass"
HOG = """
import sys
held = bytearray(int(sys.argv[1]) << 20)
while True:
    for at in range(0, len(held), 4096):
        held[at] = (held[at] + 1) % 256
"""
"""Program that writes over its memory all the time."""


def measure_together(place: Workplace, count: int, steps: int) -> dict[str, Any]:
    """Start ``count`` jobs of one rank each at once, follow each as a Dagster run does, and return their figures."""
    jobs = [
        place.job(f"job-{number:02d}", 1, epochs=FOREVER, max_steps=steps, seed=number, checkpoint_frequency=20)
        for number in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one_of_many, place, job) for job in jobs]
        try:
            errors = [future.exception() for future in futures]
        except SystemExit:
            place.manager.cleanup_cluster()  # the pool waits for its threads, and these for the end of the jobs
            raise
    found = [lost_job(error) if error else future.result() for future, error in zip(futures, errors, strict=True)]
    rates = [row["samples_per_second"] for row in found]
    squares = sum(rate**2 for rate in rates)
    there = [job for job, row in zip(jobs, found, strict=True) if row["state"]]
    usage = [stay for job in there for stay in place.manager.node_usage(job.job_id)]
    whole = sum(round((stay.ended_at - stay.started_at) * SECOND) for stay in usage)
    billed = sum(node.microseconds for job in there for node in bill(place, job).nodes)
    lost = sum(bool(row["lacks"]) for row in found)
    return {
        "jobs_ended": sum(row["state"] == JobState.SUCCEEDED for row in found),
        "jobs_lost": lost + (abs(whole - billed) > len(usage)),  # each stay is rounded to the microsecond once
        "jobs": {
            "count": count,
            "steps": steps,
            "seconds": [min(row["seconds"] for row in found), max(row["seconds"] for row in found)],
            "fairness": round(sum(rates) ** 2 / (len(rates) * squares), 4) if squares else None,
            "node_seconds": round(billed / SECOND, 1),
            "lacks": {job.job_id: row["lacks"] for job, row in zip(jobs, found, strict=True) if row["lacks"]},
        },
    }


def bill(place: Workplace, job: JobConfig) -> CostTracker:
    """Return the cost tracker of a job that has ended."""
    return CostTracker(place.manager.cluster_name, place.manager.node_usage(job.job_id), "dedicated")


def lost_job(error: BaseException) -> dict[str, Any]:
    """Return the row of a job that could not be started, or not be followed to its end."""
    return {"state": None, "seconds": 0.0, "samples_per_second": 0.0, "lacks": [f"{type(error).__name__}: {error}"]}


def one_of_many(place: Workplace, job: JobConfig) -> dict[str, Any]:
    """Start one job and follow it to its end; return its row: state, seconds, samples per second, missing parts."""
    rundir, began = RunDir(job.run_dir), time.monotonic()
    start_job(place.manager, job, 1, 1, place.env)
    followed: list[dict[str, Any]] = []
    for status, _ in follow_job(place.manager, rundir, job.job_id, take=followed.extend):
        last = status
    seconds = time.monotonic() - began
    note(f"{job.job_id}: {last.state} after {seconds:.0f} s")
    steps = [item for item in followed if item["kind"] == "step"]
    rate = statistics.median(item["samples_per_second"] for item in steps) if steps else 0.0
    lacks = find_lacking(rundir, job, followed)
    return {"state": last.state, "seconds": round(seconds, 1), "samples_per_second": rate, "lacks": lacks}


def find_lacking(rundir: RunDir, job: JobConfig, followed: Sequence[dict[str, Any]]) -> list[str]:
    """Return the parts that a training must leave behind and that are missing."""
    result, training = rundir.read_json(RESULT) or {}, job.training
    model, steps = rundir.read_json(MODEL) or {}, training.max_steps or 0
    weights = hashlib.sha256(rundir.storage.read(WEIGHTS)).hexdigest() if rundir.storage.exists(WEIGHTS) else ""
    reported = [item["step"] for item in followed if item["kind"] == "step"]
    expected = sorted({*range(training.log_frequency, steps + 1, training.log_frequency), steps})
    on_disk = list(rundir.events())
    is_there = {
        "result": result.get("status") == "succeeded" and result.get("steps") == steps,
        "weights": bool(weights) and weights == model.get("file_sha256"),
        "last checkpoint": (rundir.latest_checkpoint() or ("", 0))[1] == steps,
        "steps": sorted(reported) == expected,
        "samples": result.get("samples_seen") == steps * training.global_batch_size,
        "events": sorted(map(str, followed)) == sorted(map(str, on_disk)) and bool(on_disk),
        "run in MLflow": is_tracked(job),
    }
    return [name for name, there in is_there.items() if not there]


def is_tracked(job: JobConfig) -> bool:
    """Return whether the job's run in MLflow exists, has ended, and has its last step."""
    from mlflow import MlflowClient

    run_id = (RunDir(job.run_dir).read_json(RESULT) or {}).get("mlflow_run_id")
    if run_id is None:
        return False
    client = MlflowClient(job.tracking.mlflow_tracking_uri)
    run = client.get_run(run_id)
    steps = {metric.step for name in run.data.metrics for metric in client.get_metric_history(run_id, name)}
    return run.info.status == "FINISHED" and max(steps, default=0) == job.training.max_steps


def contention(place: Workplace, ranks: int, steps: int, hog_mb: int) -> dict[str, Any]:
    """Train alone and beside a crowd, and return whether the weights are equal, with the figures of both trainings."""
    alone = trained(place, place.job("alone", ranks, epochs=FOREVER, max_steps=steps), ranks, limit_mb=None)
    limit = round(1.15 * alone["anon_mb"]) if alone["anon_mb"] else None
    with crowd(hog_mb):
        crowded = trained(place, place.job("crowded", ranks, epochs=FOREVER, max_steps=steps), ranks, limit)
    same = alone["weights_sha256"] is not None and alone["weights_sha256"] == crowded["weights_sha256"]
    figures = {"steps": steps, "hog_mb": hog_mb, "alone": alone, "crowded": crowded}
    return {"contention_same_weights": same, "contention": figures}


def trained(place: Workplace, job: JobConfig, ranks: int, limit_mb: int | None) -> dict[str, Any]:
    """Train a job within a memory limit, and return its state, seconds, digest of weights and peak of anonymous
    memory."""
    rundir, began = RunDir(job.run_dir), time.monotonic()
    with memory_group(limit_mb) as group:
        start_job(place.manager, job, ranks, 1, place.env)  # its processes start in the group and stay there
    peak = 0
    for status, _ in follow_job(place.manager, rundir, job.job_id):
        if group is not None:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            peak = max(peak, int(stat["rss"]))
        last = status
    note(f"{job.job_id}: {last.state} after {time.monotonic() - began:.0f} s {last.message}")
    return {
        "state": last.state,
        "seconds": round(time.monotonic() - began, 1),
        "weights_sha256": (rundir.read_json(RESULT) or {}).get("weights_sha256"),
        "anon_mb": round(peak / 2**20) or None,
        "limit_mb": limit_mb,
        "limit_was_met": int((group / "memory.failcnt").read_text()) if group and limit_mb else None,
    }


@contextlib.contextmanager
def memory_group(limit_mb: int | None) -> Iterator[Path | None]:
    """Put processes that are started within into a control group with this memory limit; yield None where none can be
    made."""
    if not os.access(CGROUP.parent / "cgroup.procs", os.W_OK):
        yield None
        return
    with contextlib.suppress(OSError):  # an earlier training may have left it
        CGROUP.rmdir()
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.limit_in_bytes").write_text(str(limit_mb << 20) if limit_mb else "-1")
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    home = CGROUP.parent / own.partition(":memory:")[2].lstrip("/")
    (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield CGROUP
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def crowd(hog_mb: int) -> Iterator[None]:
    """Run two busy loops on every core, and a process that writes over ``hog_mb`` megabytes all the time."""
    programs = [("-c", BUSY)] * (2 * (os.cpu_count() or 1)) + [("-c", HOG, str(hog_mb))]
    others = [subprocess.Popen([sys.executable, *arguments]) for arguments in programs]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def memory(place: Workplace, ranks: int, seconds: float) -> dict[str, Any]:
    """Train for ``seconds``, then end the job, and return how the memory of its processes grew."""
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
    details = {
        "ended": state is JobState.CANCELLED and rundir.latest_checkpoint() is not None,
        "seconds": round(samples[-1][0], 1),
        "ranks": ranks,
        "steps": steps,
        "samples": len(samples),
        "event_files": len(rundir.storage.list("events")),
        **found,
    }
    return {**{name: found[name] for name in ("rss_slope_mb_per_hour", "rss_slope_error")}, "memory": details}


def held(token: str) -> dict[str, dict[str, float]]:
    """Return the megabytes of each process of the job, by its role, and of this process, which follows it."""
    found = {"follower": folder_size(os.getpid())}
    supervisors = []
    for pid in marked(token):
        with contextlib.suppress(OSError):  # the process may have just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"dtrain_dagster.clusters.supervise" in command:
                supervisors.append(pid)
                continue
            variables = dict(
                item.split(b"=", 1) for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in item
            )
            name = f"rank {int(variables[b'RANK'])}" if b"trainer" in command else f"other {pid}"
            found[name] = folder_size(pid)
    for name, pid in zip(("reaper", "supervisor"), sorted(supervisors), strict=False):
        found[name] = folder_size(pid)
    return found


def folder_size(pid: int) -> dict[str, float]:
    """Return resident and anonymous memory of a process, in MB."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[field].split()[0]) / 1024 for name, field in (("rss", "VmRSS"), ("anon", "RssAnon"))}


def growth(samples: Sequence[tuple[float, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Return the slopes of the whole job and of each process that lived throughout; raise RuntimeError if there are too
    few samples."""
    last = samples[-1][0] if samples else 0.0
    settled = [(at, sizes) for at, sizes in samples if at >= WARM_UP * last]
    if len(settled) < LEAST_SAMPLES:
        raise RuntimeError(f"{len(settled)} samples make no slope: watch the memory for more --minutes")
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
    """Return slope, its error, first and last size of resident and anonymous memory, from points (seconds, MB, MB)."""
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
    """Run the benchmark with these command-line arguments; return 1 if a part failed or a job lacks something, else
    0."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="duration of the run whose memory is measured (2)")
    parser.add_argument("--hours", type=float, help="the same duration in hours")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of that run (2)")
    parser.add_argument("--jobs", type=int, default=10, help="jobs that are started at once (10)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each of these jobs, and under contention (60)")
    parser.add_argument("--hog", type=int, default=2048, metavar="MB", help="size of the other process (2048)")
    parser.add_argument("--only", choices=("jobs", "contention", "memory"), help="only this part, with its own result")
    parser.add_argument("--budget", type=float, default=0, metavar="SECONDS", help="stops it after this time (never)")
    parser.add_argument("--keep", metavar="FOLDER", help="new folder in which the run directories are kept")
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    options = parser.parse_args(arguments)
    seconds = 3600 * options.hours if options.hours else 60 * options.minutes
    stop_on_signals(options.budget)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="load-") as temporary:
        place = Workplace(Path(options.keep or temporary))
        try:
            parts = {
                "jobs": lambda: measure_together(place, options.jobs, options.steps),
                "contention": lambda: contention(place, 2, options.steps, options.hog),
                "memory": lambda: memory(place, options.ranks, seconds),
            }
            figures, failed = in_parts({name: parts[name] for name in parts if options.only in (None, name)})
        finally:
            place.manager.cleanup_cluster()  # after an exception, too: no process is left running
            with contextlib.suppress(OSError):  # it was not made, or its last process has not ended yet
                CGROUP.rmdir()
    name = f"load_{options.only}" if options.only else "load"
    tell(name, {**figures, "failed": failed, "load_before": round(load_before, 2)}, options.save)
    wrong = failed or figures.get("jobs_lost") or figures.get("jobs_ended", options.jobs) < options.jobs
    return int(bool(wrong) or not figures.get("contention_same_weights", True))


if __name__ == "__main__":
    sys.exit(main())

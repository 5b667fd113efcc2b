"""Many jobs on disk: synthetic run directories, as a cluster of two nodes and the trainer leave them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

HOUR = 3600.0


def write_jobs(jobs: Path, count: int, now: float) -> None:
    """Write ``count`` jobs that ended, one an hour, without fsync: they need not outlive a power cut."""
    events = "".join(json.dumps(item) + "\n" for item in told(0, 40, now))
    for number in range(1, count + 1):
        job_id, ended = f"train-{number % 97:08x}-{number:08x}", now - number * HOUR
        times = {"started_at": ended - HOUR, "ended_at": ended}
        state = "failed" if number % 20 == 0 else "succeeded"
        write_job(jobs / job_id, job_id, events, times, state)


def write_job(folder: Path, job_id: str, events: str, times: dict[str, Any], state: str) -> None:
    """Write a run directory, without checkpoints and predictions."""
    (folder / "nodes").mkdir(parents=True)
    (folder / "events").mkdir()
    launch = {"job_id": job_id, "node_count": 2, "launch": 1, "sku": "Standard_NC6s_v3",
              "submitted_at": times["started_at"]}  # fmt: skip
    files: dict[str, Any] = {
        "job.json": {"job_id": job_id, "run_dir": str(folder), "model": {"factory": "tcn"}, "training": {}},
        "launch.json": launch,
        "plan.json": {"tier": "dedicated", "synthetic": True},
        "status.json": {"job_id": job_id, "state": state, "message": "", "launch": 1, **times},
    }
    for node in range(2):
        files[f"nodes/l0001-n{node:03d}-s001.json"] = {
            "node_id": node, "launch": 1, "last_seen_at": times["ended_at"] or time.time(), "exit_codes": [], **times,
        }  # fmt: skip
    if times["ended_at"] is not None:
        files["result.json"] = {"status": state, "launch": 1, "steps": 1000}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "events/g0001-r00000-000001.jsonl").write_text(events)


def told(first: int, count: int, now: float) -> list[dict[str, Any]]:
    """Return ``count`` reports, from number ``first`` on, of a training on two nodes."""
    events: list[dict[str, Any]] = []
    for number in range(first, first + count):
        at, step = now + number, 5 * (number + 1)
        base = {"time": at, "rank": 0, "generation": 1}
        events.append({
            **base, "kind": "step", "step": step, "epoch": 0, "loss": 2 + math.exp(-number / 20), "learning_rate": 1e-3,
            "grad_norm": 0.7, "samples_per_second": 4000.0, "step_seconds": 0.2, "eta_seconds": 100.0,
        })  # fmt: skip
        events += [
            {**base, "kind": "node", "rank": node, "node_id": node, "step": step, "samples_per_second": 2000.0,
             "cpu_percent": 40.0 + node, "memory_percent": 2.0, "memory_used_bytes": 4e8}
            for node in range(2)
        ]  # fmt: skip
    return events

"""Events of a training on three nodes as trainers write them: steps, samples of nodes, timings, and what went wrong."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from trainer.config import DatasetRef, JobConfig
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir

START = 1_790_000_000.0
WINDOW = 5
"""Steps per report."""
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def told(windows: int, slow: int = 1, first: int = 0, gpus: bool = False) -> list[dict[str, Any]]:
    """So many reports of a training whose node ``slow`` is late by 50 ms, each beside samples of the nodes."""
    events: list[dict[str, Any]] = []
    for number in range(first, first + windows):
        step, at = WINDOW * (number + 1), START + number
        events += [
            event("step", at, step=step, epoch=0, loss=2 + math.exp(-number / 20), learning_rate=1e-3, grad_norm=0.7,
                  samples_per_second=4000.0, step_seconds=0.2, eta_seconds=0.2 * (10_000 - step)),
            timing(step, at, slow),
            *(sample(node, step, at, gpus) for node in range(3)),
        ]  # fmt: skip
    return events


def event(kind: str, at: float, rank: int = 0, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": at, "rank": rank, "generation": generation, **fields}


def timing(step: int, at: float, slow: int) -> dict[str, Any]:
    wait = [0.0 if node == slow else 0.05 for node in range(3)]
    segments = {
        "input": [0.004 + (0.05 if node == slow else 0.0) for node in range(3)],
        "forward": [0.05] * 3, "backward": [0.08] * 3, "communication": [0.012] * 3, "waiting": wait,
        "optimizer": [0.006] * 3, "checkpoint": [0.001, 0.0, 0.0], "other": [0.002, 0.003, 0.003],
    }  # fmt: skip
    collectives = [
        {"name": name, "bytes": size, "wire_seconds": 0.006, "waiting_seconds": wait,
         "overlapped_seconds": [0.004] * 3, "bandwidth_bytes_per_second": 4 / 3 * size / 0.006}
        for name, size in (("bucket 0", 1 << 20), ("bucket 1", 1 << 19), ("commit", 64))
    ]  # fmt: skip
    return event(
        "timing", at, step=step, steps=WINDOW, seconds=0.2, nodes=[0, 1, 2], samples=[256] * 3, segments=segments,
        typical={"input": segments["input"], "compute": [0.136] * 3, "late": [0.05 - value for value in wait]},
        collectives=collectives, topology="all-reduce", backend="gloo", device="cpu",
        local_samples_per_micro_batch=128, micro_batches=6, parameters_bytes=3 << 19,
    )  # fmt: skip


def sample(node: int, step: int, at: float, gpus: bool = False) -> dict[str, Any]:
    gpu = {"gpu_utilization": 90.0 - node, "gpu_memory_used_bytes": 8e9, "gpu_memory_percent": 50.0,
           "gpu_temperature_celsius": 61.0 + node, "gpu_power_watts": 240.0}  # fmt: skip
    card = {"index": 0, "utilization": 90.0 - node, "memory_used_bytes": 8e9, "memory_total_bytes": 16e9,
            "temperature_celsius": 61.0 + node, "power_watts": 240.0}  # fmt: skip
    return event(
        "node", at, rank=node, node_id=node, epoch=0, step=step, samples_per_second=1300.0 + node, loss=2.0,
        learning_rate=1e-3, grad_norm=0.7, hostname=f"host-{node}", cpu_percent=40.0 + node, memory_used_bytes=4e8,
        memory_percent=2.0, disk_used_percent=55.0, disk_read_bytes_per_second=1e5, disk_written_bytes_per_second=2e5,
        bytes_sent_per_second=1e6, bytes_received_per_second=1e6, gpus=[card] if gpus else [],
        **(gpu if gpus else dict.fromkeys(gpu)),
    )  # fmt: skip


def membership(generation: int, at: float, nodes: list[int], lost: list[int], joined: list[int]) -> dict[str, Any]:
    return event(
        "membership", at, generation=generation, world_size=len(nodes), nodes=nodes, lost=lost, joined=joined,
        topology="mesh", reason="node 2 does not answer", attempt=0, step=40, seconds=1.25,
    )  # fmt: skip


def hang(at: float, operation: str = "all-reduce of bucket 1") -> dict[str, Any]:
    recent = [{"sequence": 7, "what": "bucket 0", "ended": True}]
    return event(
        "hang", at, rank=1, step=41, node_id=1, operation=operation, sequence=8, waited_seconds=31.0, stacks="…",
        recent=recent,
    )  # fmt: skip


def write_run(jobs: Path | str, job_id: str, events: list[dict[str, Any]], state: str = "running") -> RunDir:
    """A run directory as a cluster and a trainer leave it."""
    rundir = RunDir(f"{jobs}/{job_id}")
    rundir.write_job(JobConfig(job_id=job_id, run_dir=rundir.uri, dataset=DatasetRef(uri="nowhere")))
    ended_at = time.time() if state != "running" else None
    started_at = time.time() - 3600
    rundir.write_json(
        "status.json", {"state": state, "started_at": started_at, "ended_at": ended_at, "message": "", "launch": 1}
    )
    rundir.write_json("plan.json", {"tier": "dedicated", "price_words": "list price, not the bill"})
    for node in range(3):
        stay = NodePresence(node_id=node, launch=1, started_at=started_at, ended_at=ended_at, last_seen_at=time.time())
        rundir.write_node(stay)
    rundir.append_events(1, 0, 1, events)
    return rundir

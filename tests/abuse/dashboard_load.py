"""The dashboard with many jobs on disk and many browsers that each ask every two seconds, as the page does.

The jobs are synthetic run directories, as a cluster of two nodes and the trainer leave them; one of them is live and
gets events all the time. The server is `dtrain ui jobs` in a process of its own. Each browser has the list of all jobs
open, and a job: half of them the live one, the others each a different one that has ended. The first seconds, in which
all pages are opened, are reported separately.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LIVE = "train-11111111-live0000"
"""Id of the job that trains."""
EVERY_SECONDS = 2.0
"""Seconds between two requests of a browser."""
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


class LiveJob:
    """A job that trains, as far as its run directory shows: it gets a file of events every second."""

    def __init__(self, jobs: Path) -> None:
        self.folder = jobs / LIVE
        write_job(self.folder, LIVE, "", {"started_at": time.time(), "ended_at": None}, "running")
        (self.folder / "launch.json").unlink()  # no supervisor holds its lock
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def _write(self) -> None:
        number = 0
        while not self.ends.wait(1.0):
            number += 1
            text = "".join(json.dumps(item) + "\n" for item in told(number, 1, time.time() - number))
            made = self.folder / f"events/g0001-r00000-{number + 1:06d}.jsonl"
            made.with_suffix(".tmp").write_text(text)
            made.with_suffix(".tmp").rename(made)


@dataclass
class Browser:
    """A page of the dashboard, without its drawing."""

    port: int
    job_id: str
    opening: float = 0.0
    polls: list[float] = field(default_factory=list)
    errors: int = 0
    unchanged: int = 0
    _tags: dict[str, str] = field(default_factory=dict)
    _place: tuple[int, str] = (0, "")
    _connection: http.client.HTTPConnection | None = None

    def run(self, begins: float, ends: float, rest: threading.Event) -> None:
        """Open the page at ``begins``, then ask every two seconds until ``ends`` (both of `time.monotonic`)."""
        rest.wait(max(0.0, begins - time.monotonic()))
        began = time.monotonic()
        page = f"/jobs/{self.job_id}"
        for path in ("/", "/dashboard.css", "/jobs.js", page, "/job.css", "/plotly.js", "/job_charts.js", "/job.js"):
            self._get(path)
        self._poll()
        self._get(f"{page}/facts.json")
        self.opening = time.monotonic() - began
        while not rest.wait(EVERY_SECONDS):  # once at least, however long a busy machine took to open the page
            began = time.monotonic()
            self._poll()
            self.polls.append(time.monotonic() - began)
            if time.monotonic() >= ends:
                break

    def _poll(self) -> None:
        self._get("/", "list")
        body = self._get(f"/jobs/{self.job_id}.json?since={self._place[0]}&token={self._place[1]}", "job")
        if body:
            found = json.loads(body)
            self._place = (found["version"], found["token"])

    def _get(self, path: str, kept: str = "") -> bytes:
        headers = {"Accept-Encoding": "gzip", "Host": "127.0.0.1", "Sec-Fetch-Site": "same-origin"}
        if self._tags.get(kept):
            headers["If-None-Match"] = self._tags[kept]
        try:
            self._connection = self._connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            self._connection.request("GET", path, headers=headers)
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection, self.errors = None, self.errors + 1
            return b""
        if answer.status == 304:
            self.unchanged += 1
            return b""
        self.errors += answer.status != 200
        if kept:
            self._tags[kept] = answer.headers.get("ETag", "")
        if answer.headers.get("Content-Encoding") == "gzip" and kept:
            import gzip

            body = gzip.decompress(body)
        return body if answer.status == 200 else b""


def start_server(home: Path) -> tuple[subprocess.Popen[str], int]:
    """Start `dtrain ui jobs` over this home, and return its process and port."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    command = [sys.executable, "-c", "from dtrain_dagster.cli.main import main; main()", "ui", "jobs", "--port", "0"]
    process = subprocess.Popen(
        command, env=environment | {"DTRAIN_HOME": str(home)}, stdout=subprocess.PIPE, text=True, cwd=home
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().strip().rstrip("/").rsplit(":", 1)[-1])


def complete_list(port: int, limit_seconds: float = 300.0) -> int:
    """Wait until the server has read all run directories, and return the number of jobs that it lists."""
    ends = time.monotonic() + limit_seconds
    while time.monotonic() < ends:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_seconds)
        connection.request("GET", "/")
        page = connection.getresponse().read().decode()
        connection.close()
        found = re.search(r"([\d,]+) jobs?\b", page)
        if found and "not read yet" not in page:
            return int(found[1].replace(",", ""))
        time.sleep(0.2)
    raise TimeoutError("the list was not read in time")


def percentile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(jobs: int, browsers: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one run; everything is made in a temporary folder and removed.

    ``poll_seconds_p95``: of the list and the job together, after all pages were opened. ``opening_seconds_max``: the
    slowest first load of the pages. ``list_seconds_cold``: from starting the server to a complete list.
    ``memory_mib``: of the server, once all pages are open, and at the end.
    """
    home = Path(tempfile.mkdtemp(prefix="dtrain-dashboard-"))
    rest = threading.Event()
    live = process = None
    try:
        folder = home / "storage" / "jobs"
        write_jobs(folder, jobs, time.time())
        live = LiveJob(folder)
        began = time.monotonic()
        process, port = start_server(home)
        listed = complete_list(port)
        cold = time.monotonic() - began
        chance = random.Random(seed)
        past = chance.sample(range(1, jobs + 1), min(jobs, browsers))
        pages = [
            Browser(
                port=port,
                job_id=LIVE if number % 2 == 0 else f"train-{past[number] % 97:08x}-{past[number]:08x}",
            )
            for number in range(browsers)
        ]
        server = psutil.Process(process.pid)
        start = time.monotonic()
        ends = start + seconds
        threads = [
            threading.Thread(target=page.run, args=(start + EVERY_SECONDS * number / browsers, ends, rest))
            for number, page in enumerate(pages)
        ]
        for thread in threads:
            thread.start()
        while any(not page.opening for page in pages) and time.monotonic() < ends:
            time.sleep(0.1)
        opened, used = time.monotonic() - start, server.cpu_times()
        at, memory = time.monotonic(), [server.memory_info().rss / 2**20]
        while time.monotonic() < ends:
            time.sleep(1.0)
            memory.append(server.memory_info().rss / 2**20)
        busy = sum(server.cpu_times()[:2]) - sum(used[:2])
        wall = time.monotonic() - at
        for thread in threads:
            thread.join()
        polls = [poll for page in pages for poll in page.polls]
        return {
            "jobs": listed,
            "browsers": browsers,
            "seconds": seconds,
            "polls": len(polls),
            "poll_seconds_p50": round(percentile(polls, 0.5), 4),
            "poll_seconds_p95": round(percentile(polls, 0.95), 4),
            "poll_seconds_max": round(max(polls), 4),
            "opening_seconds_max": round(max(page.opening for page in pages), 3),
            "all_open_seconds": round(opened, 2),
            "list_seconds_cold": round(cold, 2),
            "memory_mib": [round(memory[0], 1), round(memory[-1], 1)],
            "memory_mib_max": round(max(memory), 1),
            "busy_cores": round(busy / wall, 3),
            "unchanged_answers": sum(page.unchanged for page in pages),
            "errors": sum(page.errors for page in pages),
        }
    finally:
        rest.set()
        if live is not None:
            live.ends.set()
            live.thread.join()
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(home, ignore_errors=True)

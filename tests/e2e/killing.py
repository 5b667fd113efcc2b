"""Processes of nodes, and a thread that ends some of them once a training has come to a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from trainer.rundir import RunDir


def node_processes(home: Path, node: int | None) -> list[psutil.Process]:
    """The trainer's processes of one node, or of all, of jobs under this home."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "trainer" not in line or not any(str(home) in part and "/train-" in part for part in line):
            continue
        with suppress(psutil.Error):  # it has ended since
            if node is None or process.environ().get("NODE_RANK") == str(node):
                found.append(process)
    return found


def job_folder(home: Path) -> Path:
    [folder] = (home / "storage" / "jobs").glob("train-*")
    return folder


class Killer(threading.Thread):
    """Waits until a training has come to a step, then sends a signal to a node, or to all; so often, in as many
    launches."""

    def __init__(
        self, home: Path, node: int | None, step: int, number: signal.Signals = signal.SIGKILL, times: int = 1
    ) -> None:
        super().__init__(daemon=True)
        self.home, self.node, self.step, self.number, self.times, self.killed = home, node, step, number, times, 0
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            time.sleep(0.2)
            folders = list((self.home / "storage" / "jobs").glob("train-*"))
            if not folders or not any(event["step"] >= self.step for event in RunDir(str(folders[0])).events("step")):
                continue
            groups = {os.getpgid(process.pid) for process in node_processes(self.home, self.node)}
            if not groups or (self.killed and len(groups) < 2):
                continue  # those of the next launch are not all there yet
            for group in groups:
                os.killpg(group, self.number)
            self.killed += len(groups)
            self.times -= 1
            if not self.times:
                return

"""Three nodes as process groups under the real supervisor, to be disturbed: on loopback, or each in its namespace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dtrain_dagster.clusters import presence
from harness.faults import preload
from harness.faults.network import Network
from harness.own_models import OWN_MODELS
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir

ROOT = Path(__file__).parents[2]
NODES = 3


class Preload:
    """The process that jobs are forked from, see `preload`."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        paths = [str(OWN_MODELS), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **preload.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", preload.__name__]
        self.process = subprocess.Popen(command, stdin=theirs, env=environment)
        theirs.close()
        self._lines = self._control.makefile("rb")
        ready = json.loads(self._lines.readline())
        assert ready["threads"] == 1, f"{ready['threads']} threads: a fork could find a lock held for ever"
        self._ended: set[int] = set()

    def __enter__(self) -> Preload:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._control.close()
        self.process.wait(60)

    def start(self, order: dict[str, Any]) -> int:
        """Start a supervisor; its process id."""
        self._control.sendall(json.dumps(order).encode() + b"\n")
        while "pid" not in (answer := self._answer()):
            pass
        return answer["pid"]

    def has_ended(self, pid: int) -> bool:
        """Has this supervisor ended?"""
        while pid not in self._ended and select.select([self._control], [], [], 0)[0]:
            self._answer()
        return pid in self._ended

    def _answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the process that jobs are forked from has died")
        answer = json.loads(line)
        if "ended" in answer:
            self._ended.add(answer["ended"])
        return answer


@dataclass(slots=True)
class ObservedIncarnation:
    """A node's process group, by the harness's own clock (Unix seconds): from its first process to its last one's
    end."""

    node: int
    launch: int
    incarnation: int
    pid: int
    """Of its first process, and so of the group."""
    started_at: float
    ended_at: float | None = None
    descriptors: list[int] = field(default_factory=list)
    """Of its processes that run."""


class Hosts:
    """One job in ``folder``, and the nodes that work on it."""

    def __init__(
        self, preload: Preload, folder: Path, config: dict[str, Any], environment: dict[str, str],
        network: Network | None = None, max_replacements: int = 12, replacement_delay: float = 0.3, nodes: int = NODES,
        ranks_each: int = 1,
    ) -> None:  # fmt: skip
        """``config``: the job, but for its name and its folder. ``ranks_each``: processes on each node."""
        self.nodes, self.ranks_each = nodes, ranks_each
        self.preload, self.folder, self.network = preload, folder, network
        self.environment = environment
        self.max_replacements, self.replacement_delay = max_replacements, replacement_delay
        self.run_dir = folder / "run"
        (self.run_dir / LOGS).mkdir(parents=True)
        self.rundir = RunDir(str(self.run_dir))
        self.rundir.write_json("job.json", {"job_id": "job", "run_dir": str(self.run_dir), **config})
        self.notes = folder / "notes.jsonl"
        self.notes.touch()
        self._notes = open(self.notes, "rb")  # noqa: SIM115 - read as it grows
        self.observed: list[ObservedIncarnation] = []
        self.launches = 0
        self.supervisor = 0
        self._forked: int | None = None

    def start(self, faults: list[dict[str, Any]] | None = None) -> None:
        """Start the job, or go on with it, as a cluster does."""
        (self.run_dir / STATUS).unlink(missing_ok=True)
        presence.close(self.rundir)
        last = max((node.launch for node in self.rundir.nodes()), default=0)
        launch = {
            "job_id": "job",
            "command": ["python", "-m", "trainer", "--config", str(self.run_dir / "job.json")],
            "node_count": self.nodes,
            "processes_per_node": self.ranks_each,
            "threads_per_rank": 1,
            "env": {**self.environment, "DTRAIN_FAULTS": json.dumps(faults or [])},
            "master_port": None,
            "elastic": True,
            "launch": last + 1,
            "max_replacements": self.max_replacements,
            "replacement_delay_seconds": self.replacement_delay,
            "token": uuid.uuid4().hex,
            "submitted_at": time.time(),
        }
        self.rundir.write_json(LAUNCH, launch)
        network = self.network
        order = {
            "run_dir": str(self.run_dir),
            "log": str(self.run_dir / LOGS / "supervisor.log"),
            "notes": str(self.notes),
            "namespaces": network.namespaces if network else [],
            "addresses": [network.address(node) for node in range(self.nodes)] if network else [],
        }
        self._forked = self.preload.start(order)
        self.launches += 1

    def look(self) -> None:
        """Notice which processes have come and gone."""
        for line in self._notes.readlines():
            note = json.loads(line)
            if "supervisor" in note:
                self.supervisor = note["supervisor"]
                continue
            key = note["node"], note["launch"], note["incarnation"]
            incarnation = next(
                (item for item in self.observed if (item.node, item.launch, item.incarnation) == key), None
            )
            if incarnation is None:
                incarnation = ObservedIncarnation(*key, note["pid"], note["time"])
                self.observed.append(incarnation)
            try:
                incarnation.descriptors.append(os.pidfd_open(note["pid"]))
                incarnation.ended_at = None
            except ProcessLookupError:
                incarnation.ended_at = incarnation.ended_at or (None if incarnation.descriptors else time.time())
        for incarnation in self.observed:
            if not incarnation.descriptors:
                continue
            for descriptor in [item for item in incarnation.descriptors if select.select([item], [], [], 0)[0]]:
                os.close(descriptor)
                incarnation.descriptors.remove(descriptor)
            if not incarnation.descriptors:
                incarnation.ended_at = time.time()

    @property
    def running(self) -> bool:
        """Is there anything of the job?"""
        return self._forked is not None and (not self.preload.has_ended(self._forked) or bool(self.left()))

    def newest(self, node: int) -> ObservedIncarnation | None:
        """The newest incarnation of a node, if it lives."""
        found = [incarnation for incarnation in self.observed if incarnation.node == node]
        return found[-1] if found and found[-1].ended_at is None else None

    def signal(self, node: int, number: int) -> bool:
        """To all processes of a node; False if there is none."""
        incarnation = self.newest(node)
        if incarnation is None:
            return False
        try:
            os.killpg(incarnation.pid, number)
        except ProcessLookupError:
            return False
        return True

    def is_frozen(self, node: int) -> bool:
        incarnation = self.newest(node)
        try:
            return incarnation is not None and _state(incarnation.pid) == "T"
        except OSError:
            return False

    def left(self) -> list[int]:
        """Processes of the job that still run: by the groups of its nodes, and its supervisor."""
        groups = {incarnation.pid for incarnation in self.observed} | {self.supervisor}
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                state, _, group, session, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if state not in "ZX" and {int(group), int(session)} & groups:
                    found.append(int(name))
        return found

    def close(self) -> None:
        """End whatever is left, and wait until it is gone."""
        self.look()
        with contextlib.suppress(ProcessLookupError):
            if self.running and self.supervisor:
                os.kill(self.supervisor, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self.running and time.monotonic() < deadline:
            time.sleep(0.01)
        self._notes.close()
        for incarnation in self.observed:
            for descriptor in incarnation.descriptors:
                os.close(descriptor)
            incarnation.descriptors.clear()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

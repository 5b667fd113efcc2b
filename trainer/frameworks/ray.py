"""Ray Train: a Ray of the job's own over its nodes, and the program once, on the first of them.

The first process of each node starts a node of that Ray; the others only wait. Where all nodes of the job are on one
machine, as on the local cluster, there is one node of Ray, which listens on loopback only. It has no dashboard, asks
for a token that only this launch knows, has a folder of its own, and ends with the program. (`ray symmetric-run` would
end every other Ray of the machine, too.)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import hold_ports, is_loopback, own_address
from trainer.errors import ConfigError
from trainer.exit_codes import EVICTED
from trainer.frameworks.child import Child
from trainer.frameworks.meeting import Meeting, MeetingError
from trainer.runtime.parent_death import die_with

NAME_PREFIX = "dtrain-of-ray-"
LEAVE_SECONDS = 600.0
"""The seconds that the other processes wait for the first one to have ended, so that it is seen to end first. It ends
its Ray before, which takes a minute on a busy machine."""
START_SECONDS = 120.0
END_SECONDS = 6.0
"""The seconds that a Ray has to end in order; a cluster allows a few more between SIGTERM and SIGKILL."""
POLL_SECONDS, HURRY_SECONDS = 0.2, 1.0
ATTEMPTS = 3
TOO_BUSY = "timed out during startup"
"""What Ray says where its parts were not up within half a minute, for which there is no setting."""
STARTED = "Ray runtime started"
KEPT_LINES = 40
MOST_LETTERS = 20
"""The longest path of a folder for Ray's: a socket in it has some 80 letters more, and 107 are allowed."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of torchrun, which neither Ray's processes nor the program are to find: Ray Train gives each worker its
own."""


def run(
    facts: RankFacts, meeting: Meeting, environment: Mapping[str, str], command: Sequence[str], secret: LaunchSecret
) -> int:
    """Run the program on the first node, and return its exit code on every one."""
    host = own_address(environment, facts.master_addr)
    places = [json.loads(said) for said in meeting.gather(json.dumps([host, environment.get(VISIBLE, "")]))]
    one_machine = all(is_loopback(place) for place, _ in places)
    plain = {name: value for name, value in environment.items() if name not in OF_TORCHRUN and name[:4] != "RAY_"}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # At least one worker for each process of dtrain that a node of Ray stands for.
    cpus = max(facts.world_size if one_machine else facts.local_world_size, usable)
    options = ["--block", "--disable-usage-stats", "--node-ip-address", host, "--num-cpus", str(cpus)]
    if facts.rank == 0:
        token = secret.key("ray").hex() if secret.is_given else secrets.token_hex(32)
        plain |= ray_variables(token, one_machine)
        if one_machine and (gpus := join_gpus([gpus for _, gpus in places])):
            plain[VISIBLE] = gpus
        return _lead(meeting, plain, command, host, options, "" if secret.is_given else token)
    address, folder, token = json.loads(meeting.gather("")[0])
    if one_machine or facts.local_rank:
        meeting.gather("")
        return _wait(meeting)
    plain |= ray_variables(token or secret.key("ray").hex(), one_machine)
    with hold_ports(host) as [port]:
        options += ["--address", address, "--dashboard-agent-listen-port", str(port)]
    try:
        with RayNode(options, plain) as node:
            meeting.gather(node.wait_until_ready())
            return _wait(meeting)
    finally:
        if Path(folder).name.startswith(NAME_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)


def _lead(
    meeting: Meeting, plain: dict[str, str], command: Sequence[str], host: str, options: Sequence[str], told_token: str
) -> int:
    """Start the head, wait for the others, run the program, and return its exit code; as rank 0. ``told_token``: what
    the others do not know by the launch's secret."""
    with hold_ports(host, 3) as ports:
        head = head_options(*ports)
    folder = tempfile.mkdtemp(prefix=NAME_PREFIX, dir=folder_of_folders(tempfile.gettempdir()))
    address = f"{host}:{ports[0]}"
    try:
        with RayNode([*head, "--temp-dir", folder, *options], plain) as node:
            failed = node.wait_until_ready()
            meeting.gather(json.dumps([address, folder, told_token]))
            if why := next(filter(None, [failed, *meeting.gather(failed)]), None):
                raise ConfigError(f"the Ray of this job does not start: {why}")
            child = Child(command, {**plain, "RAY_ADDRESS": address})
            while (code := child.poll()) is None:
                if why := node.explain_end():  # the program would wait for it for ever
                    child.kill()
                    if child.was_asked:
                        node.end(HURRY_SECONDS)
                        return EVICTED
                    raise MeetingError(f"the Ray of this job has ended before its program: {why}")
                time.sleep(POLL_SECONDS)
            meeting.tell(str(code))
            if child.was_asked:  # the cluster kills this process soon, and its folder would stay
                node.end(HURRY_SECONDS)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(meeting: Meeting) -> int:
    """Wait for the end of the program, and return its exit code after it has ended."""
    try:
        code = int(meeting.hear())
    except MeetingError as error:
        raise MeetingError(f"the process that runs the program has ended: {error}") from error
    meeting.wait_for_end(LEAVE_SECONDS)
    return code


def join_gpus(given: Sequence[str]) -> str:
    """Return the GPUs of all ranks of one machine, each once, as CUDA_VISIBLE_DEVICES has them. Pure."""
    return ",".join(dict.fromkeys(gpu for gpus in given for gpu in gpus.split(",") if gpu))


def head_options(port: int, client_port: int, agent_port: int) -> list[str]:
    """Return the options of ``ray start`` for the head, beside those of each node. Of default ports, the second Ray of
    a machine would find the first one's. Pure."""
    ports = ["--port", str(port), "--ray-client-server-port", str(client_port)]
    return ["--head", *ports, "--dashboard-agent-listen-port", str(agent_port), "--include-dashboard", "false"]


def ray_variables(token: str, is_one_machine: bool) -> dict[str, str]:
    """Return the variables of every process of the job's Ray, its program included. Pure."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        # As on Windows and macOS, where Ray stays on loopback: else it listens on all addresses of the host.
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if is_one_machine else {}),
    }


def folder_of_folders(wanted: str) -> str:
    """Return where Ray's folder is made: the usual place for temporary files, unless the paths of sockets in it would
    be longer than the system allows, which Ray notices only once it runs. Pure."""
    return wanted if len(wanted) <= MOST_LETTERS else "/tmp"


class RayNode:
    """A node of the job's Ray: ``ray start --block`` as a process. A context manager; when it is left nothing of it
    runs."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self._options, self._environment = list(options), dict(environment)
        self._spawn()

    def _spawn(self) -> None:
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._heard = threading.Event()
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *self._options],
            env={**self._environment, "PYTHONUNBUFFERED": "1", "RAY_DISABLE_IMPORT_WARNING": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        threading.Thread(target=self._read, args=(self._process, self._heard), name="ray", daemon=True).start()

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def wait_until_ready(self) -> str:
        """Wait until it has started, where the machine was too busy at the second or third try; return why it has not,
        "" where it has."""
        for attempt in range(1, ATTEMPTS + 1):
            if self._heard.wait(START_SECONDS) and self._is_ready:
                return ""
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # it has closed its output, and has ended, or is about to
            if attempt == ATTEMPTS or not any(TOO_BUSY in line for line in self._said):
                break
            self.end()
            self._spawn()
        return self._explain()

    def explain_end(self) -> str:
        """Return why it runs no more, as far as it has said so; "" while it does."""
        return "" if self._process.poll() is None else self._explain()

    def _explain(self) -> str:
        code = self._process.poll()
        how = f"`ray start` ended with exit code {code}" if code is not None else "`ray start` did not come up in time"
        return f"{how}: {' | '.join(line for line in self._said if line.strip())[-800:]}"

    def end(self, seconds: float = END_SECONDS) -> None:
        """End the node and all that it started: with SIGTERM, then, after these seconds, by force."""
        started = self._started()
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._process.poll() is None or any(map(_runs, started))):
            time.sleep(0.05)
        for process in started | self._started():
            if _runs(process):
                try:
                    process.send_signal(signal.SIGKILL)  # psutil: of no process that has its number by now
                except psutil.Error:
                    continue
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _started(self) -> set[psutil.Process]:
        try:
            return set(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.Error:
            return set()

    def _read(self, process: subprocess.Popen[str], heard: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:  # to the end: a full pipe would stop it
            self._said.append(line.rstrip())
            if STARTED in line:
                self._is_ready = True
                heard.set()
        heard.set()  # it has ended


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

"""A real, small Ray cluster for tests: a head and further raylets of one machine, on loopback only, with processes of
their own; or with ``hosts`` each on a host of its own (`harness.namespaces`), the head on the first.

`RayCluster.kill` ends a raylet with all that runs below it, as a machine that loses power.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from harness.namespaces import Hosts
from trainer.runtime.parent_death import die_with

_MISSED = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
"""A machine that does not answer is given up within seconds."""


def missing() -> str:
    """Why no cluster can run here; "" if one can."""
    return "" if importlib.util.find_spec("ray") else "the package ray is not installed: pip install 'dtrain[ray]'"


class RayCluster:
    """A cluster as a context manager; when it is left nothing of it runs, and its folder is gone. The head, the first
    of its machines, takes no work."""

    def __init__(
        self, nodes: int = 4, cpus: int = 2, hosts: Hosts | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """``hosts``: one for each machine. ``variables``: added to the environment of each, with ``{index}``."""
        self.hosts, self.variables = hosts, variables or {}
        self.names = [f"r{index}" for index in range(nodes)]
        self.cpus = cpus
        self.folder = Path(tempfile.mkdtemp(prefix="dray-", dir="/tmp"))  # short: paths of sockets are
        self._token = secrets.token_hex(32)
        self.port, self.dashboard_port, self._client_port = _free_ports(3)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def access(self) -> dict[str, str]:
        """The variables with which processes prove that they may use this cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token, "RAY_DISABLE_IMPORT_WARNING": "1"}

    @property
    def address(self) -> str:
        return f"{self.address_of(self.names[0])}:{self.port}"

    def address_of(self, name: str) -> str:
        """Return the address of a machine."""
        return self.hosts.address(self.names.index(name)) if self.hosts else "127.0.0.1"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def __enter__(self) -> RayCluster:
        try:
            for name in self.names:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, name: str) -> None:
        """Start the head (the first name) or a further machine, and return when it is part of the cluster."""
        self._spawn(name)
        log, begun, tries = self.folder / f"{name}.log", 0, 3
        deadline = time.monotonic() + 300
        while b"Ray runtime started" not in (said := log.read_bytes())[begun:] or not self._takes_clients(name):
            assert time.monotonic() < deadline, said.decode()
            if self.processes[name].poll() is not None:  # Ray gives its own parts 30 s, too few beside other tests
                tries -= 1
                assert tries, said.decode()
                begun = len(said)
                self._spawn(name)
            time.sleep(0.2)

    def _takes_clients(self, name: str) -> bool:
        """Whether the head's server for clients has come, without which the head ends; True for all others."""
        with contextlib.suppress(OSError):
            if name == self.names[0]:
                socket.create_connection((self.address_of(name), self._client_port), 1).close()
            return True
        return False

    def _spawn(self, name: str) -> None:
        own = [
            "--head", f"--port={self.port}", f"--dashboard-port={self.dashboard_port}", "--dashboard-host=127.0.0.1",
            "--include-dashboard=true", f"--ray-client-server-port={self._client_port}",
        ] if name == self.names[0] else [f"--address={self.address}"]  # fmt: skip
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(
                f"--num-cpus={self.cpus if name != self.names[0] else 0}",
                "--num-gpus=0",
                "--object-store-memory=80000000",
                f"--temp-dir={self.folder}",
            ),
            *(
                f"--node-name={name}",
                f"--node-ip-address={self.address_of(name)}",
                f'--resources={{"{name}": 1}}',
                *own,
            ),
        ]
        if name != self.names[0]:
            command = [word for word in command if not word.startswith("--temp-dir")]
        if self.hosts:
            command = [*self.hosts.command(self.names.index(name)), *command]
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115 - the process has its own copy
        own = {each: value.format(index=self.names.index(name)) for each, value in self.variables.items()}
        own |= {"RAY_enable_metrics_collection": "0", **(_MISSED if self.hosts else {})}
        environment = {**os.environ, **self.access, **own}
        self.processes[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # also where the tests are killed
        )  # fmt: skip
        log.close()

    def kill(self, name: str) -> None:
        """Kill a machine: its raylet and all that it started, at once."""
        process = self.processes.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            below = [top, *top.children(recursive=True)]
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.suspend()
            for each in {*below, *top.children(recursive=True)}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()

    def wait_for_end(self, name: str) -> None:
        """Return when a machine has ended by itself."""
        process = self.processes.pop(name)
        process.wait(60)

    def close(self) -> None:
        """End every process of the cluster, and take its folder away."""
        for name in reversed(list(self.processes)):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)

"""A real MLflow scoring server on loopback, as an endpoint to ask."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dtrain_dagster.registry.endpoint import ScoringEndpoint, ServingError
from trainer.isolation.runner import clean_environment, kill_session, limit_command
from trainer.runtime.retry import RetryPolicy
from trainer.runtime.scratch import scratch_folder

HOST = "127.0.0.1"
SERVER_CPU_SECONDS, SERVER_FILE_BYTES = 3600, 64 << 20
IN_USE = "address already in use"
PORT_RETRIES = RetryPolicy(first_pause_seconds=0.0, max_attempts=3)
"""The retries with another port: a free port may be taken by any connection before the server, seconds later, is up."""


class _PortTakenError(ServingError):
    """A failure because another process took the port between the choice of it and the server's start."""


@contextlib.contextmanager
def scoring_server(folder: Path, *, timeout_seconds: float = 120.0) -> Iterator[ScoringEndpoint]:
    """Run the server of ``mlflow models serve`` for the MLflow model in a folder, on a free port of loopback until the
    block ends; then no process of it is left.

    It runs in an empty folder, without ``PYTHONPATH`` and without secrets, and its time, memory and files are limited
    (`trainer.isolation.limited`): a model that finds its code only on this machine fails here rather than where it is
    deployed. Raise `ServingError`, with the end of its log, if it ends or does not answer in time.
    """
    with contextlib.ExitStack() as running:

        def start() -> ScoringEndpoint:
            with contextlib.ExitStack() as starting:
                process, port, log_path = starting.enter_context(_started(folder))
                try:
                    _wait_until_ready(process, port, log_path, time.monotonic() + timeout_seconds)
                except ServingError as error:
                    if IN_USE in log_path.read_text(errors="replace"):
                        raise _PortTakenError(str(error)) from None
                    raise
                running.push(starting.pop_all())
            return ScoringEndpoint(url=f"http://{HOST}:{port}/invocations", is_local=True)

        yield PORT_RETRIES.call(f"serving {folder}", start, lambda error: isinstance(error, _PortTakenError))


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Yield a server's process, its port, and the path of its log."""
    from mlflow.pyfunc.scoring_server import get_cmd

    with scratch_folder("serve") as scratch:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        log_path, empty = scratch / "server.log", scratch / "empty"
        empty.mkdir()
        host: Any = HOST  # annotated as a number there
        served, inherited = get_cmd(str(folder), port, host, nworkers=1)
        own = {name: inherited[name] for name in inherited.keys() - os.environ.keys()}  # MLflow's name of the model
        command = [sys.executable, "-I", "-m", *shlex.split(served)]
        memory_bytes = max(2 << 30, psutil.virtual_memory().total // 2)
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                limit_command(command, memory_bytes, SERVER_CPU_SECONDS, SERVER_FILE_BYTES),
                cwd=empty,
                env=clean_environment(empty, min(4, os.cpu_count() or 1)) | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, port, log_path
        finally:
            kill_session(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_path: Path, deadline: float) -> None:
    import requests

    with requests.Session() as session:
        session.trust_env = False
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServingError(f"the scoring server ended with exit code {process.returncode}:\n{_tail(log_path)}")
            with contextlib.suppress(requests.RequestException):
                if session.get(f"http://{HOST}:{port}/ping", timeout=2).ok:
                    return
            time.sleep(0.1)
    raise ServingError(f"the scoring server did not answer on port {port} in time:\n{_tail(log_path)}")


def _tail(log_path: Path, lines: int = 20) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-lines:])

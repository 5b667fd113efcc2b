"""A real MLflow scoring server on loopback, and the check that it answers with the same numbers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.packed import PackedError, packed_files
from dtrain_dagster.registry.smoke_test import AnswerError, as_columns, compare_answers, load_sample, parse_predictions
from trainer.isolation.runner import clean_environment, limit_command
from trainer.runtime.retry import RetryPolicy
from trainer.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOST = "127.0.0.1"
SERVER_CPU_SECONDS, SERVER_FILE_BYTES = 3600, 64 << 20
ANSWER_SECONDS, ANSWER_BYTES = 60.0, 64 << 20
"""The longest time and the greatest size of an answer: the server runs the model's own code, which may never end it."""
IN_USE = "address already in use"
PORT_RETRIES = RetryPolicy(first_pause_seconds=0.0, max_attempts=3)
"""The retries with another port: a free port may be taken by any connection before the server, seconds later, is up."""


class ServingError(RuntimeError):
    """A scoring server's failure to start or to answer. The message has the end of its log."""


class _PortTakenError(ServingError):
    """A failure because another process took the port between the choice of it and the server's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringServer:
    """A running scoring server."""

    port: int
    log_path: Path
    start_seconds: float

    @property
    def url(self) -> str:
        """The server's address on loopback."""
        return f"http://{HOST}:{self.port}"

    def predict(self, windows: NDArray[Any]) -> list[Any]:
        """POST windows (n, window, features) to ``/invocations``; return one dict of columns per window, as
        `as_columns` checks them. Raise `ServingError` if it refuses, with its words, `AnswerError` for an answer of
        another form."""
        status, body = _request(self.port, "POST", "/invocations", json.dumps({"inputs": windows.tolist()}))
        if status != 200:
            raise ServingError(f"the scoring server refused the request ({status}): {_words(body)}")
        return parse_predictions(body)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingCheck:
    """The result of asking a served model; figures are None where they were not measured."""

    passed: bool
    message: str
    rows: int = 0
    max_abs_difference: float | None = None
    """The largest difference; for these three figures see `smoke_test.Agreement`."""
    max_relative_difference: float | None = None
    max_relative_difference_to_training: float | None = None
    latency_seconds: float | None = None
    """The median time of a request with one window."""
    start_seconds: float | None = None
    """The time from starting the server to its first answer."""

    def figures(self) -> dict[str, int | float | str]:
        """Return the message and every measured figure, for metadata."""
        return {name: value for name, value in asdict(self).items() if name != "passed" and value is not None}


@contextlib.contextmanager
def scoring_server(model_uri: str, tracking_uri: str, *, timeout_seconds: float = 120.0) -> Iterator[ScoringServer]:
    """Run the server of ``mlflow models serve`` on a free port of loopback until the block ends; then no process of it
    is left.

    ``model_uri``: a folder, or ``models:/NAME/VERSION``, whose files are fetched first and have to be those that were
    registered. The server runs in an empty folder, without ``PYTHONPATH`` and without secrets, and its time, memory and
    files are limited (`trainer.isolation.limited`): a model that finds its code only on this machine fails here rather
    than where it is deployed.
    Raise `ServingError` if it ends or does not answer in time, or there is no such model.
    """
    with _local_files(model_uri, tracking_uri) as folder, contextlib.ExitStack() as running:

        def start() -> ScoringServer:
            with contextlib.ExitStack() as starting:
                process, port, log_path = starting.enter_context(_started(folder))
                began = time.monotonic()
                try:
                    _wait_until_ready(process, port, log_path, began + timeout_seconds)
                except ServingError as error:
                    if IN_USE in log_path.read_text(errors="replace"):
                        raise _PortTakenError(str(error)) from None
                    raise
                running.push(starting.pop_all())
            return ScoringServer(port=port, log_path=log_path, start_seconds=time.monotonic() - began)

        yield PORT_RETRIES.call(f"serving {model_uri}", start, lambda error: isinstance(error, _PortTakenError))


@contextlib.contextmanager
def _local_files(model_uri: str, tracking_uri: str) -> Iterator[Path]:
    """Yield the folder of a model on this machine."""
    if not model_uri.startswith("models:/"):
        yield Path(model_uri)
        return
    from mlflow.exceptions import MlflowException

    name, _, version = model_uri.removeprefix("models:/").partition("/")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(packed_files(name, version, tracking_uri))
        except (MlflowException, PackedError) as error:
            raise ServingError(f"{model_uri} cannot be served: {error}") from error
        yield folder


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
            _stop(process)


def check_serving(
    run_dir: str,
    model_uri: str,
    tracking_uri: str,
    *,
    cache_dir: str | None = None,
    rows: int = 32,
    timeout_seconds: float = 120.0,
    order: Order | None = None,
) -> ServingCheck:
    """Serve the registered model and return `check_answers` of it. A server that does not start or refuses gives a
    failed check, not an exception."""
    try:
        with scoring_server(model_uri, tracking_uri, timeout_seconds=timeout_seconds) as server:
            return check_answers(server, run_dir, cache_dir=cache_dir, rows=rows, order=order)
    except (ServingError, OSError, http.client.HTTPException) as error:
        return ServingCheck(passed=False, message=str(error))


def check_answers(
    server: ScoringServer,
    run_dir: str,
    *,
    cache_dir: str | None = None,
    rows: int = 32,
    order: Order | None = None,
) -> ServingCheck:
    """Send the server ``rows`` real test windows, spread over the split; compare its answers with those of the run
    directory's weights, computed here, and with the predictions that training wrote. Raise `ServingError` if it
    refuses."""
    try:
        sample = load_sample(run_dir, cache_dir, rows, order)
        found = compare_answers(sample, as_columns(server.predict(sample.windows), len(sample.windows)))
    except AnswerError as error:
        return ServingCheck(passed=False, message=f"the scoring server {error}")
    return ServingCheck(
        passed=found.passed,
        message=f"the scoring server {found.message}",
        rows=len(sample.windows),
        max_abs_difference=found.max_abs_difference,
        max_relative_difference=found.max_relative_difference,
        max_relative_difference_to_training=found.max_relative_difference_to_training,
        latency_seconds=statistics.median(_timed(server, window[None]) for window in sample.windows[:5]),
        start_seconds=server.start_seconds,
    )


def _timed(server: ScoringServer, windows: NDArray[Any]) -> float:
    began = time.monotonic()
    server.predict(windows)
    return time.monotonic() - began


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_path: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServingError(f"the scoring server ended with exit code {process.returncode}:\n{_tail(log_path)}")
        with contextlib.suppress(OSError, http.client.HTTPException, ServingError):
            if _request(port, "GET", "/ping", timeout=2)[0] == 200:
                return
        time.sleep(0.1)
    raise ServingError(f"the scoring server did not answer on port {port} in time:\n{_tail(log_path)}")


def _request(
    port: int, method: str, path: str, body: str | None = None, timeout: float = ANSWER_SECONDS
) -> tuple[int, bytes]:
    """Return (status, body). http.client connects straight to loopback and ignores proxies in the environment. Raise
    `ServingError` for an answer that does not end in time, or is too long."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    late = threading.Event()
    connection.connect()
    own = connection.sock

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout, give_up)  # the connection's own timeout applies to each piece alone
    timer.start()
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        answer = response.read(ANSWER_BYTES + 1)
        if late.is_set():
            raise ServingError(f"the scoring server did not end its answer within {timeout:g} s")
        if len(answer) > ANSWER_BYTES:
            raise ServingError(f"the scoring server answered with more than {ANSWER_BYTES:,} bytes")
        return response.status, answer
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise ServingError(f"the scoring server did not end its answer within {timeout:g} s") from error
        raise
    finally:
        timer.cancel()
        connection.close()


def _words(body: bytes) -> str:
    """Return an error answer's message, without the traceback."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _tail(log_path: Path, lines: int = 20) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group, with a termination signal, then a kill. Return when none of it runs."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()
            if not _runs(process.pid):
                process.wait(patience)  # it may have ended since
                return
            time.sleep(0.05)


def _runs(group: int) -> bool:
    """Return whether any process of the group is more than a zombie."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False

"""A real MLflow scoring server on loopback, and the check that it answers with the same numbers (R6.3, R6.4)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dtrain_dagster.registry.answers import AnswerError, as_columns, compare_answers, load_sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOST = "127.0.0.1"
ATTEMPTS, IN_USE = 3, "address already in use"
"""A port that is free when it is looked for may be taken by any connection before the server, seconds later, is up."""

_BOOTSTRAP = """
import ctypes, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: never outlive a killed parent
sys.argv[0] = "mlflow"
runpy.run_module("mlflow", run_name="__main__")
"""


class ServingError(RuntimeError):
    """The scoring server did not start or did not answer. The message carries the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringServer:
    """A running server."""

    port: int
    log_path: Path
    start_seconds: float

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def predict(self, windows: NDArray[Any]) -> list[dict[str, float]]:
        """POST windows (n, window, features) to ``/invocations``; one dict of columns per window. `ServingError` if it
        refuses, with its words."""
        status, body = _request(self.port, "POST", "/invocations", json.dumps({"inputs": windows.tolist()}))
        if status != 200:
            raise ServingError(f"the scoring server refused the request ({status}): {_words(body)}")
        return json.loads(body)["predictions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingCheck:
    """What a served model was found to answer; figures are None where it did not come to measuring them."""

    passed: bool
    message: str
    rows: int = 0
    max_abs_difference: float | None = None
    """Of these three figures, see `answers.Agreement`."""
    max_relative_difference: float | None = None
    max_relative_difference_to_training: float | None = None
    latency_seconds: float | None = None
    """Median time of a request with one window."""
    start_seconds: float | None = None
    """From starting the server to its first answer."""

    def figures(self) -> dict[str, int | float | str]:
        """The message and every figure that was measured, for metadata."""
        return {name: value for name, value in asdict(self).items() if name != "passed" and value is not None}


@contextlib.contextmanager
def scoring_server(
    model_uri: str, tracking_uri: str, *, registry_uri: str | None = None, timeout_seconds: float = 120.0
) -> Iterator[ScoringServer]:
    """``mlflow models serve`` on a free port of loopback, until the block ends; then no process of it is left.

    It runs in an empty folder and without ``PYTHONPATH``: a model that finds its code only on this machine fails here
    rather than where it is deployed. `ServingError` if it ends or does not answer in time.
    """
    for attempt in range(ATTEMPTS):
        with _started(model_uri, tracking_uri, registry_uri) as (process, port, log_path):
            began = time.monotonic()
            try:
                _wait_until_ready(process, port, log_path, began + timeout_seconds)
            except ServingError:
                if attempt < ATTEMPTS - 1 and IN_USE in log_path.read_text(errors="replace"):
                    continue
                raise
            yield ScoringServer(port=port, log_path=log_path, start_seconds=time.monotonic() - began)
            return


@contextlib.contextmanager
def _started(
    model_uri: str, tracking_uri: str, registry_uri: str | None
) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """The process of a server, its port, and its log."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _BOOTSTRAP, "models", "serve", "--model-uri", model_uri, "--env-manager", "local"]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    with tempfile.TemporaryDirectory(prefix="dtrain-serve-") as scratch:
        log_path = Path(scratch) / "server.log"
        empty = Path(scratch) / "empty"
        empty.mkdir()
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=empty,
                env=_environment(tracking_uri, registry_uri),
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
    registry_uri: str | None = None,
    cache_dir: str | None = None,
    rows: int = 32,
    timeout_seconds: float = 120.0,
) -> ServingCheck:
    """Serve the registered model and `check_answers`. A server that does not start or refuses gives a failed check,
    not an exception."""
    try:
        with scoring_server(
            model_uri, tracking_uri, registry_uri=registry_uri, timeout_seconds=timeout_seconds
        ) as server:
            return check_answers(server, run_dir, cache_dir=cache_dir, rows=rows)
    except (ServingError, OSError, http.client.HTTPException) as error:
        return ServingCheck(passed=False, message=str(error))


def check_answers(server: ScoringServer, run_dir: str, *, cache_dir: str | None = None, rows: int = 32) -> ServingCheck:
    """Send the server ``rows`` real test windows, spread over the split, and compare its answers with those of the run
    directory's weights, computed here, and with the predictions that training wrote. `ServingError` if it refuses."""
    try:
        sample = load_sample(run_dir, cache_dir, rows)
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


def _environment(tracking_uri: str, registry_uri: str | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **inherited,
        **(
            {"MLFLOW_TRACKING_URI": tracking_uri, "MLFLOW_REGISTRY_URI": registry_uri or tracking_uri}
            if tracking_uri
            else {}
        ),
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # would push the error out of the log's tail
        # `mlflow models serve` starts uvicorn by its bare name.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_path: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServingError(f"the scoring server ended with exit code {process.returncode}:\n{_tail(log_path)}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _request(port, "GET", "/ping", timeout=2)[0] == 200:
                return
        time.sleep(0.1)
    raise ServingError(f"the scoring server did not answer on port {port} in time:\n{_tail(log_path)}")


def _request(port: int, method: str, path: str, body: str | None = None, timeout: float = 60) -> tuple[int, bytes]:
    """(status, body). http.client goes straight to loopback, whatever proxies the environment names."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _words(body: bytes) -> str:
    """What an error answer says, without the traceback."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _tail(log_path: Path, lines: int = 20) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group: asked first, then killed. Returns when none of it runs."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()
            if not _runs(process.pid):
                return
            time.sleep(0.05)


def _runs(group: int) -> bool:
    """Whether any process of the group is more than a zombie."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False

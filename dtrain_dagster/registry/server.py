"""A real MLflow scoring server on loopback, and the check that it answers with the same numbers (R6.3, R6.4)."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dtrain_dagster.registry.versions import load_run_model
from trainer.rundir import PREDICTIONS, RunDir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HOST = "127.0.0.1"
SAME_WEIGHTS_TOLERANCE = 1e-5
"""Largest difference between the server and the run directory's weights on this machine, as a fraction of a column's
root mean square: the same float32 arithmetic in batches of another size."""
TRAINING_TOLERANCE = 1e-3
"""The same against what training wrote, perhaps on a GPU with other kernels."""

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
    """Largest difference from the run directory's weights, in the columns' own units."""
    max_relative_difference: float | None = None
    """The same as a fraction of each column's root mean square; judged by `SAME_WEIGHTS_TOLERANCE`."""
    max_relative_difference_to_training: float | None = None
    """From ``predictions.npz``; judged by `TRAINING_TOLERANCE`. 0 where training wrote no such column."""
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
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _BOOTSTRAP, "models", "serve", "--model-uri", model_uri, "--env-manager", "local"]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    with tempfile.TemporaryDirectory(prefix="dtrain-serve-") as scratch:
        log_path = Path(scratch) / "server.log"
        empty = Path(scratch) / "empty"
        empty.mkdir()
        began = time.monotonic()
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
            _wait_until_ready(process, port, log_path, began + timeout_seconds)
            yield ScoringServer(port=port, log_path=log_path, start_seconds=time.monotonic() - began)
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
    import numpy as np

    from trainer.shards import DataShardManager

    rundir = RunDir(run_dir)
    saved = load_run_model(rundir)
    shards = DataShardManager(rundir.read_job().dataset.uri, cache_dir, saved.spec.dataset_id)
    count = shards.count("test")
    positions = np.unique(np.linspace(0, count - 1, min(rows, count)).astype(np.int64))
    end_rows = shards.end_rows("test", positions)
    windows = shards.gather(end_rows)[0].numpy()
    served = _columns(server.predict(windows))
    expected = saved.predict(windows)
    with np.load(io.BytesIO(rundir.storage.read(PREDICTIONS)), allow_pickle=False) as stored:
        trained = {name: stored[name] for name in ("row", "mu", "sigma", "nu")}
    if len(trained["row"]) != count or not np.array_equal(trained["row"][positions], end_rows):
        message = f"{rundir.uri}/{PREDICTIONS} is not of this dataset: its rows are not those of the test split"
        return ServingCheck(passed=False, message=message)
    if set(served) != set(expected):
        message = f"the server answers with {sorted(served)}, the job's model gives {sorted(expected)}"
        return ServingCheck(passed=False, message=message)
    trained = {"prediction" if name == "mu" and "mu" not in served else name: trained[name] for name in trained}
    in_training = {
        name: trained[name][positions] for name in served if name in trained and np.isfinite(trained[name]).all()
    }
    relative = _relative_difference(served, expected)
    to_training = _relative_difference(served, in_training)
    passed = relative <= SAME_WEIGHTS_TOLERANCE and to_training <= TRAINING_TOLERANCE
    return ServingCheck(
        passed=passed,
        message=(
            f"the scoring server answered {len(windows)} test windows {'with' if passed else 'NOT with'} the model's "
            f"numbers: off by at most {relative:.1e} of a column's size from the job's weights (allowed "
            f"{SAME_WEIGHTS_TOLERANCE:.0e}) and {to_training:.1e} from training's own predictions (allowed "
            f"{TRAINING_TOLERANCE:.0e}; compared: {', '.join(in_training) or 'no column'})"
        ),
        rows=len(windows),
        max_abs_difference=max(float(np.abs(served[name] - expected[name]).max()) for name in expected),
        max_relative_difference=relative,
        max_relative_difference_to_training=to_training,
        latency_seconds=statistics.median(_timed(server, window[None]) for window in windows[:5]),
        start_seconds=server.start_seconds,
    )


def _timed(server: ScoringServer, windows: NDArray[Any]) -> float:
    began = time.monotonic()
    server.predict(windows)
    return time.monotonic() - began


def _columns(records: list[dict[str, float]]) -> dict[str, NDArray[np.float64]]:
    import numpy as np

    return {name: np.array([record[name] for record in records], dtype=np.float64) for name in records[0]}


def _relative_difference(served: Mapping[str, NDArray], expected: Mapping[str, NDArray]) -> float:
    """Largest difference in any column of ``expected``, as a fraction of that column's root mean square.

    ``mu`` is measured by ``sigma``, where there is one: it is close to zero and in the same unit.
    """
    import numpy as np

    worst = 0.0
    for name, values in expected.items():
        size = np.sqrt(np.mean(expected.get("sigma", values) ** 2 if name == "mu" else values**2))
        worst = max(worst, float(np.abs(served[name] - values).max() / max(size, 1e-12)))
    return worst


def _environment(tracking_uri: str, registry_uri: str | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **inherited,
        "MLFLOW_TRACKING_URI": tracking_uri,
        "MLFLOW_REGISTRY_URI": registry_uri or tracking_uri,
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

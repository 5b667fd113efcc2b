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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    """What a served model was found to answer."""

    passed: bool
    message: str
    rows: int
    max_abs_difference: float
    """Largest difference from the run directory's weights, in the columns' own units."""
    max_relative_difference: float
    """The same as a fraction of each column's root mean square; judged by `SAME_WEIGHTS_TOLERANCE`."""
    max_relative_difference_to_training: float
    """From ``predictions.npz``; judged by `TRAINING_TOLERANCE`. 0 where training wrote no such column."""
    latency_seconds: float
    """Median time of a request with one window."""
    start_seconds: float


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
    """Serve the registered model, send it ``rows`` real test windows spread over the split, and compare its answers
    with the run directory's weights computed here and with the predictions that training wrote.

    A server that does not start or refuses gives a failed check, not an exception.
    """
    import io

    import numpy as np

    from trainer.shards import DataShardManager

    rundir = RunDir(run_dir)
    try:
        # Started first: what follows here is computed while it comes up.
        with scoring_server(
            model_uri, tracking_uri, registry_uri=registry_uri, timeout_seconds=timeout_seconds
        ) as server:
            saved = load_run_model(rundir)
            shards = DataShardManager(rundir.read_job().dataset.uri, cache_dir, saved.spec.dataset_id)
            positions = np.unique(np.linspace(0, shards.count("test") - 1, rows).astype(np.int64))
            end_rows = shards.end_rows("test", positions)
            windows = shards.gather(end_rows)[0].numpy()
            served = _columns(server.predict(windows))
            latencies = []
            for window in windows[:5]:
                sent = time.monotonic()
                server.predict(window[None])
                latencies.append(time.monotonic() - sent)
    except (ServingError, OSError) as error:
        return _failed(str(error))
    with np.load(io.BytesIO(rundir.storage.read(PREDICTIONS)), allow_pickle=False) as stored:
        trained = {name: stored[name][positions] for name in ("row", "mu", "sigma", "nu")}
    if not np.array_equal(trained["row"], end_rows):
        return _failed(
            f"{rundir.uri}/{PREDICTIONS} belongs to another dataset: its rows are not those of the test split"
        )
    if "prediction" in served:
        trained["prediction"] = trained["mu"]
    expected = saved.predict(windows)
    if set(served) != set(expected):
        return _failed(
            f"the server answers with the columns {sorted(served)}, the job's model gives {sorted(expected)}"
        )
    in_training = {name: values for name, values in trained.items() if name in served and np.isfinite(values).all()}
    relative = _relative_difference(served, expected)
    to_training = _relative_difference(served, in_training)
    passed = relative <= SAME_WEIGHTS_TOLERANCE and to_training <= TRAINING_TOLERANCE
    return ServingCheck(
        passed=passed,
        message=(
            f"the scoring server answered {len(windows)} test windows {'with' if passed else 'NOT with'} the model's "
            f"numbers: off by at most {relative:.1e} of a column's size from the job's weights (allowed "
            f"{SAME_WEIGHTS_TOLERANCE:.0e}) and {to_training:.1e} from training's own predictions (allowed "
            f"{TRAINING_TOLERANCE:.0e}, {', '.join(in_training) or 'no column'} compared)"
        ),
        rows=len(windows),
        max_abs_difference=max(float(np.abs(served[name] - expected[name]).max()) for name in expected),
        max_relative_difference=relative,
        max_relative_difference_to_training=to_training,
        latency_seconds=statistics.median(latencies),
        start_seconds=server.start_seconds,
    )


def _failed(message: str) -> ServingCheck:
    nothing = float("nan")
    return ServingCheck(
        passed=False,
        message=message,
        rows=0,
        max_abs_difference=nothing,
        max_relative_difference=nothing,
        max_relative_difference_to_training=nothing,
        latency_seconds=nothing,
        start_seconds=nothing,
    )


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

"""The workspace's MLflow endpoint: a real MLflow server behind a proxy that asks for a token.

The server (SQLite) is started by the first request; it takes seconds, and most tests need none. Two things are as in
Azure ML: ``/logged-models`` is not there, and artifacts have ``azureml://`` addresses, which need a plug-in that the
orchestrator does not have. Each job is a run whose id is the job's name, as ``MLFLOW_RUN_ID`` on its nodes says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import sys
import threading
import time
from typing import Any

import requests
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from harness.azure.emulator.answers import WS, Refusal
from harness.azure.emulator.jobs import Job
from harness.azure.emulator.nodes import Guarded
from harness.azure.emulator.state import LOCATION, WORKSPACE_ID, Cloud
from harness.tables import copy_tables

START_SECONDS = 90.0
ABSENT = ("logged-models", "mlflow-artifacts")
ENDED = {"Completed": "FINISHED", "Failed": "FAILED", "Canceled": "KILLED"}
KEPT = ("content-type", "accept", "user-agent")


class Tracking:
    """The MLflow server, once it is needed."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self._database = cloud.folder / "mlflow.db"
        self._lock = threading.Lock()
        self._session = requests.Session()
        self._session.trust_env = False  # this process's variables are for whoever talks to the emulator
        self._server: Guarded | None = None
        self._url = ""
        self._runs: dict[str, str] = {}
        """Jobs that have a run, and its status."""

    def forward(self, method: str, path: str, query: str, headers: dict[str, str], body: bytes) -> Response:
        """What the real server answers. Blocking."""
        with self._lock:
            self._start()
            for job in list(self.cloud.jobs.values()):
                self._mirror(job)
        kept = {name: value for name, value in headers.items() if name in KEPT}
        answer = self._session.request(method, f"{self._url}/{path}?{query}", data=body, headers=kept, timeout=60)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def close(self) -> None:
        if self._server:
            self._server.end(0)
            self._server.close()

    def _start(self) -> None:
        if self._server is not None:
            return
        port = free_port()
        log = self.cloud.folder / "mlflow.log"
        root = f"azureml://{LOCATION}.api.azureml.ms/mlflow/v2.0{WORKSPACE_ID}/artifacts"
        # What `mlflow server` starts, without the process that waits for it and loads MLflow for that.
        command = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--log-level", "warning", "mlflow.server.fastapi_app:app"]
        own = {"_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self._database}", "_MLFLOW_SERVER_ARTIFACT_ROOT": root}
        if not self._database.exists():
            copy_tables(self._database, root)
        self._server = started = run_python(
            command, str(self.cloud.folder), str(log), {**own, "_MLFLOW_SGI_NAME": "uvicorn"}
        )
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(requests.ConnectionError):
                if self._session.get(f"{url}/health", timeout=5).ok:
                    break
            if started.gone() or time.monotonic() > deadline:
                self._server = None
                raise Refusal(500, "InternalError", f"MLflow did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        self._url = url

    def _mirror(self, job: Job) -> None:
        """The job's run, and how it ended."""
        status = ENDED.get(job.status, "RUNNING")
        if job.name not in self._runs:
            self._create_run(job)
            self._runs[job.name] = "RUNNING"
        if status != self._runs[job.name]:
            self._call("runs/update", run_id=job.name, status=status, end_time=int((job.ended or 0) * 1000))
            self._runs[job.name] = status

    def _create_run(self, job: Job) -> None:
        found = self._session.get(
            f"{self._url}/api/2.0/mlflow/experiments/get-by-name",
            params={"experiment_name": job.experiment},
            timeout=60,
        )
        experiment = (
            found.json()["experiment"]["experiment_id"]
            if found.ok
            else self._call("experiments/create", name=job.experiment)["experiment_id"]
        )
        name = job.properties.get("displayName") or job.name
        created = int((job.started or job.created) * 1000)
        run = self._call("runs/create", experiment_id=experiment, start_time=created, run_name=name)
        # The API gives ids of its own; the service has the job's name for one.
        with contextlib.closing(sqlite3.connect(self._database, timeout=30)) as database, database:
            for table in ("tags", "runs"):
                query = f"UPDATE {table} SET run_uuid = ? WHERE run_uuid = ?"
                database.execute(query, (job.name, run["run"]["info"]["run_id"]))

    def _call(self, verb: str, **body: Any) -> Any:
        answer = self._session.post(f"{self._url}/api/2.0/mlflow/{verb}", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()


def mlflow_routes(tracking: Tracking) -> APIRouter:
    router = APIRouter()

    @router.api_route(
        "/mlflow/{api}" + WS + "/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], name="mlflow"
    )
    async def proxy(path: str, request: HttpRequest) -> Response:
        if any(word in path for word in ABSENT):
            raise Refusal(404, "NotFound", f"There is no {path} in this service.")
        body = await request.body()
        return await asyncio.to_thread(
            tracking.forward, request.method, path, request.url.query, dict(request.headers), body
        )

    return router


def run_python(command: list[str], folder: str, log: str, own: dict[str, str]) -> Guarded:
    """A Python process of the emulator's own, under a guard; nothing but its paths comes from the environment."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    environment |= {**own, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # seconds, and processes, for nothing
    return Guarded([{"command": command, "environment": environment, "folder": folder, "output": log}])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

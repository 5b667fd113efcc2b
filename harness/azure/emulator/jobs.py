"""Jobs as ARM shows them: PUT, GET, list, cancel. How they run is in `running`."""

from __future__ import annotations

import datetime
import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from harness.azure.emulator.answers import WS, Refusal, resource_id, resource_type, system_data
from harness.azure.emulator.assets import ARTIFACTS, by_id
from harness.azure.emulator.consistency import find_job, is_hidden
from harness.azure.emulator.foreign_jobs import find_foreign_job, foreign_jobs
from harness.azure.emulator.nodes import Shape, Slot
from harness.azure.emulator.state import LOCATION, WORKSPACE_ID, Cloud
from harness.azure.emulator.system_marks import TAGS as SYSTEM_TAGS
from harness.azure.emulator.system_marks import system_properties

PATH = WS + "/jobs"
TERMINAL = ("Completed", "Failed", "Canceled")
CHANGEABLE = ("tags", "displayName", "description", "isArchived", "properties", "services", "status")
"""What of a job may be PUT again; all else is refused."""
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}")
EMPTY: dict[str, Any] = {
    "description": None, "tags": {}, "properties": {}, "displayName": None, "experimentName": "Default",
    "isArchived": False, "computeId": None, "componentId": None, "notificationSetting": None, "identity": None,
    "resources": None, "codeId": None, "command": None, "environmentId": None, "environmentVariables": {},
    "inputs": {}, "outputs": {}, "distribution": None, "limits": None, "parameters": {}, "queueSettings": None,
    "autologgerSettings": None,
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Job:
    name: str
    body: dict[str, Any]
    created: float
    status: str = "Starting"
    started: float | None = None
    """When its processes began to run, the first time."""
    ended: float | None = None
    error: dict[str, Any] | None = None
    cancel_requested: bool = False
    slots: list[Slot] = field(default_factory=list)
    launches: int = 0
    """How often the service started it: more than 1 after a preemption that restarts it."""
    port: int = 0
    folder: Path | None = None
    code: Future[Path] | None = None
    logs: Future[None] | None = None
    logged: dict[str, int] = field(default_factory=dict)
    """Sizes of the logs that are in the storage account."""
    logged_at: float = 0.0
    since: float = 0.0
    """When the status changed."""
    shown: tuple[str, float] | None = None
    """A status that a fault shows instead, and until when."""
    outcome: str | None = None
    """What it will have ended as, once all its processes have."""

    @property
    def properties(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["properties"]
        return found

    @property
    def live(self) -> bool:
        return self.status not in TERMINAL

    @property
    def compute(self) -> str:
        return str(self.properties.get("computeId") or "").rpartition("/")[2]

    @property
    def experiment(self) -> str:
        return self.properties.get("experimentName") or "Default"

    @property
    def shape(self) -> Shape:
        resources, distribution = self.properties.get("resources") or {}, self.properties.get("distribution") or {}
        kind = distribution.get("distributionType")
        return Shape(
            nodes=resources.get("instanceCount") or 1,
            per_node=(distribution.get("processCountPerInstance") or 1) if kind else 1,
            ranked=kind == "PyTorch",
        )

    def visible(self, now: float) -> str:
        """Its status, as the service tells it."""
        if self.shown and self.live and now < self.shown[1]:
            return self.shown[0]
        return self.status

    def to(self, status: str, now: float) -> None:
        self.status, self.since = status, now

    def summary(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "compute": self.compute,
            "nodes": [slot.node for slot in self.slots],
            "launches": self.launches,
            "error": self.error,
        }


def job_routes(cloud: Cloud) -> APIRouter:
    router = APIRouter()

    @router.get(PATH, name="job.list")
    async def listed(request: HttpRequest) -> dict[str, Any]:
        view = request.query_params.get("listViewType", "ActiveOnly")
        wanted = {"All": (True, False), "ArchivedOnly": (True,)}.get(view, (False,))
        tag, equals, value = request.query_params.get("tag", "").partition("=")

        def fits(job: Job) -> bool:
            tags = job.properties.get("tags") or {}
            tagged = not tag or (tag in tags and (not equals or tags[tag] == value))
            if is_hidden(cloud, "job", job.name, job.created, "list"):
                return False
            return tagged and bool(job.properties.get("isArchived")) in wanted

        newest_first = sorted(cloud.jobs.values(), key=lambda job: job.created, reverse=True)
        found = foreign_jobs(cloud.clock.now(), view, tag)
        found += [describe(cloud, job) for job in newest_first if fits(job)]
        return {"value": found, "nextLink": None}

    @router.get(PATH + "/{name}", name="job.get")
    async def get(name: str) -> dict[str, Any]:
        return find_foreign_job(name, cloud.clock.now()) or describe(cloud, find_job(cloud, name))

    @router.put(PATH + "/{name}", name="job.put")
    async def put(name: str, request: HttpRequest) -> JSONResponse:
        body = await request.json()
        if before := cloud.jobs.get(name):
            _change(before, body)
            return JSONResponse(describe(cloud, before), 200)
        _check(cloud, name, body)
        now = cloud.clock.now()
        cloud.jobs[name] = job = Job(name=name, body=body, created=now, since=now)
        return JSONResponse(describe(cloud, job), 201)

    @router.post(PATH + "/{name}/cancel", name="job.cancel")
    async def cancel(name: str) -> Response:
        """Accepted, not done: the processes get SIGTERM and their grace. For a job that has ended there is nothing
        to do, and the service says 200 (azure-powershell, Stop-AzMLWorkspaceJob.Recording.json at 689c9cc2)."""
        job = find_job(cloud, name, "cancel")
        if not job.live:
            return Response(status_code=200)
        job.cancel_requested = True
        if job.status != "CancelRequested":
            job.to("CancelRequested", cloud.clock.now())
        where = f"{cloud.addresses.base}{WORKSPACE_ID}/jobs/{name}"
        return Response(status_code=202, headers={"Location": where})

    @router.delete(PATH + "/{name}", name="job.delete")
    async def delete(name: str) -> Response:
        if find_job(cloud, name, "delete").live:
            raise Refusal(409, "Conflict", f"Job {name} has not ended; cancel it first.")
        del cloud.jobs[name]
        return Response(status_code=200)

    return router


def _check(cloud: Cloud, name: str, body: dict[str, Any]) -> None:
    properties = body.get("properties") or {}
    if not NAME.fullmatch(name):
        raise Refusal(400, "UserError", f"The job name {name!r} is not valid.")
    if properties.get("jobType") != "Command":
        raise Refusal(400, "UserError", "The emulator runs jobs of jobType Command only.")
    job = Job(name=name, body=body, created=0)
    if not properties.get("command"):
        raise Refusal(400, "UserError", "The command must not be empty.")
    if job.compute not in cloud.computes:
        raise Refusal(400, "UserError", f"Unknown compute target '{job.compute}'.")
    for field_name in ("environmentId", "codeId"):
        asked = properties.get(field_name)
        if field_name == "environmentId" and not asked:
            raise Refusal(400, "UserError", "environmentId is required.")
        curated = (asked or "").startswith("azureml://registries/")
        if asked and not curated and by_id(cloud, asked) is None:
            raise Refusal(400, "UserError", f"{field_name} {asked} does not exist.")


def _change(job: Job, body: dict[str, Any]) -> None:
    """What a second PUT of the same name does: never a second job."""
    new = body.get("properties") or {}
    for name in (EMPTY | job.properties).keys() - set(CHANGEABLE):
        before, after = job.properties.get(name), new.get(name)
        if (before or None) != (after or None):
            why = (
                "A job with this name already exists. If you are trying to create a new job, use a different name. If "
                f"you are trying to update an existing job, the existing job's {name} cannot be changed. Only "
                "description, displayName, tags, properties and isArchived can be updated."
            )
            raise Refusal(400, "UserError", why)
    kept = job.properties.get("properties") or {}
    if changed := [name for name, value in (new.get("properties") or {}).items() if kept.get(name, value) != value]:
        why = f"A job with this name already exists. Its existing properties cannot be changed: {', '.join(changed)}."
        raise Refusal(400, "UserError", why)
    for name in ("displayName", "description", "isArchived"):
        if new.get(name) is not None:
            job.properties[name] = new[name]
    for name in ("tags", "properties"):
        job.properties[name] = {**(job.properties.get(name) or {}), **(new.get(name) or {})}


def describe(cloud: Cloud, job: Job) -> dict[str, Any]:
    now = cloud.clock.now()
    times = {"StartTimeUtc": job.started, "EndTimeUtc": job.ended}
    sent = {name: value for name, value in job.properties.items() if value is not None}
    return {
        "id": resource_id("jobs", job.name),
        "name": job.name,
        "type": resource_type("jobs"),
        "systemData": system_data(job.created),
        "properties": {
            **EMPTY,
            **sent,
            "properties": {
                **sent.get("properties", {}),
                **system_properties(job.compute),
                **{name: _plain(value) for name, value in times.items() if value is not None},
            },
            "tags": {**sent.get("tags", {}), **SYSTEM_TAGS},
            "displayName": sent.get("displayName") or job.name,
            "status": job.visible(now),
            "services": {
                "Tracking": _service("Tracking", f"azureml://{LOCATION}.api.azureml.ms/mlflow/v1.0{WORKSPACE_ID}?"),
                "Studio": _service("Studio", f"https://ml.azure.com/runs/{job.name}?wsid={WORKSPACE_ID}"),
            },
            "outputs": {
                "default": {
                    "description": None,
                    "jobOutputType": "uri_folder",
                    "mode": "ReadWriteMount",
                    "uri": f"azureml://datastores/{ARTIFACTS}/ExperimentRun/dcid.{job.name}",
                },
                **sent.get("outputs", {}),
            },
        },
    }


def _service(kind: str, endpoint: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("errorMessage", "nodes", "port", "properties", "status"))
    return {"endpoint": endpoint, "jobServiceType": kind, **nothing}


def _plain(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")

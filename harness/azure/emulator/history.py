"""Run history, the workspace's own service: details with signed log addresses, run data, changes of tags."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from harness.azure.emulator.answers import WS
from harness.azure.emulator.clock import iso
from harness.azure.emulator.consistency import find_job
from harness.azure.emulator.jobs import Job
from harness.azure.emulator.state import DATASTORE_CONTAINER, LOCATION, Cloud
from harness.azure.emulator.storage import Blobs

PATH = "/history/v1.0" + WS


def history_routes(cloud: Cloud, blobs: Blobs) -> APIRouter:
    router = APIRouter()

    @router.get(PATH + "/runs/{name}/details", name="history.details")
    @router.get(PATH + "/experiments/{experiment}/runs/{name}/details", name="history.details")
    async def details(name: str) -> dict[str, Any]:
        job = find_job(cloud, name, "history")
        prefix = f"ExperimentRun/dcid.{name}/"
        stored = sorted(job.logged)
        logs = await asyncio.to_thread(lambda: {log: blobs.signed(DATASTORE_CONTAINER, prefix + log) for log in stored})
        return {**_common(cloud, job), "target": job.compute, "warnings": [], "logFiles": logs, "inputDatasets": []}

    @router.get(PATH + "/runs/{name}", name="history.run")
    @router.get(PATH + "/experiments/{experiment}/runs/{name}", name="history.run")
    async def run(name: str) -> dict[str, Any]:
        return _run(cloud, find_job(cloud, name, "history"))

    @router.patch(PATH + "/runs/{name}", name="history.patch")
    @router.patch(PATH + "/experiments/{experiment}/runs/{name}", name="history.patch")
    async def patch(name: str, request: HttpRequest) -> dict[str, Any]:
        """Tags and properties are merged, the rest is replaced."""
        job, body = find_job(cloud, name, "history"), await request.json()
        for field in ("tags", "properties"):
            job.properties[field] = {**(job.properties.get(field) or {}), **(body.get(field) or {})}
        for field in ("displayName", "description"):
            if body.get(field) is not None:
                job.properties[field] = body[field]
        if body.get("hidden") is not None:  # what ARM calls archived
            job.properties["isArchived"] = body["hidden"]
        return _run(cloud, job)

    @router.post(PATH + "/rundata", name="history.rundata")
    async def rundata(request: HttpRequest) -> dict[str, Any]:
        job = find_job(cloud, (await request.json())["runId"], "history")
        return {
            "runMetadata": _run(cloud, job),
            "runDefinition": None,
            "jobSpecification": None,
            "systemSettings": None,
        }

    return router


def _common(cloud: Cloud, job: Job) -> dict[str, Any]:
    return {
        "runId": job.name,
        "runUuid": job.name,
        "parentRunUuid": None,
        "rootRunUuid": job.name,
        "status": job.visible(cloud.clock.now()),
        "parentRunId": None,
        "createdTimeUtc": iso(job.created),
        "startTimeUtc": iso(job.started),
        "endTimeUtc": iso(job.ended),
        "error": _error(job),
        "tags": job.properties.get("tags") or {},
        "properties": job.properties.get("properties") or {},
    }


def _run(cloud: Cloud, job: Job) -> dict[str, Any]:
    return {
        **_common(cloud, job),
        "dataContainerId": f"dcid.{job.name}",
        "displayName": job.properties.get("displayName") or job.name,
        "name": job.properties.get("displayName") or job.name,
        "description": job.properties.get("description"),
        "experimentId": job.experiment,
        "runType": "azureml.scriptrun",
        "target": job.compute,
        "outputs": {},
        "inputs": {},
        "hidden": False,
        "cancelationReason": None,
        "warnings": [],
    }


def _error(job: Job) -> dict[str, Any] | None:
    if job.error is None:
        return None
    return {
        "error": {
            "code": job.error["code"],
            "severity": None,
            "message": job.error["message"],
            "messageFormat": None,
            "messageParameters": {},
            "referenceCode": None,
            "detailsUri": None,
            "target": None,
            "details": [],
            "innerError": {"code": job.error["inner"], "innerError": None},
            "debugInfo": None,
            "additionalInfo": None,
        },
        "correlation": None,
        "environment": LOCATION,
        "location": LOCATION,
        "time": iso(job.ended or job.since),
        "componentName": "CommonRuntime",
    }

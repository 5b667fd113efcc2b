"""Jobs of other people in the workspace, of every kind: they are listed with ours, and none is ours to touch.

Their common fields are as recorded (azure-powershell, Get-AzMLWorkspaceJob.Recording.json at 49be303a), what each kind
has of its own as in the examples of the REST reference (azure-rest-api-specs, machinelearningservices, Job/*/list.json
of 2023-04-01-preview, which has Labeling, and 2024-10-01-preview, which has FineTuning).
"""

from __future__ import annotations

from typing import Any

from harness.azure.emulator.answers import resource_id, resource_type
from harness.azure.emulator.clock import iso
from harness.azure.emulator.state import LOCATION, WORKSPACE_ID

UNKNOWN = "QuantumAnnealing"
"""A kind that is newer than any client."""
FOREIGN = "their-"
"""How the name of each begins."""
KINDS: dict[str, dict[str, Any]] = {
    "Command": {"command": "echo theirs", "environmentId": resource_id("environments", "e", "versions", "1"),
                "resources": {"instanceCount": 1, "shmSize": "2g"}, "queueSettings": {"jobTier": "Null"}},
    "Pipeline": {"jobs": {"one": {"type": "command", "component": "x"}}, "inputs": {}, "outputs": {}, "settings": {},
                 "sourceJobId": None},
    "Sweep": {"searchSpace": {"lr": ["uniform", [0.1, 0.2]]}, "samplingAlgorithm": {"samplingAlgorithmType": "Grid"},
              "objective": {"goal": "Minimize", "primaryMetric": "loss"}, "trial": {"command": "x",
              "environmentId": resource_id("environments", "e", "versions", "1")}},
    "AutoML": {"taskDetails": {"taskType": "ImageClassification", "trainingData": {"jobInputType": "mltable",
               "uri": "azureml:data:1"}, "limitSettings": {"maxTrials": 2}}, "environmentId": None},
    "Spark": {"codeId": resource_id("codes", "c", "versions", "1"), "conf": {}, "entry": {"file": "a.py",
              "sparkJobEntryType": "SparkJobPythonEntry"}, "resources": {"instanceType": "Standard_E4S_V3",
              "runtimeVersion": "3.4"}},
    "Labeling": {"labelCategories": {}, "labelingJobMediaProperties": {"mediaType": "Image"}, "createdDateTime": None},
    "FineTuning": {"fineTuningDetails": {"modelProvider": "AzureOpenAI", "taskType": "ChatCompletion"}},
    UNKNOWN: {"qubits": 7, "status": {"phase": "Superposed"}},
}  # fmt: skip


def foreign_jobs(now: float, view: str = "All", tag: str = "") -> list[dict[str, Any]]:
    """As the service lists them, newest first: of every kind, one without properties, as the children of pipelines are
    (azure-ai-ml, _is_pipeline_child_job), and one without a kind. None of them is archived or has a tag of ours."""
    if tag or view == "ArchivedOnly":
        return []
    made = [_job(f"{FOREIGN}{kind.lower()}", kind, own, now) for kind, own in KINDS.items()]
    made[-1]["properties"]["status"] = "Superposed"  # and words that no client knows
    child = {"id": resource_id("jobs", f"{FOREIGN}child"), "name": f"{FOREIGN}child", "type": resource_type("jobs")}
    nameless = _job(f"{FOREIGN}nameless", "", {}, now)
    del nameless["properties"]["jobType"]
    return [*made, {**child, "properties": None, "systemData": None}, nameless]


def find_foreign_job(name: str, now: float) -> dict[str, Any] | None:
    return next((job for job in foreign_jobs(now) if job["name"] == name), None)


def _job(name: str, kind: str, own: dict[str, Any], now: float) -> dict[str, Any]:
    empty = dict.fromkeys(("port", "status", "errorMessage", "properties", "nodes"))
    studio = {**empty, "jobServiceType": "Studio", "endpoint": f"https://ml.azure.com/runs/{name}?wsid={WORKSPACE_ID}"}
    return {
        "id": resource_id("jobs", name),
        "name": name,
        "type": resource_type("jobs"),
        "properties": {
            "description": None,
            "tags": {"team": "theirs", "_aml_system_ComputeTargetStatus": '{"AllocationState":"steady"}'},
            "properties": {"_azureml.ComputeTargetType": "amlctrain", "azureml.git.branch": "main"},
            "displayName": name,
            "status": "Running",
            "experimentName": "theirs",
            "services": {"Studio": studio} if kind != "Pipeline" else None,
            "computeId": resource_id("computes", "their-young-cluster") if kind in ("Command", "Sweep") else None,
            "isArchived": False,
            "identity": None,
            "componentId": None,
            "notificationSetting": None,
            "jobType": kind,
            **own,
        },
        "systemData": {"createdAt": iso(now), "createdBy": f"Somebody in {LOCATION}", "createdByType": "User"},
    }

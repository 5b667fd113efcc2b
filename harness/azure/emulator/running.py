"""How a job lives: queued, prepared, run on nodes that may be lost, ended; one step of it on each tick."""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from harness.azure.emulator.assets import by_id
from harness.azure.emulator.clock import duration_seconds
from harness.azure.emulator.faults import Fault
from harness.azure.emulator.identity import Identity
from harness.azure.emulator.jobs import Job
from harness.azure.emulator.nodes import Guarded, Image, Slot, log_name, node_environment
from harness.azure.emulator.played import Played, is_played
from harness.azure.emulator.scaling import end_stay, set_state, stay_of
from harness.azure.emulator.state import (
    DATASTORE_CONTAINER,
    RESOURCE_GROUP,
    SUBSCRIPTION,
    WORKSPACE,
    WORKSPACE_ID,
    Cloud,
    Compute,
    Node,
    quota_of,
)
from harness.azure.emulator.storage import Blobs, container_and_prefix
from harness.azure.emulator.tracking import free_port

LAST_WORDS = 500
"""Characters of a user's output in the message of a job that failed."""
LOG_SECONDS = 0.5
"""Between two looks at the logs; of the real clock."""
# As reported in microsoft/MLOpsPython#346 and Azure/MachineLearningNotebooks#1242; ``policy`` has more, see `faults`.
PREEMPTED = (
    "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Check if the run has failed or "
    "restarted. Reason: Received pre-emption warning signal."
)


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs the jobs of a cloud. `tick` is quick: whatever waits for the storage account does so in threads."""

    cloud: Cloud
    blobs: Blobs
    identity: Identity
    ca: Path
    resolver: Path
    _codes: dict[str, Future[Path]] = field(default_factory=dict)
    """What jobs share: the code of an asset, which no version changes."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="blobs"))

    def waiting(self) -> dict[str, list[int]]:
        """How many nodes are asked for, by compute: first those that replace a lost one, then those of queued jobs."""
        asked: dict[str, list[int]] = {}
        for job in self.cloud.jobs.values():
            asked.setdefault(job.compute, []).extend([1] * sum(self._wants_back(job, slot) for slot in job.slots))
        for job in self._queued():
            asked.setdefault(job.compute, []).append(job.shape.nodes)
        return asked

    def tick(self) -> None:
        now = self.cloud.clock.now()
        blocked: set[str] = set()
        for job in list(self.cloud.jobs.values()):
            if not job.live:
                continue
            if job.cancel_requested and job.outcome is None:
                self._end(job, "Canceled", self.cloud.timing.grace_seconds)
            if job.outcome is not None:
                self._finish(job, now)
            elif job.status == "Starting":
                job.to("Queued", now)
            elif job.status == "Queued":
                if job.compute not in blocked and not self._start(job, now):
                    blocked.add(job.compute)
            elif job.status == "Preparing":
                self._prepare(job, now)
            elif job.status == "Running":
                self._watch(job, now)
            self._upload_logs(job)

    def close(self) -> None:
        """Kill all that runs."""
        works = [slot.work for job in self.cloud.jobs.values() for slot in job.slots if slot.work]
        for work in works:
            work.end(0)
        for work in works:
            work.close()
        self._threads.shutdown(cancel_futures=True)

    def _queued(self) -> Iterator[Job]:
        for job in self.cloud.jobs.values():
            if job.status == "Queued" and not job.cancel_requested and self._held_by(job) is None:
                yield job

    def _held_by(self, job: Job) -> Fault | None:
        """The fault that keeps it in the queue, if there is one."""
        now = self.cloud.clock.now()
        for fault in self.cloud.faults.pending("queue"):
            until = None if fault["seconds"] is None else max(job.created, fault.added) + fault["seconds"]
            if fnmatchcase(job.name, fault["job"]) and (until is None or now < until):
                fault.struck = 1
                return fault
        return None

    def _compute(self, job: Job) -> Compute | None:
        return self.cloud.computes.get(job.compute)

    def _start(self, job: Job, now: float) -> bool:
        """Take nodes, if there are enough; False: whoever is behind has to wait too."""
        if self._held_by(job):
            return True  # a fault holds this one, and only this one
        compute = self._compute(job)
        if compute is None:
            self._fail(job, "ComputeNotFound", f"The compute target {job.compute} does not exist.")
            return True
        if compute.state == "Failed":
            self._fail(job, "UserError", "cluster is in failed state")
            return True
        if compute.refusals:  # all that a job is told of it (report of 2026-08-26)
            self._fail(job, "UserError", "cluster has encountered unknown issue")
            return True
        size = self.cloud.sizes[compute.vm_size]
        if job.shape.nodes > compute.max_nodes:
            why = (
                f"The job asks for {job.shape.nodes} nodes, the cluster {compute.name} has {compute.max_nodes} at most."
            )
            self._fail(job, "JobNodeCountExceedsMaxNodeCount", why)
            return True
        if job.shape.nodes * size.vcpus > quota_of(self.cloud, size.family, compute.tier):
            why = f"{job.shape.nodes} nodes of {compute.vm_size} need more vCPUs than the quota of {size.family}."
            self._fail(job, "JobNodeCountExceedsCoreQuota", why)
            return True
        idle = [node for node in compute.nodes if node.state == "idle"]
        if compute.state != "Succeeded" or len(idle) < job.shape.nodes:
            return False
        job.launches += 1
        job.port = free_port()
        job.slots = [Slot(rank=rank) for rank in range(job.shape.nodes)]
        for slot, node in zip(job.slots, idle, strict=False):
            self._take(job, slot, compute, node)
        job.folder = self.cloud.folder / "nodes" / job.name / f"launch-{job.launches}"
        code = "" if is_played(job.properties["command"]) else job.properties.get("codeId") or ""
        if code not in self._codes:
            self._codes[code] = self._threads.submit(self._fetch, code, self.cloud.folder / "code" / uuid.uuid4().hex)
        job.code = self._codes[code]
        job.to("Preparing", now)
        return True

    def _take(self, job: Job, slot: Slot, compute: Compute, node: Node) -> None:
        now = self.cloud.clock.now()
        slot.node, node.job = node.id, job.name
        slot.lost_at = slot.back_after = None
        set_state(compute, node, "running", now)
        stay_of(self.cloud, node).jobs.append([job.name, now, None])

    def _fetch(self, code: str, target: Path) -> Path:
        target.mkdir(parents=True)
        asset = by_id(self.cloud, code) if code else None
        if asset is not None:
            self.blobs.download_folder(*container_and_prefix(asset.body["properties"]["codeUri"]), target)
        return target

    def _prepare(self, job: Job, now: float) -> None:
        assert job.code is not None
        if not job.code.done() or now - job.since < self.cloud.timing.prepare_seconds:
            return
        if error := job.code.exception():
            self._fail(job, "DataNotFound", f"The code could not be downloaded: {error}")
            return
        for slot in job.slots:
            if not slot.lost:
                self._launch(job, slot)
        job.started = job.started or now
        job.to("Running", now)

    def _launch(self, job: Job, slot: Slot) -> None:
        """Start the node's processes, in a folder of its own with the code in it."""
        assert job.folder is not None
        assert job.code is not None
        home = job.folder / f"node-{slot.rank}-stay-{slot.stay}"
        slot.stay += 1
        (job.folder.parent / "user_logs").mkdir(parents=True, exist_ok=True)
        line, environments, logs = job.properties["command"], [], []
        for local in range(job.shape.per_node):
            environment = node_environment(self._image(job), job.shape, slot.rank, local, job.port, home)
            environment |= {
                name: str(value) for name, value in (job.properties.get("environmentVariables") or {}).items()
            }
            environments.append(environment)
            logs.append(job.folder.parent / log_name(job.shape, slot.rank * job.shape.per_node + local))
        if is_played(line):
            slot.work = Played(self.blobs, line, environments, logs)
            return
        shutil.copytree(job.code.result(), home / "wd")
        (home / "tmp").mkdir()
        shared = {"command": ["bash", "-c", line], "folder": str(home / "wd")}
        slot.work = Guarded(
            [
                {**shared, "environment": environment, "output": str(log)}
                for environment, log in zip(environments, logs, strict=True)
            ]
        )

    def _image(self, job: Job) -> Image:
        addresses = self.cloud.addresses
        token = self.identity.token(addresses.base, "node")["access_token"]
        return Image(
            path=f"{Path(sys.executable).parent}{os.pathsep}/usr/local/bin:/usr/bin:/bin",
            ca=self.ca,
            resolver=self.resolver,
            service={
                "AZUREML_RUN_ID": job.name,
                "AZUREML_ROOT_RUN_ID": job.name,
                "AZUREML_ARM_SUBSCRIPTION": SUBSCRIPTION,
                "AZUREML_ARM_RESOURCEGROUP": RESOURCE_GROUP,
                "AZUREML_ARM_WORKSPACE_NAME": WORKSPACE,
                "AZUREML_ARM_PROJECT_NAME": job.experiment,
                "AZUREML_EXPERIMENT_SCOPE": f"{WORKSPACE_ID}/experiments/{job.experiment}",
                "AZUREML_SERVICE_ENDPOINT": addresses.base,
                "MSI_ENDPOINT": f"{addresses.control}/identity/node",
                "MSI_SECRET": self.identity.secret,
                "MLFLOW_TRACKING_URI": f"{addresses.base}/mlflow/v1.0{WORKSPACE_ID}",
                "MLFLOW_TRACKING_TOKEN": token,
                "MLFLOW_EXPERIMENT_NAME": job.experiment,
                "MLFLOW_RUN_ID": job.name,
            },
        )

    def _watch(self, job: Job, now: float) -> None:
        for slot in job.slots:
            if slot.work and slot.work.gone() and slot.lost:
                slot.work = None
        self._lose_nodes(job, now)
        if job.outcome is not None or job.status != "Running":
            return
        for fault in self.cloud.faults.pending("status"):
            if fnmatchcase(job.name, fault["job"]) and now - job.since >= fault["after_seconds"]:
                fault.strike()
                job.shown = (fault["status"], now + fault["seconds"])
        for slot in job.slots:
            if slot.lost and self._wants_back(job, slot):
                self._bring_back(job, slot)
        self._judge(job, now)

    def _judge(self, job: Job, now: float) -> None:
        """Has it ended, and how?"""
        there = [slot for slot in job.slots if not slot.lost]
        codes = {
            slot.rank * job.shape.per_node + local: code
            for slot in there
            if slot.work
            for local, code in slot.work.codes.items()
        }
        if bad := {rank: code for rank, code in codes.items() if code != 0}:
            rank, code = next(iter(bad.items()))
            why = f"Execution failed. Process {rank} exited with status code {code if code > 0 else 128 - code}."
            # As reported in Azure/azureml-examples#2614: with the end of what the user's own code has written.
            log = log_name(job.shape, rank)
            why += f" Please check log file '{log}' for error details. Error: {_last_words(job, log)}"
            self._fail(job, "ExecutionFailed", why)
            return
        if there and all(slot.work and slot.work.gone() for slot in there):
            job.outcome = "Completed"
            job.to("Finalizing", now)
            return
        if not there and not any(slot.back_after is not None for slot in job.slots):
            self._fail(job, "UserError", PREEMPTED)
            return
        limit = (job.properties.get("limits") or {}).get("timeout")
        if limit and job.started is not None and now - job.started > duration_seconds(limit):
            self._fail(job, "JobTimeout", f"The job ran longer than its limit of {limit}.", outcome="Canceled")

    def _lose_nodes(self, job: Job, now: float) -> None:
        for fault in self.cloud.faults.pending("preempt", "lose"):
            slot = job.slots[fault["node"]] if fault["node"] < len(job.slots) else None
            if slot is None or slot.lost or not fnmatchcase(job.name, fault["job"]):
                continue
            if now - max(job.since, fault.added) < fault["after_seconds"] or not _logged(job, fault["log"]):
                continue
            fault.strike()
            self._lose(job, slot, fault, now)
            if job.outcome is not None or job.status != "Running":
                return

    def _lose(self, job: Job, slot: Slot, fault: Fault, now: float) -> None:
        grace = self.cloud.timing.grace_seconds if fault.kind == "preempt" else 0.0
        if slot.work:
            slot.work.end(grace)
        compute = self._compute(job)
        node = _node(compute, slot)
        if compute and node:
            set_state(compute, node, "preempted" if fault.kind == "preempt" else "unusable", now)
            node.job = None
            end_stay(self.cloud, node)
        slot.node, slot.lost_at = None, now
        slot.back_after = fault["back_after_seconds"] if fault["policy"] == "survive" else None
        if fault["policy"] == "fail":
            self._fail(job, "UserError", PREEMPTED)
        elif fault["policy"] == "restart":
            self._end(job, "Queued", self.cloud.timing.grace_seconds)

    def _wants_back(self, job: Job, slot: Slot) -> bool:
        if job.status != "Running" or job.outcome is not None or slot.lost_at is None or slot.back_after is None:
            return False
        return self.cloud.clock.now() - slot.lost_at >= slot.back_after and slot.work is None

    def _bring_back(self, job: Job, slot: Slot) -> None:
        compute = self._compute(job)
        idle = [node for node in compute.nodes if node.state == "idle"] if compute else []
        if compute and idle:
            self._take(job, slot, compute, idle[0])
            self._launch(job, slot)

    def _fail(self, job: Job, code: str, message: str, outcome: str = "Failed") -> None:
        job.error = {"code": "UserError" if code == "ExecutionFailed" else code, "message": message, "inner": code}
        self._end(job, outcome, self.cloud.timing.grace_seconds)

    def _end(self, job: Job, outcome: str, grace: float) -> None:
        """Ask its processes to end; `_finish` sees to the rest. ``outcome`` Queued: it begins anew."""
        job.outcome = outcome
        for slot in job.slots:
            if slot.work and not slot.work.gone():
                slot.work.end(grace)

    def _finish(self, job: Job, now: float) -> None:
        """Once all of it has ended and its logs are stored: its last status, and its nodes are free."""
        if not all(slot.work is None or slot.work.gone() for slot in job.slots):
            return
        if (job.code and not job.code.done()) or not self._logs_are_stored(job):
            return
        compute = self._compute(job)
        for slot in job.slots:
            if compute and (node := _node(compute, slot)):
                node.job = None
                set_state(compute, node, "idle", now)
                stay_of(self.cloud, node).jobs[-1][2] = now
        outcome, job.outcome = job.outcome, None
        assert outcome is not None
        job.slots = []
        job.to(outcome, now)
        if outcome != "Queued":
            job.ended = now

    def _logs_are_stored(self, job: Job) -> bool:
        self._upload_logs(job, soon=True)
        return (job.logs is None or job.logs.done()) and job.logged == _sizes(job)

    def _upload_logs(self, job: Job, soon: bool = False) -> None:
        if job.folder is None or (job.logs is not None and not job.logs.done()):
            return
        if job.logs is not None and (error := job.logs.exception()):
            raise error
        if not soon and time.monotonic() - job.logged_at < LOG_SECONDS:
            return
        changed = {name: size for name, size in _sizes(job).items() if job.logged.get(name) != size}
        if changed:
            job.logged_at = time.monotonic()
            job.logs = self._threads.submit(self._store, job, list(changed))

    def _store(self, job: Job, names: list[str]) -> None:
        assert job.folder is not None
        for name in names:
            content = (job.folder.parent / name).read_bytes()
            self.blobs.upload(DATASTORE_CONTAINER, f"ExperimentRun/dcid.{job.name}/{name}", content)
            job.logged[name] = len(content)


def _sizes(job: Job) -> dict[str, int]:
    if job.folder is None:
        return {}
    root = job.folder.parent
    return {str(file.relative_to(root)): file.stat().st_size for file in (root / "user_logs").glob("*.txt")}


def _last_words(job: Job, log: str) -> str:
    assert job.folder is not None
    return (job.folder.parent / log).read_text(errors="replace")[-LAST_WORDS:].strip()


def _logged(job: Job, text: str | None) -> bool:
    """Has one of its processes written this?"""
    if text is None:
        return True
    assert job.folder is not None
    return any(text in file.read_text(errors="replace") for file in (job.folder.parent / "user_logs").glob("*.txt"))


def _node(compute: Compute | None, slot: Slot) -> Node | None:
    return next((node for node in compute.nodes if node.id == slot.node), None) if compute else None

"""Jobs in the service: submitted once under their name, looked at, cancelled, listed, and their logs."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.azure_ml.client import (
    NotFound,
    Service,
    ServiceRefused,
    ServiceUnreachable,
)
from dtrain_dagster.clusters.azure_ml.launch_record import Record
from dtrain_dagster.clusters.azure_ml.provision import CLUSTER_TAG, TAG, entity_text
from dtrain_dagster.clusters.azure_ml.sku_chain import node_environment_of
from dtrain_dagster.clusters.azure_ml.states import ServiceJob
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.job_code import factories_of
from dtrain_dagster.clusters.submission import Request, as_comment
from dtrain_dagster.support.audit import AuditLog
from dtrain_dagster.support.user_code import stage_for_nodes
from dtrain_dagster.support.user_sources import StagingError
from trainer.comm.launch_secret import SECRET_BYTES
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch
from trainer.storage.open import open_storage

JOB_TAG, LAUNCH_TAG, TOKEN_TAG, RUN_DIR_TAG, RUN_TAG = (
    "dtrain_job",
    "dtrain_launch",
    "dtrain_token",
    "dtrain_run_dir",
    "dagster_run_id",
)
ACCOUNT_URL = "AZURE_STORAGE_ACCOUNT_URL"
"""Variable with the address of the storage."""
LONGEST_JOB_SECONDS = 7 * 86400
"""Seconds after which the service ends a job: as many as it lets one run on Spot."""
OLDEST_SECONDS = 30 * 86400.0
"""Largest age of a job: the service ends them after 21 days."""
_EXISTS = re.compile(r"(?i)already (exists|been)|existing job")
_USER_LOG = re.compile(r"std_log(?:_process_(\d+))?\.txt$")


class Jobs:
    """The requests to the service about jobs. Which to make is decided elsewhere."""

    def __init__(self, service: Service, audit: AuditLog) -> None:
        self.service, self.options, self.audit = service, service.options, audit
        self.scripts: dict[str, str] = {}
        """The scripts that go along, by job, of those that this process was asked to submit. They are in no record,
        since nodes write the run directory, and could choose a file of this machine."""

    def get(self, name: str) -> ServiceJob | None:
        """Return the job, None where the service says of this very job that there is none, which may be wrong for a
        while. Raise `ServiceError` if that cannot be determined."""
        try:
            found = self.service.read(f"look at job {name}", f"{self._path}/{name}")
        except NotFound as error:
            if not error.is_about(name):
                raise
            return None
        job = read_job(found)
        if job.status in ("Failed", "Canceled"):
            code, message = self._why(name, job.ended_at)
            return replace(job, error_code=code, error_message=message)
        return job

    def submit(self, record: Record, rundir: RunDir) -> ServiceJob:
        """Return the launch of this record in the service: made, or found where it is already. Raise `ClusterError`
        where the name is another's."""
        name = record["job_name"]
        found = self._find(name)
        if found is None:
            try:
                # The answer counts: for a while, a look may not find what was made just now.
                found = self._create(record, rundir)
            except ServiceRefused as error:  # also what is said of a name that exists
                found = self._find(name, self.options.start_seconds if _EXISTS.search(error.reason) else 0.0)
                if found is None:
                    raise
        if found.tags.get(TOKEN_TAG) != record["token"]:
            owner = found.tags.get(RUN_DIR_TAG, "somebody else")
            raise ClusterError(
                f"Azure ML has another job called {name} (of {owner}): start this one under another name, or once more "
                "under this one, which takes the next number"
            )
        return found

    def _find(self, name: str, seconds: float = 0.0) -> ServiceJob | None:
        """Return the job, or None where no look within so many seconds finds it."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(NotFound):  # of something that it does not name: no reason not to make the job
                if (found := self.get(name)) is not None:
                    return found
            if time.monotonic() > deadline:
                return None
            time.sleep(min(self.options.poll_seconds, 2.0))

    def _create(self, record: Record, rundir: RunDir) -> ServiceJob:
        home, secret = self._secret_of(record)
        details = {name: record[name] for name in ("job_id", "launch", "compute", "sku", "tier", "node_count")}
        with self.described(record, factories_of(rundir)) as (job, _):
            with contextlib.suppress(FileExistsError):  # of another orchestrator that submits the same launch
                open_storage(home).create(secret, secrets.token_hex(SECRET_BYTES).encode())
            with self.audit.operation("job.submit", record["job_name"], **details):
                made = self.service.call(
                    f"submit job {record['job_name']}", lambda: self.service.ml.jobs.create_or_update(job)
                )
        return ServiceJob(name=str(made.name), status="NotStarted", tags=made.tags or {}, studio_url=made.studio_url)

    @contextlib.contextmanager
    def described(self, record: Record, factories: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
        """Yield the job of a launch as the client takes it, and the files that are sent along: those of the trainer,
        and of the modules that ``factories`` name. They lie in a folder of their own within the block."""
        if not self.options.image:
            raise ClusterError(
                "DTRAIN_AZURE_IMAGE is not set: give the image that nodes run (deploy/azure has a Dockerfile), such as "
                "registry.azurecr.io/dtrain:1, or an environment of the workspace, such as azureml:dtrain:1"
            )
        with tempfile.TemporaryDirectory(prefix="dtrain-code-") as folder:
            try:
                files = stage_for_nodes(Path(folder), factories, self._script_of(record))
            except StagingError as error:
                raise ClusterError(str(error)) from error
            yield self._describe(record, folder), files

    def preview(self, record: Record, factories: Sequence[str]) -> Request:
        """Return the job of a launch, as the service would get it. Raise `ClusterError` as its submission does."""
        with self.described(record, factories) as (entity, files):
            listed = "\n  ".join(files)
            code = as_comment(f"code: these {len(files)} files are sent along:\n  {listed}")
            return Request(title=f"the job {record['job_name']}", form="yaml", text=f"{code}\n{entity_text(entity)}")

    def _script_of(self, record: Record) -> str:
        """Return the path of the script that goes along with a launch, "" if there is none. Raise `StagingError` where
        only another process knows it."""
        if record.get("has_script") and record["job_id"] not in self.scripts:
            raise StagingError(
                f"job {record['job_id']} runs a script that only the process which submitted it knows: start it again "
                "with `dtrain launch`, under another name"
            )
        return self.scripts.get(record["job_id"], "")

    def _describe(self, record: Record, folder: str) -> Any:
        from azure.ai.ml import command
        from azure.ai.ml.entities import CommandJobLimits, Environment, ManagedIdentityConfiguration

        image, client_id = self.options.image, self.options.identity_client_id
        made = command(
            name=record["job_name"],
            display_name=f"{record['job_id']}, launch {record['launch']}",
            experiment_name="dtrain",
            code=folder,
            command=command_line(record["command"]),
            environment=image if image.startswith("azureml:") else Environment(image=image),
            environment_variables=self._variables(record),
            compute=record["compute"],
            instance_count=record["node_count"],
            shm_size=shared_memory_of(record["processes_per_node"]),
            distribution={"type": "pytorch", "process_count_per_instance": record["processes_per_node"]},
            tags=tags(record),
            identity=ManagedIdentityConfiguration(client_id=client_id) if client_id else None,
        )
        made.limits = CommandJobLimits(timeout=LONGEST_JOB_SECONDS)
        return made

    def _variables(self, record: Record) -> dict[str, str]:
        told = Launch(
            number=record["launch"],
            is_elastic=bool(record["elastic"]),
            records_presence=True,
            secret_uri="/".join(self._secret_of(record)),  # only where: job variables are readable
        )
        own = {**told.variables(), "PYTHONUNBUFFERED": "1"}
        if account := os.environ.get(ACCOUNT_URL):  # an address, never a key
            own[ACCOUNT_URL] = account
        if self.options.identity_client_id:
            own["AZURE_CLIENT_ID"] = self.options.identity_client_id
        # Folders of this machine mean nothing on a node; the code that goes along is in the working directory there.
        asked = {name: value for name, value in record["env"].items() if name != "PYTHONPATH"}
        return {**node_environment_of(record["sku"]), **asked, **own}

    def _secret_of(self, record: Record) -> tuple[str, str]:
        """Return folder and name of the file with a launch's secret: beside the run directories, so that nothing copies
        or shows it, where a right to the container's data is needed to read it."""
        return f"{self.options.root_uri}/launch-secrets", record["job_name"]

    def end(self, job_name: str, reason: str, deadline: float) -> bool:
        """Cancel a job, and wait until the service says that it is over. Return False if it does not before the
        deadline (of `time.monotonic`)."""
        is_asked = False
        while (job := self.get(job_name)) is None or not job.is_over:
            if not is_asked:
                is_known = self.cancel(job_name, reason)
                if job is None and not is_known:  # two answers of two kinds; what runs all the same is listed again
                    return True
                is_asked = True
            elif time.monotonic() > deadline:
                return False
            time.sleep(min(self.options.poll_seconds, 2.0))
        return True

    def forget_secret(self, record: Record) -> None:
        """Remove the secret of a launch that is over; nothing happens where there is none, or storage fails."""
        folder, name = self._secret_of(record)
        with contextlib.suppress(OSError):
            open_storage(folder).delete(name)

    def cancel(self, name: str, why: str) -> bool:
        """Ask the service to end the job; nothing happens if it has ended. Return False where the service says that
        there is none."""
        with self.audit.operation("job.cancel", name, why=why), self.service.looking():  # whoever wants it asks again
            try:
                self.service.call(f"cancel job {name}", lambda: self.service.ml.jobs.begin_cancel(name))
            except NotFound:
                return False
            except ServiceRefused as error:
                if error.status not in (400, 409):  # what is over cannot be cancelled
                    raise
                found = self.get(name)
                if found is not None and not found.is_over:
                    raise
        return True

    def active(self) -> list[ServiceJob]:
        """Return the jobs of this cluster that have not ended, as the workspace lists them."""
        jobs = self._listed(tag=CLUSTER_TAG)
        return [job for job in jobs if job.tags.get(CLUSTER_TAG) == self.options.cluster_name and TAG in job.tags]

    def on_compute(self, compute: str) -> list[str]:
        """Return the names of all users' jobs that have not ended and run on this compute, or wait for it."""
        return [job.name for job in self._listed() if job.compute == compute]

    def _listed(self, **only: str) -> list[ServiceJob]:
        """Return the jobs of the workspace that have not ended."""
        found, oldest = [], time.time() - OLDEST_SECONDS
        for job in self.every_job(**only):  # newest first
            if job.created_at is not None and job.created_at < oldest:
                break
            found.append(job)
        return [job for job in found if not job.is_over]

    def every_job(self, **only: str) -> Iterator[ServiceJob]:
        """Yield the jobs of the workspace, of all kinds, archived ones too, in the service's order; ``only``: a filter
        of the service, such as ``tag``."""
        return map(read_job, self.service.read_all("list the jobs", self._path, listViewType="All", **only))

    @property
    def _path(self) -> str:
        return f"{self.options.workspace_id}/jobs"

    def logs(self, name: str, processes_per_node: int) -> dict[int, str]:
        """Return the output by node, see `by_node`; {} for a job that was never submitted, or that is deleted."""
        texts: dict[int, str] = {}
        try:
            listed = getattr(self._details(name), "log_files", None) or {}
        except NotFound:
            return {}
        for path, address in sorted(listed.items()):
            if match := _USER_LOG.search(path):
                with contextlib.suppress(NotFound):
                    data = self.service.call(f"read {path}", partial(_download, address))
                    texts[int(match[1] or 0)] = data.decode(errors="replace")
        return by_node(texts, processes_per_node)

    def _details(self, name: str) -> Any:
        # The run history is the one place that says why a job failed, and it knows where its logs are.
        return self.service.call(
            f"look at the history of {name}",
            lambda: self.service.ml.jobs._runs_operations.get_run_details(name),
        )

    def _why(self, name: str, ended_at: float | None) -> tuple[str, str]:
        """Return (code, message) of a job that failed. Raise `ServiceUnreachable` while its history is not there."""
        try:
            error = getattr(self._details(name), "error", None)
        except AttributeError:
            return "", ""
        except NotFound as gone:
            if ended_at is None or abs(time.time() - ended_at) > self.options.missing_seconds:
                return "", ""
            raise ServiceUnreachable(f"why job {name} failed is not known yet: {gone}", gone.code, 404) from gone
        root = getattr(error, "error", None)
        inner, code = getattr(root, "inner_error", None), str(getattr(root, "code", "") or "")
        while inner is not None:  # the innermost is the most precise
            code, inner = str(getattr(inner, "code", "") or code), getattr(inner, "inner_error", None)
        return code, str(getattr(root, "message", "") or "")


def _download(address: str) -> bytes:
    from azure.storage.blob import BlobClient

    return BlobClient.from_blob_url(address).download_blob().readall()  # it carries its own signature


def by_node(texts: Mapping[int, str], processes_per_node: int) -> dict[int, str]:
    """Return node → the output of its ranks, one after the other; several ranks each under a line that names it.
    Pure."""
    found: dict[int, str] = {}
    for rank, text in sorted(texts.items()):
        header = f"--- rank {rank} ---\n" if processes_per_node > 1 else ""
        node_id = rank // processes_per_node
        found[node_id] = found.get(node_id, "") + header + text.rstrip("\n") + "\n"
    return found


def shared_memory_of(ranks: int) -> str:
    """Return the most shared memory of a node's container, as Docker writes it, for its number of ranks.

    The service's own default is 2 GiB, of which NCCL between several GPUs of a node runs out. It is a limit and not a
    reservation: 8 GiB for each rank is below a tenth of the memory of every size with several GPUs.
    """
    return "2g" if ranks <= 1 else f"{8 * ranks}g"


def command_line(words: Sequence[str]) -> str:
    """Return one line for the node's shell. An interpreter of this machine becomes the image's own."""
    first, *rest = words
    if first == sys.executable or re.fullmatch(r"(.*/)?python[0-9.]*", first):
        first = "python"
    return shlex.join([first, *rest])


def tags(record: Record) -> dict[str, str]:
    """Return the tags of a launch in the service."""
    known = {
        TAG: "1",
        CLUSTER_TAG: record["cluster_name"],
        JOB_TAG: record["job_id"],
        LAUNCH_TAG: str(record["launch"]),
        TOKEN_TAG: record["token"],
        RUN_DIR_TAG: record["run_dir"],
        RUN_TAG: record["dagster_run_id"],
    }
    return {name: value for name, value in known.items() if value}


def read_job(found: Mapping[str, Any]) -> ServiceJob:
    """Return a job of any kind as the service sends it: what is needed is the same in all."""
    said: Mapping[str, Any] = found.get("properties") or {}
    return ServiceJob(
        name=str(found["name"]),
        status=str(said.get("status") or "Unknown"),
        ended_at=parse_time((said.get("properties") or {}).get("EndTimeUtc")),
        tags=said.get("tags") or {},
        studio_url=((said.get("services") or {}).get("Studio") or {}).get("endpoint"),
        compute=str(said.get("computeId") or "").rsplit("/", 1)[-1],
        created_at=parse_time((found.get("systemData") or {}).get("createdAt")),
    )


def parse_time(text: Any) -> float | None:
    """Return the Unix seconds of a time as the service writes it, with or without a zone (UTC then); None for none."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

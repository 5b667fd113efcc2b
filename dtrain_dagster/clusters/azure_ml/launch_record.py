"""``launch.json`` of a job on Azure ML: the request, and the launch that counts. It holds all lasting state.

Every change compares and swaps, so that of several orchestrators one decides; and a launch is written here before it is
bought, under the name under which the service then knows it. So what was bought can always be found.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.azure_ml.provision import Provisioned
from dtrain_dagster.clusters.azure_ml.sku_chain import SkuChoice
from dtrain_dagster.clusters.base import JobSpec
from trainer.documents import schemas
from trainer.documents.reader import DOCUMENT_BYTES, parse_document
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, RunDir

Record = dict[str, Any]
"""``launch.json``:

job_id, command, node_count, processes_per_node, env, elastic, cluster_name, sku, launch, token, submitted_at: as on the
local cluster. ``token``: marks this launch in the service.
has_script: whether a script of the user's goes along with the code.
run_dir, asked_nodes: nodes that were asked for; node_count is what this launch has.
tier, compute, job_name, studio_url: where it runs, and under which name the service knows it.
first_launch, first_submitted_at: since when its resubmissions are counted.
confirmed: the service was seen to have it.
missing_since: the first look since which the service does not know it.
cancel_asked_at; stopping: why this launch is being ended to go on elsewhere, nodes_ready: nodes that it had then.
excluded: kinds of nodes that did not come; retry_at, waiting_since: when capacity is asked for again, and since when.
history: the launches before this one: launch, job_name, sku, tier, node_count, submitted_at, ended_at, reason.
"""


class Launches:
    """The record of one job's launches."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir

    def read(self) -> tuple[bytes | None, Record | None]:
        """Return the document as bytes and as a record; (None, None) where there is none. Raise `DamagedError` where it
        is no record."""
        try:
            data = self.rundir.storage.read_bounded(LAUNCH, DOCUMENT_BYTES)
        except FileNotFoundError:
            return None, None
        name = f"{self.rundir.uri}/{LAUNCH}"
        record: Record = parse_document(data, name, schemas.DOCUMENTS[LAUNCH])
        if not {"missing_since", "missing_cancel"} & record.keys():
            raise DamagedError(name, "an older dtrain wrote it", "end its job in the studio, and start another one")
        record.setdefault("missing_since", None)  # the version before this one counted looks
        return data, record

    def compare_and_swap(self, before: bytes | None, record: Record) -> bool:
        """Write the record if the present document is still ``before``; return whether it was."""
        data = json.dumps(record, indent=2, sort_keys=True, allow_nan=False).encode()
        return self.rundir.storage.compare_and_swap(LAUNCH, before, data)

    def change(self, token: str, **fields: Any) -> Record | None:
        """Set these fields of the launch with this token. Return the new record, or None if another launch counts by
        now."""

        def apply(record: Record) -> Record | None:
            return {**record, **fields} if record["token"] == token else None

        return self.update(apply)

    def update(self, apply: Callable[[Record], Record | None]) -> Record | None:
        """Apply a change, again if another process was faster. Return None if it no longer applies."""
        while True:
            before, record = self.read()
            changed = apply(record) if record is not None else None
            if changed is None or changed == record or self.compare_and_swap(before, changed):
                return changed


def next_launch(
    before: Record | None, spec: JobSpec, got: Provisioned, cluster_name: str, run_id: str | None
) -> Record:
    """Return the launch with which a job begins, or is submitted again after it has failed or was cancelled.
    ``before``: its record, if it has one."""
    number, now = before["launch"] + 1 if before else 1, time.time()
    return {
        "job_id": spec.job_id,
        "run_dir": spec.run_dir,
        "cluster_name": cluster_name,
        "master_port": None,
        "command": [Path(word).name if word == spec.script else word for word in spec.command],
        "asked_nodes": spec.node_count,
        "processes_per_node": spec.processes_per_node,
        "env": dict(spec.env),
        "has_script": bool(spec.script),
        "elastic": spec.elastic,
        "dagster_run_id": run_id,
        "cancel_asked_at": None,
        "excluded": [],
        "launch": number,
        "first_launch": number,
        "first_submitted_at": before["first_submitted_at"] if before else now,
        "job_name": job_name(spec.job_id, number),
        "history": [*before["history"], past(before, "submitted again")] if before else [],
        **_where(got, now),
        "node_count": spec.node_count,
    }


def next_record(record: Record, got: Provisioned, why: str) -> Record:
    """Return the next launch of a job that has lost this one, on the nodes of ``got``."""
    number = record["launch"] + 1
    here = {"sku": got.sku, "tier": got.tier}
    in_vain = record["nodes_ready"] is not None and here not in record["excluded"]
    # One that never ran was not submitted again in the sense of the limit: the chain bounds these by itself.
    waited = {"first_launch": record["first_launch"] + 1, "waiting_since": record["waiting_since"]} if in_vain else {}
    return {
        **record,
        **_where(got, time.time()),
        "excluded": record["excluded"] if in_vain else [],
        "launch": number,
        "job_name": job_name(record["job_id"], number),
        "history": [*record["history"], past(record, why)],
        **waited,
    }


def past(record: Record, why: str) -> Record:
    """Return the entry of this launch for the history."""
    names = ("launch", "job_name", "sku", "tier", "compute", "node_count", "submitted_at", "studio_url")
    return {name: record.get(name) for name in names} | {"ended_at": time.time(), "reason": why}


def _where(got: Provisioned, now: float) -> Record:
    return {
        "sku": got.sku,
        "tier": got.tier,
        "compute": got.compute,
        "node_count": got.node_count,
        "token": uuid.uuid4().hex,
        "submitted_at": now,
        "studio_url": None,
        "confirmed": False,
        "stopping": "",
        "missing_since": None,
        "nodes_ready": None,
        "retry_at": None,
        "waiting_since": None,
    }


def job_name(job_id: str, launch: int) -> str:
    """Return the name of a launch in the service, the same for every caller, so that it is bought once.

    The service makes capitals small, so the name has none; and a changed id is marked, so that jobs whose ids differ
    only in that do not share a name.
    """
    name = re.sub(r"[^a-z0-9_-]", "-", job_id.lower())
    mark = "" if name == job_id else f"-{hashlib.sha256(job_id.encode()).hexdigest()[:6]}"
    return f"{name}{mark}-l{launch}"


def mark_of(job_id: str, launch: int) -> str:
    """Return the mark of a job that may run, from this launch on until it has ended (`clusters.job_marks`). A job that
    is submitted again after that gets another, so that a late removal of the old one hides nothing."""
    return f"{job_id}~{launch}"


def read_mark(mark: str) -> tuple[str, int]:
    """Return job and launch of a mark; launch 0 of one that names none."""
    job_id, _, launch = mark.rpartition("~")
    return (job_id, int(launch)) if job_id and launch.isdecimal() else (mark, 0)


def excluded(record: Record) -> set[SkuChoice]:
    """Return the kinds of nodes that were waited for in vain."""
    return {SkuChoice(**choice) for choice in record["excluded"]}


def exclude_own(record: Record) -> list[dict[str, str]]:
    """Return the kinds of nodes that are excluded, with this launch's own."""
    own = {"sku": record["sku"], "tier": record["tier"]}
    return record["excluded"] if own in record["excluded"] else [*record["excluded"], own]


def launch_durations(record: Record, now: float) -> dict[int, float]:
    """Return launch → seconds from its order to its end, or to now."""
    return {
        item["launch"]: max(0.0, (item.get("ended_at") or now) - item["submitted_at"])
        for item in [*record["history"], record]
    }

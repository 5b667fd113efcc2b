"""The records that the orchestrator adds to a job's run directory: ends of nodes, logs, attempts to get nodes."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.azure_ml.client import ServiceError
from dtrain_dagster.clusters.azure_ml.jobs import Jobs
from dtrain_dagster.clusters.azure_ml.launch_record import Record, kinds, launch_durations
from dtrain_dagster.clusters.azure_ml.states import Look
from dtrain_dagster.clusters.exit_policy import is_failure
from dtrain_dagster.costs.usage import NodeUsage
from trainer.documents.presences import stale_seconds
from trainer.documents.reader import LOG_BYTES
from trainer.errors import DamagedError
from trainer.rundir import LOGS, RunDir

PROVISIONING = "provisioning.json"
"""File of a run directory: for each launch, the attempts to get its nodes."""
LOG_TAIL_LINES = 12
SLACK_SECONDS = 300.0
"""Seconds that a node's record may have beyond the time between the order of its launch and its end, as seen from
here."""
_LOG = re.compile(r"node-(\d{1,9})\.log")


class JobRecords:
    """The orchestrator's records in one run directory."""

    def __init__(self, rundir: RunDir, jobs: Jobs) -> None:
        self.rundir, self.jobs = rundir, jobs
        self.stale = stale_seconds(rundir.storage)

    def note_attempts(self, launch: int, node_count: int, attempts: Collection[Any]) -> None:
        """Add the attempts to ``provisioning.json``."""
        if attempts:
            try:
                noted = self.rundir.read_json(PROVISIONING) or []
            except DamagedError:  # what was noted before is lost
                noted = []
            entry = {"launch": launch, "node_count": node_count, "attempts": list(attempts)}
            if entry not in noted:
                self.rundir.write_json(PROVISIONING, [*noted, entry])

    def usage(self, record: Record | None, running: bool, now: float) -> list[NodeUsage]:
        """Return every presence of a node as paid time, with the SKU and tier that were really bought."""
        bought = kinds(record) if record else {}
        launch = record["launch"] if record else 0
        lasted = launch_durations(record, now) if record else {}
        found = []
        for node in self.rundir.nodes():
            sku, tier = bought.get(node.launch) or (record["sku"] if record else "", None)
            here = running and node.launch == launch and presences.is_here(node, now, self.stale)
            end = presences.reached(node, now, self.stale) if here else presences.end_of(node)
            # A node keeps its own record: it cannot have been there for longer than its launch.
            most = lasted.get(node.launch, math.inf) + SLACK_SECONDS
            excess = max(0.0, end - node.started_at - most)
            found.append(
                NodeUsage(
                    node_id=node.node_id,
                    sku=sku,
                    started_at=node.started_at,
                    ended_at=end - excess,
                    tier=tier,
                    launch=node.launch,
                    not_billed_seconds=excess or node.clock_jump_seconds,
                )
            )
        return found

    def end_stays(self, look: Look) -> None:
        """Write the end of nodes that could not: a node heard of shortly before the job ended was present until then, a
        silent one until it was last heard of."""
        end = min(look.ended_at or time.time(), time.time())
        for node in self.rundir.nodes(skip_damaged=True):
            if node.ended_at is None:
                seen = presences.end_of(node)
                self.rundir.write_node(replace(node, ended_at=end if 0 <= end - seen < self.stale else seen))

    def keep_logs(self, record: Record) -> None:
        """Copy the logs of the processes into the run directory, once for each launch. A failure is no error."""
        header = f"--- launch {record['launch']}, {record['job_name']} ---"
        with contextlib.suppress(ServiceError, OSError):
            for node_id, text in self.printed(record).items():
                before = self.kept(node_id)
                if header not in before:
                    name = f"{LOGS}/node-{node_id}.log"
                    self.rundir.storage.write(name, f"{before}{header}\n{text.rstrip()}\n".encode())

    def printed(self, record: Record) -> dict[int, str]:
        """Return the output of a launch so far, by node, from the service. Raise `ServiceError` if it cannot be
        read."""
        texts = self.jobs.logs(record["job_name"], self.jobs.options.look_patience_seconds)
        return by_node(texts, record["processes_per_node"])

    def kept(self, node_id: int) -> str:
        """Return the kept output of ended launches on a node."""
        try:
            return self.rundir.storage.read_bounded(f"{LOGS}/node-{node_id}.log", LOG_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except DamagedError as error:
            return f"{error}\n"

    def kept_nodes(self) -> list[int]:
        """Return the nodes whose log is kept."""
        return sorted(int(match[1]) for name in self.rundir.storage.list(LOGS) if (match := _LOG.fullmatch(name)))

    def said(self, node_count: int) -> str:
        """Return the end of the log that most likely says why a job failed, for its message."""
        texts = {node_id: self.kept(node_id) for node_id in range(node_count)}
        failed = [node.node_id for node in self.rundir.nodes(True) if any(map(is_failure, node.exit_codes))]
        node_id = next((node_id for node_id in [*failed, *texts] if _has_words(texts.get(node_id, ""))), None)
        if node_id is None:
            return ""
        end = "\n".join(texts[node_id].splitlines()[-LOG_TAIL_LINES:])
        return f"; the end of the log of node {node_id}:\n{end}"


def _has_words(text: str) -> bool:
    """Return whether a log has more than headers. A rank that was killed because another one failed may have printed
    nothing."""
    return any(line and not line.startswith("--- ") for line in text.splitlines())


def by_node(texts: Mapping[int, str], processes_per_node: int) -> dict[int, str]:
    """Return node → the output of its ranks, one after the other; several ranks each under a line that names it.
    Pure."""
    found: dict[int, str] = {}
    for rank, text in sorted(texts.items()):
        header = f"--- rank {rank} ---\n" if processes_per_node > 1 else ""
        node_id = rank // processes_per_node
        found[node_id] = found.get(node_id, "") + header + text.rstrip("\n") + "\n"
    return found

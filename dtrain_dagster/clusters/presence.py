"""The presence of nodes, as recorded in the run directory: which nodes count now, their health, and when they ended.

The supervisor writes a presence, and its time is paid for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dtrain_dagster.clusters.base import NodeHealth
from dtrain_dagster.costs.usage import NodeUsage
from trainer.documents.presences import NodePresence
from trainer.elastic.generation_record import RECORD, read_nodes
from trainer.rundir import JOB, MEMBERSHIP, RunDir

_CANDIDACY = re.compile(r"n(\d{1,9})p\d{1,9}-[0-9a-f]+\.json")
"""Names of candidacies (`trainer.elastic.generation_record`), with node and local rank; other names are not ours."""
HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 5 * HEARTBEAT_SECONDS


def find_latest_presences(nodes: Iterable[NodePresence]) -> list[NodePresence]:
    """Return the last incarnation of each node of the last launch."""
    nodes = sorted(nodes, key=lambda node: (node.launch, node.incarnation))
    return list({node.node_id: node for node in nodes if node.launch == nodes[-1].launch}.values())


def end_of(node: NodePresence) -> float:
    """Return when a node ended, in Unix seconds; for a node whose supervisor died, when it was last seen."""
    return node.ended_at or node.last_seen_at or node.started_at


def is_here(node: NodePresence, now: float, stale: float) -> bool:
    """Return whether the node is present by its own record. A node silent for ``stale`` seconds is not."""
    return node.ended_at is None and now - node.heard_at(now) < stale


def reached(node: NodePresence, now: float, longest: float = STALE_SECONDS) -> float:
    """Return until when a present node is paid, in Unix seconds: now, by its own clock. It is at most ``longest``
    seconds after its last heartbeat, so that a clock which has just been set bills nothing."""
    return end_of(node) + min(max(0.0, now - node.heard_at(now)), longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGeneration:
    """The newest generation that the members have agreed on (`trainer.elastic.membership` writes it), reduced to its
    nodes."""

    number: int
    launch: int
    formed_at: float
    nodes: frozenset[int]
    asking: frozenset[int]
    """Nodes that ask to be in the next generation."""
    patience_seconds: float
    """Seconds for which a member may be silent, from ``job.json``."""

    def leaves_out(self, node: NodePresence) -> bool:
        """Return whether this node was present when the others continued without it, and has not asked to come back."""
        return (
            node.launch == self.launch
            and node.node_id not in self.nodes | self.asking
            and node.started_at < self.formed_at
        )


def newest_generation(rundir: RunDir) -> NodeGeneration | None:
    """Return the generation that counts, None if there is none yet. Raise `DamagedError` where its file is no
    record."""
    names = [name for name in rundir.storage.list(MEMBERSHIP) if RECORD.fullmatch(name)]
    record = read_nodes(rundir.storage, names[-1]) if names else None
    if record is None:
        return None
    candidates = rundir.storage.list(f"{MEMBERSHIP}/g{record['number'] + 1:06d}")
    training = (rundir.read_json(JOB) or {}).get("training", {})
    return NodeGeneration(
        number=record["number"],
        launch=record["launch"],
        formed_at=record["formed_at"],
        nodes=record["nodes"],
        asking=frozenset(int(match[1]) for name in candidates if (match := _CANDIDACY.fullmatch(name))),
        patience_seconds=float(training.get("peer_timeout_seconds", 60.0)),
    )


def usage(
    nodes: Sequence[NodePresence], sku: str, running: bool, now: float, stale: float = math.inf
) -> list[NodeUsage]:
    """Return every presence as paid time; if the job is ``running``, a node still present counts until now. ``stale``:
    see `is_here`."""
    here = set(find_latest_presences(nodes)) if running else set()
    longest = stale if math.isfinite(stale) else STALE_SECONDS
    return [
        NodeUsage(
            node_id=node.node_id,
            sku=sku,
            started_at=node.started_at,
            ended_at=reached(node, now, longest) if node in here and is_here(node, now, stale) else end_of(node),
            launch=node.launch,
            not_billed_seconds=node.clock_jump_seconds,
            preflight_until=node.started_at + node.preflight_seconds if node.preflight_seconds else None,
            kept_since=node.kept_since,
        )
        for node in nodes
    ]


def health(job_id: str, node: NodePresence, now: float, generation: NodeGeneration | None = None) -> NodeHealth:
    """Return the health of a node of a running job; ``generation``: the newest of that job."""
    if node.ended_at is not None:
        left = f"left {job_id} with exit codes {', '.join(map(str, node.exit_codes))}"
        return NodeHealth(node_id=node.node_id, healthy=not any(node.exit_codes), message=left)
    if node.kept_since is not None:
        return NodeHealth(node_id=node.node_id, healthy=False, message=f"failed in {job_id} and is kept for a person")
    silent = now - node.heard_at(now)
    if silent > STALE_SECONDS:
        return NodeHealth(node_id=node.node_id, healthy=False, message=f"silent for {silent:.0f} s in {job_id}")
    if generation and generation.leaves_out(node):
        message = f"the others of {job_id} go on without it (generation {generation.number}): it does not answer"
        return NodeHealth(node_id=node.node_id, healthy=False, message=message)
    replaces = f", in the place of one that was lost (incarnation {node.incarnation})" if node.incarnation > 1 else ""
    return NodeHealth(node_id=node.node_id, healthy=True, message=f"works on {job_id}{replaces}")


def job_health(rundir: RunDir, job_id: str, now: float) -> list[NodeHealth]:
    """Return the health of each node of a running job, in its newest incarnation. Raise `DamagedError` where that
    cannot be read."""
    newest = newest_generation(rundir)
    return [health(job_id, node, now, newest) for node in find_latest_presences(rundir.nodes())]


def close(rundir: RunDir, ended_at: float | None = None) -> None:
    """Write the end of nodes whose supervisor could not: at ``ended_at``, or when they were last seen."""
    for node in rundir.nodes(skip_damaged=True):
        if node.ended_at is None:
            rundir.write_node(replace(node, ended_at=end_of(node) if ended_at is None else ended_at))

"""The autoscaler of a compute: how many nodes are wanted (pure), and what is done about it on each tick."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from harness.azure.emulator.state import Cloud, Compute, Node, Stay, quota_of, total_quota_of, used_cores


def wanted_nodes(minimum: int, maximum: int, busy: int, asked: Sequence[int]) -> int:
    """For the jobs that run and, in their order, those that wait (``asked`` nodes each)."""
    wanted = busy
    for count in asked:
        if wanted + count > maximum:
            break  # the queue is first in, first out: what is behind waits too
        wanted += count
    return max(minimum, min(maximum, wanted))


def to_release(nodes: Sequence[Node], wanted: int, maximum: int, idle_seconds: float, now: float) -> list[Node]:
    """Idle nodes: beyond ``wanted`` those idle for long enough, beyond ``maximum`` any; the longest idle first."""
    idle = sorted((node for node in nodes if node.state == "idle"), key=lambda node: node.since)
    spare, over = len(nodes) - wanted, len(nodes) - maximum
    return [
        node for place, node in enumerate(idle) if place < over or (place < spare and now - node.since >= idle_seconds)
    ]


def tick_computes(cloud: Cloud, waiting: dict[str, list[int]]) -> None:
    """``waiting``: how many nodes each queued job asks for, by compute, in order."""
    now = cloud.clock.now()
    for compute in cloud.computes.values():
        _let_go(cloud, compute, now)
        for node in compute.nodes:
            if node.state == "preparing" and now - node.since >= cloud.timing.boot_seconds:
                node.state, node.since = "idle", now
        if compute.state != "Succeeded" or compute.refusals:
            continue
        busy = sum(node.state == "running" for node in compute.nodes)
        wanted = wanted_nodes(compute.min_nodes, compute.max_nodes, busy, waiting.get(compute.name, []))
        missing = wanted - len(compute.usable)
        if missing > 0:
            if now - compute.asked >= cloud.timing.allocation_retry_seconds:
                _allocate(cloud, compute, missing, now)
        else:
            compute.allocation_errors, compute.asked = [], 0.0
        for node in to_release(compute.usable, wanted, compute.max_nodes, compute.idle_seconds, now):
            set_state(compute, node, "leaving", now)


def _let_go(cloud: Cloud, compute: Compute, now: float) -> None:
    for node in list(compute.nodes):
        if node.state == "leaving" and now - node.since >= cloud.timing.leave_seconds:
            drop(cloud, compute, node)
        elif node.state in ("unusable", "preempted") and now - node.since >= cloud.timing.unusable_seconds:
            compute.nodes.remove(node)


def _allocate(cloud: Cloud, compute: Compute, missing: int, now: float) -> None:
    """Ask for nodes: what the quota and the capacity of the day give, which may be some of them."""
    size = cloud.sizes[compute.vm_size]
    free = quota_of(cloud, size.family, compute.tier) - used_cores(cloud, size.family, compute.tier)
    if compute.tier == "dedicated":
        used = sum(used_cores(cloud, family, "dedicated") for family in {size.family for size in cloud.sizes.values()})
        free = min(free, total_quota_of(cloud, "dedicated") - used)
    by_quota = max(0, free // size.vcpus)
    capacity = cloud.faults.capacity(compute.vm_size, compute.tier, compute.name, now)
    by_capacity = max(0, capacity - len(compute.usable))
    given = min(missing, by_quota, by_capacity)
    compute.asked = now if given < missing else 0.0
    compute.allocation_errors = []
    if by_quota < missing:
        why = f"Cluster core quota reached: {size.family} has {free} vCPUs left, {missing} nodes need more."
        compute.allocation_errors = [allocation_error("ClusterCoreQuotaReached", why)]
    elif given < missing:
        why = f"Allocation failed: there is no capacity for {compute.vm_size} ({compute.tier}) in this region now."
        compute.allocation_errors = [allocation_error("AllocationFailed", why)]
    for _ in range(given):
        add_node(cloud, compute)


def allocation_error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "target": None, "details": [], "additionalInfo": []}}


def add_node(cloud: Cloud, compute: Compute) -> Node:
    now = cloud.clock.now()
    node = Node(
        id=f"tvmps_{uuid.uuid4().hex}_{'p' if compute.tier == 'low_priority' else 'd'}",
        number=compute.numbered,
        state="preparing",
        since=now,
        allocated=now,
    )
    compute.numbered += 1
    compute.nodes.append(node)
    compute.allocation_changed = now
    cloud.stays.append(Stay(compute=compute.name, node=node.id, vm_size=compute.vm_size, tier=compute.tier, start=now))
    return node


def stay_of(cloud: Cloud, node: Node) -> Stay:
    return next(stay for stay in reversed(cloud.stays) if stay.node == node.id)


def drop(cloud: Cloud, compute: Compute, node: Node) -> None:
    """The node is gone, and no longer paid for."""
    compute.nodes.remove(node)
    compute.allocation_changed = cloud.clock.now()
    end_stay(cloud, node)


def end_stay(cloud: Cloud, node: Node) -> None:
    now, stay = cloud.clock.now(), stay_of(cloud, node)
    if stay.end is None:
        stay.end = now
    for entry in stay.jobs:
        if entry[2] is None:
            entry[2] = now


def set_state(compute: Compute, node: Node, state: str, now: float) -> None:
    node.state, node.since = state, now
    compute.allocation_changed = now

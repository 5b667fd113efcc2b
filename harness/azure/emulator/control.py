"""The control port: plain HTTP on loopback, apart from the ARM surface. Verbs take a JSON object and answer with one.

=============  =====================================================================================================
``clock``      ``advance_seconds``: move the emulator's clock forward; answers ``now`` (seconds since the epoch)
``fault``      one fault, or ``faults``: a list of them (see `harness.azure.emulator.faults`); answers with all
``faults``     the faults: what they are, how often they struck, how often they still will
``renew``      a workspace as it is after the start, with empty storage, at the same addresses
``clear``      forget all faults and quotas, what was denied, and how datastores reach storage
``timing``     change how long things take (fields of `state.Timing`); answers with all of them
``datastore``  ``auth``: ``key``, ``sas`` or ``identity``, how the workspace's datastores reach the storage account
``grant``      ``actions``: patterns of actions (``*/listKeys/action``) that each identity has beside its roles
``deny``       ``actions``: patterns of actions (``*/jobs/write``) that no identity has from now on
``quota``      ``family`` (or ``low_priority``, ``dedicated``: see `state.Cloud.quota`) and ``cores``: change a quota
``bought``     what was bought: node-minutes by compute and by job, and each node's stay
``requests``   what was asked of the ARM surface, ``operation`` (a pattern) narrows it
``state``      computes with their nodes, and jobs, as they are now
=============  =====================================================================================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from fastapi import APIRouter, Request

from harness.azure.emulator.answers import Refusal
from harness.azure.emulator.state import Cloud
from harness.azure.emulator.storage import DATASTORE_AUTHS


def control_routes(cloud: Cloud, tick: Callable[[], None], renew: Callable[[], None]) -> APIRouter:
    router = APIRouter()
    verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
        "clock": lambda asked: _clock(cloud, tick, asked),
        "fault": lambda asked: _fault(cloud, asked),
        "faults": lambda asked: [fault.describe() for fault in cloud.faults.all],
        "renew": lambda asked: renew(),
        "clear": lambda asked: _clear(cloud),
        "timing": lambda asked: _timing(cloud, asked),
        "datastore": lambda asked: _datastore_auth(cloud, asked["auth"]),
        "grant": lambda asked: _grant(cloud, asked["actions"]),
        "deny": lambda asked: _deny(cloud, asked["actions"]),
        "quota": lambda asked: _quota(cloud, asked),
        "bought": lambda asked: bought(cloud),
        "requests": lambda asked: _requests(cloud, asked.get("operation", "*")),
        "state": lambda asked: _state(cloud),
    }

    @router.post("/control/{verb}")
    async def control(verb: str, request: Request) -> dict[str, Any]:
        asked = json.loads(await request.body() or b"{}")
        if verb not in verbs:
            raise Refusal(404, "UnknownVerb", f"{verb!r} is no verb; there are: {', '.join(verbs)}")
        try:
            return {"result": verbs[verb](asked)}
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(400, "BadRequest", f"{type(error).__name__}: {error}") from error

    return router


def _clock(cloud: Cloud, tick: Callable[[], None], asked: dict[str, Any]) -> dict[str, float]:
    cloud.clock.advance(float(asked.get("advance_seconds", 0)), tick)
    return {"now": cloud.clock.now()}


def _fault(cloud: Cloud, asked: dict[str, Any]) -> list[dict[str, Any]]:
    for spec in asked.get("faults", [asked]):
        cloud.faults.add(spec, cloud.clock.now())
    return [fault.describe() for fault in cloud.faults.all]


def _datastore_auth(cloud: Cloud, auth: str) -> str:
    if auth not in DATASTORE_AUTHS:
        raise ValueError(f"{auth!r} is none of {', '.join(DATASTORE_AUTHS)}")
    cloud.datastore_auth = auth
    return auth


def _grant(cloud: Cloud, actions: list[str]) -> list[str]:
    cloud.granted = actions
    return actions


def _deny(cloud: Cloud, actions: list[str]) -> list[str]:
    cloud.denied = actions
    return actions


def _clear(cloud: Cloud) -> None:
    cloud.granted, cloud.denied, cloud.datastore_auth = [], [], "key"
    cloud.faults.clear()
    cloud.quota.clear()


def _timing(cloud: Cloud, asked: dict[str, Any]) -> dict[str, Any]:
    for name, value in asked.items():
        if name not in {field.name for field in dataclasses.fields(cloud.timing)}:
            raise ValueError(f"there is no timing {name!r}")
        setattr(cloud.timing, name, value)
    return dataclasses.asdict(cloud.timing)


def _quota(cloud: Cloud, asked: dict[str, Any]) -> dict[str, int]:
    cloud.quota[asked["family"]] = int(asked["cores"])
    return cloud.quota


def _requests(cloud: Cloud, pattern: str) -> list[dict[str, Any]]:
    return [dataclasses.asdict(seen) for seen in cloud.requests if fnmatchcase(seen.operation, pattern)]


def _state(cloud: Cloud) -> dict[str, Any]:
    return {
        "now": cloud.clock.now(),
        "computes": {
            compute.name: {
                "state": compute.state,
                "vm_size": compute.vm_size,
                "tier": compute.tier,
                "nodes": [dataclasses.asdict(node) for node in compute.nodes],
            }
            for compute in cloud.computes.values()
        },
        "jobs": {job.name: job.summary() for job in cloud.jobs.values()},
    }


def bought(cloud: Cloud) -> dict[str, Any]:
    """Node-minutes by the emulator's clock. ``alive_nodes``: those that cost money now. A job's minutes are those of
    its nodes while they were its own; a compute's are all, the idle ones too."""
    now = cloud.clock.now()
    computes: dict[str, float] = {}
    jobs: dict[str, float] = dict.fromkeys(cloud.jobs, 0.0)
    for stay in cloud.stays:
        computes[stay.compute] = computes.get(stay.compute, 0.0) + stay.minutes(now)
        for name, start, end in stay.jobs:
            jobs[name] = jobs.get(name, 0.0) + ((now if end is None else end) - start) / 60
    return {
        "now": now,
        "alive_nodes": sum(stay.end is None for stay in cloud.stays),
        "node_minutes": sum(computes.values()),
        "computes": computes,
        "jobs": {
            name: {"node_minutes": minutes, "launches": cloud.jobs[name].launches, "ended": cloud.jobs[name].ended}
            for name, minutes in jobs.items()
        },
        "stays": [dataclasses.asdict(stay) for stay in cloud.stays],
    }

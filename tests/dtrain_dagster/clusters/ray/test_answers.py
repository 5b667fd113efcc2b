"""What Ray's lists of actors mean."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.ray import engine
from dtrain_dagster.clusters.ray.engine import RayEngine, read_actor
from dtrain_dagster.clusters.supervision.engine import EngineJob, EngineUnreachableError, name_job
from dtrain_dagster.settings.ray import RaySettings

NAME = name_job({"token": "ab" * 24, "launch": 1}, 2, 3)
HEAD, WORKER = {"CPU": 0.0}, {"CPU": 8.0, "GPU": 1.0}


def read(state: str, code: int | None = None, why: str = "", **demand: float) -> EngineJob:
    actor: dict[str, Any] = {"name": NAME, "state": state, "host": "m1", "why": why}
    found = read_actor(actor, [HEAD, WORKER], code, demand)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ({"CPU": 8.0}, "no machine is free"),
        ({"CPU": 64.0}, "no machine is large enough (CPU 64, the largest has 8): lower DTRAIN_NODE_CPUS, or add one"),
        ({"CPU": 1.0, "GPU": 2.0}, "(GPU 2, the largest has 1): lower DTRAIN_NODE_GPUS"),
        ({"fast": 1.0}, "(fast 1, the largest has 0): lower resources in DTRAIN_RAY_OPTIONS"),
    ],
)
def test_what_waits_says_why(demand: dict[str, float], said: str) -> None:
    waits = read("PENDING_CREATION", **demand)
    assert (waits.node_id, waits.incarnation, waits.state) == (2, 3, "pending")
    assert said in waits.reason


@pytest.mark.parametrize(
    ("code", "why", "lost", "cause"),
    [
        (143, "", False, ""),
        (None, "The actor is dead because its node has died.", True, "machine"),
        (None, "The node was low on memory.", True, "program"),
        (None, "It was killed by `ray.kill`.", True, "taken"),
    ],
)
def test_an_end_without_a_code_is_a_loss(code: int | None, why: str, lost: bool, cause: str) -> None:
    ended = read("DEAD", code, why)
    assert (ended.state, ended.exit_code, ended.lost, ended.cause) == ("ended", code, lost, cause)
    assert read("ALIVE").state == "running"


def test_actors_of_others_are_none_of_ours() -> None:
    assert read_actor({"name": "somebody-elses", "state": "ALIVE", "host": "", "why": ""}, [], None, {}) is None


def test_a_driver_that_dies_is_told_and_not_started_again_for_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def start(command: list[str], **named: Any) -> Any:
        started.append(popen(["false"], **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with socket.create_server(("127.0.0.1", 0)) as head:
        asked = RayEngine(RaySettings(address=f"127.0.0.1:{head.getsockname()[1]}"), str(tmp_path), lambda *_: ())
        for _ in range(3):
            with pytest.raises(EngineUnreachableError, match="its driver has ended; is it there"):
                asked.list_jobs({"token": "ab" * 24, "launch": 1})
        assert len(started) == 1, "a pause follows"
        monkeypatch.setattr(engine, "AGAIN_SECONDS", 0.0)
        with pytest.raises(EngineUnreachableError):
            asked.list_jobs({"token": "ab" * 24, "launch": 1})
        assert len(started) == 2

"""Faults that tests inject happen where they were asked for, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harness.waiting import until
from harness.worlds import FORKS
from trainer.config import ConfigError
from trainer.engine.out_of_memory import is_out_of_memory
from trainer.runtime.fault_injection import Faults, InjectedError
from trainer.runtime.launch import Launch


def faults(*listed: dict[str, Any], node: int = 0, stay: int = 1) -> Faults:
    environment = {"DTRAIN_FAULTS": json.dumps(listed)}
    return Faults({**environment, **Launch(incarnation=stay).variables()}, node)


RAISE = {"kind": "raise", "at": "forward", "step": 3, "node": 0}


def happened(found: Faults, *reached: tuple[str, int]) -> list[tuple[str, int]]:
    """Where it raised."""
    places = []
    for at, step in reached:
        try:
            found.reach(at, step)  # type: ignore[arg-type]
        except (InjectedError, torch.OutOfMemoryError):
            places.append((at, step))
    return places


def test_a_fault_happens_once_at_its_point_of_its_step() -> None:
    everywhere = [(at, step) for step in range(6) for at in ("forward", "backward", "forward")]
    assert happened(faults(RAISE), *everywhere) == [("forward", 3)]
    assert happened(faults(RAISE, RAISE), *everywhere) == [("forward", 3)] * 2, "once each, one at a time"
    always = {name: value for name, value in RAISE.items() if name != "step"}
    assert happened(faults(always), *everywhere) == [("forward", 0)], "without a step: the first time"


def test_one_that_is_to_happen_every_time_does() -> None:
    places = [(at, step) for step in range(3) for at in ("input", "forward")]
    always = {**RAISE, "at": "input", "every": True}
    assert happened(faults(always), *places) == [], "in its step"
    del always["step"]
    assert happened(faults(always), *places) == [("input", 0), ("input", 1), ("input", 2)]


def test_a_sleep_ends_with_a_file(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with ThreadPoolExecutor(1) as pool:
        sleep = {"kind": "sleep", "at": "forward", "node": 0, "seconds": 60.0, "until": str(go)}
        sleeper = pool.submit(faults(sleep).reach, "forward", 0)
        with pytest.raises(TimeoutError):
            sleeper.result(0.2)
        go.touch()
        sleeper.result(30.0)


def test_it_happens_to_its_node_in_its_first_stay_only() -> None:
    assert happened(faults(RAISE, node=1), ("forward", 3)) == []
    assert happened(faults(RAISE, stay=1), ("forward", 3)) == [("forward", 3)]
    assert happened(faults(RAISE, stay=2), ("forward", 3)) == []
    assert happened(Faults({}, 0), ("forward", 3)) == []
    assert happened(Faults({"DTRAIN_FAULTS": ""}, 0), ("forward", 3)) == []


def test_an_injected_lack_of_memory_is_taken_for_one() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        faults({**RAISE, "kind": "oom"}).reach("forward", 3)
    assert is_out_of_memory(raised.value)
    with pytest.raises(InjectedError) as injected:
        faults(RAISE).reach("forward", 3)
    assert not is_out_of_memory(injected.value)


@pytest.mark.parametrize("wrong", [{**RAISE, "kind": "flood"}, {**RAISE, "at": "lunch"}, {"node": 0}])
def test_what_cannot_be_injected_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"DTRAIN_FAULTS holds .*kinds: .*points: "):
        faults(wrong)
    with pytest.raises(ConfigError):
        faults(wrong, node=7, stay=2)


def be_victim(fault: dict[str, Any], said: str) -> None:
    """The life of a forked process to which a fault happens; it writes into the file ``said`` what comes of it."""
    os.setpgid(0, 0)  # a fault happens to the whole group
    with open(said, "w") as file:
        signal.signal(signal.SIGTERM, lambda *_: print("asked to end", file=file, flush=True))
        Faults({"DTRAIN_FAULTS": json.dumps([fault])}, 2).reach("optimizer", 5)
        print("went on", file=file)


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("kill", -signal.SIGKILL, ""), ("sigterm", 0, "asked to end\nwent on\n"), ("sleep", 0, "went on\n"),
        ("stop", 0, "went on\n"),
    ],
)  # fmt: skip
def test_signals_reach_a_real_process(tmp_path: Path, kind: str, code: int, said: str) -> None:
    """A frozen one goes on when its time is over."""
    fault = {"kind": kind, "at": "optimizer", "step": 5, "node": 2, "seconds": 0.5}
    victim = FORKS.Process(target=be_victim, args=(fault, str(tmp_path / "said")))
    victim.start()
    try:
        if kind == "stop":
            until(lambda: psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED)
        victim.join(60)
        assert (victim.exitcode, (tmp_path / "said").read_text()) == (code, said)
    finally:
        victim.kill()

"""Loops of a caller's own in worlds of real processes: at any number of ranks, and whichever are killed, the weights
are the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fit_jobs import Scripts
from loop_jobs import LOOPS

from harness.worlds import assert_same_training
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module", params=LOOPS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    """A loop that nothing disturbed, in a world of one."""
    scripts = Scripts(tmp_path_factory.mktemp("whole") / "run")
    scripts.kind = request.param  # type: ignore[attr-defined]
    scripts.start(script=LOOPS[request.param])
    assert scripts.wait() == [0], scripts.log()
    return scripts


@pytest.fixture
def scripts(whole: Any, tmp_path: Path) -> Iterator[Any]:
    made = Scripts(tmp_path / "run")
    made.kind = whole.kind  # type: ignore[attr-defined]
    yield made
    made.kill()


def test_worlds_of_any_size_train_the_same(whole: Scripts, scripts: Any) -> None:
    assert scripts.start(3, script=LOOPS[scripts.kind]).wait() == [0, 0, 0], scripts.log()
    assert_same_training(scripts, whole)


@pytest.mark.parametrize(("at", "step"), [("backward", 4), ("optimizer", 5)])
def test_a_node_is_killed_and_the_others_go_on(whole: Scripts, scripts: Any, at: str, step: int) -> None:
    """Within a pass, and between the agreement on a step and its update: of a GAN, when its critic has stepped."""
    fault = {"kind": "kill", "at": at, "step": step, "node": 1}
    codes = scripts.start(3, faults=(fault,), launch=True, script=LOOPS[scripts.kind]).wait()
    assert codes == [0, KILLED, 0], scripts.log()
    assert_same_training(scripts, whole)
    assert [item["world_size"] for item in RunDir(str(scripts.run_dir)).events("membership")] == [3, 2]


def test_what_is_resumed_after_a_kill_equals_bit_for_bit(whole: Scripts, scripts: Any) -> None:
    fault = {"kind": "kill", "at": "backward", "step": 7, "node": 0}
    assert scripts.start(faults=(fault,), script=LOOPS[scripts.kind]).wait() == [KILLED], scripts.log()
    assert scripts.start(script=LOOPS[scripts.kind]).wait() == [0], scripts.log()
    assert scripts.result()["weights_sha256"] == whole.result()["weights_sha256"]

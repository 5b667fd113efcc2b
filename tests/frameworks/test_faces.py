"""Scripts that train by the names of a framework, started as their documents start them: each learns what DDP does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.worlds import free_port
from tests.frameworks.strategy_jobs import needs
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "face_script.py"


def environment(home: Path) -> dict[str, str]:
    """This one's, without what launchers set."""
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    return {**kept, "PYTHONPATH": str(ROOT), "DTRAIN_HOME": str(home), "DAGSTER_HOME": str(home / "dagster")}


def torchrun(ranks: int) -> list[str]:
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *master]


def start(command: list[str], run_dir: Path, face: str, **options: Any) -> list[dict[str, Any]]:
    """Run the script until it ends; what each rank has said."""
    given = [*command, str(SCRIPT), str(run_dir), face, json.dumps(options)]
    done = subprocess.run(given, env=environment(run_dir.parent), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(found) for found in re.findall(r"said (\{.*?\})", done.stdout)]  # ranks share lines at times


def losses(run_dir: Path) -> dict[int, float]:
    return {item["step"]: item["loss"] for item in RunDir(str(run_dir)).events("step")}


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training of two ranks by DDP."""
    run_dir = tmp_path_factory.mktemp("ddp") / "run"
    said = start(torchrun(2), run_dir, "PyTorchDDPTrainer", num_gpus=2)
    assert [item["steps"] for item in said] == [12, 12]
    assert all(item["accuracy"] > 0.8 for item in said), said
    return run_dir


def assert_equal(run_dir: Path, other: Path, tolerance: float) -> None:
    """The same losses in each step, and the same weights in the end."""
    mine, theirs = losses(run_dir), losses(other)
    assert mine.keys() == theirs.keys()
    assert len(mine) == 12
    assert max(abs(mine[step] - theirs[step]) for step in mine) <= tolerance
    saved, expected = (torch.load(one / "model" / "weights.pt", weights_only=True) for one in (run_dir, other))
    assert max(float((saved[name] - expected[name]).abs().max()) for name in expected) <= tolerance


@needs("horovod.torch")
def test_horovod_under_torchrun(by_ddp: Path, tmp_path: Path) -> None:
    said = start(torchrun(2), tmp_path / "run", "HorovodTrainer")
    assert [item["mean"] for item in said] == [0.5, 0.5]
    assert_equal(tmp_path / "run", by_ddp, 1e-6)


@needs("horovod.torch")
@pytest.mark.parametrize("script_init", [True, False])
def test_horovod_under_horovodrun(by_ddp: Path, tmp_path: Path, script_init: bool) -> None:
    """The ranks, and where they are, come from horovodrun; a Horovod that the script has started is used as it is."""
    program = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    assert program
    command = [sys.executable, program, "--gloo", "-np", "2", "--network-interfaces", "lo", sys.executable]
    said = start(command, tmp_path / "run", "HorovodTrainer", script_init=script_init)
    assert [item["mean"] for item in said] == [0.5, 0.5]
    assert_equal(tmp_path / "run", by_ddp, 1e-6)


@needs("deepspeed")
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3},
        {"deepspeed_config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
    ],
)
def test_deepspeed_by_its_stage_or_its_own_configuration(by_ddp: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    said = start(torchrun(2), tmp_path / "run", "PyTorchDDPTrainer", **options)
    assert all(item["accuracy"] > 0.8 for item in said), said
    assert RunDir(str(tmp_path / "run")).read_job().training.strategy == "deepspeed"
    assert_equal(tmp_path / "run", by_ddp, 1e-5)


@needs("horovod.torch")
def test_a_script_of_ddp_trains_with_horovod_by_one_switch(by_ddp: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-c", "from dtrain_dagster.cli.main import main; main()", "train",
        "--backend", "horovod", "--nodes", "2", "--name", "switched", "--script",
    ]  # fmt: skip
    given = [*command, str(SCRIPT), "--", "unused", "PyTorchDDPTrainer", "{}"]
    done = subprocess.run(given, env=environment(tmp_path), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    [run_dir] = tmp_path.glob("**/switched/job.json")
    assert RunDir(str(run_dir.parent)).read_job().training.strategy == "horovod"
    assert_equal(run_dir.parent, by_ddp, 1e-6)

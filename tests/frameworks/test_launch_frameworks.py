"""Programs that know nothing of dtrain, each under its framework, on the local cluster; `make test-engines` runs them.

The scripts are those of examples/frameworks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks.shell import Shell, needs
from trainer.frameworks.ray import NAME_PREFIX
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@needs("horovod")
def test_horovod_sums_over_the_ranks_of_two_nodes(shell: Shell):
    said = shell.launch("horovod", "h", "horovod_script.py")
    assert "[node 0] rank 0 of 2, 0 of 1 on node 0" in said
    assert "[node 1] rank 1 of 2, 0 of 1 on node 1" in said
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 3
    ends = dict(re.findall(r"rank (\d) loss [\d.]+ weights ([0-9a-f]{16})", said))
    assert ends["0"] == ends["1"], "ranks with other samples and other first weights end with the same weights"
    shell.assert_accounted("h", nodes=2)


@needs("horovod")
def test_a_rank_of_horovod_that_fails_ends_the_job_with_its_exit_code(shell: Shell):
    said = shell.launch("horovod", "h", "horovod_script.py", "--fail-at", "11", code=7)
    assert "job h failed: rank 1 on node 1 failed first (exit code 7)" in said
    assert "step 10 loss" in said, "it was under way"


@needs("horovod")
def test_a_job_of_horovod_is_cancelled_as_any_other(shell: Shell):
    script = [str(Path("examples/frameworks/horovod_script.py").absolute()), "--steps", "100000000"]
    assert shell("launch", "--engine", "horovod", "--nodes", "2", "--name", "c", "--detach", *script).startswith("c\n")
    shell.wait_for("c", "step 0 loss")
    assert "running" in shell("status", "c")
    assert shell("cancel", "c") == "job c: cancelled\n"
    assert shell.left() == []


@needs("deepspeed")
@pytest.mark.parametrize("options", [["--zero", "1"], ["--zero", "2", "--offload"], ["--zero", "3", "--offload"]])
def test_deepspeed_trains_with_zero_and_offload(shell: Shell, options: list[str]):
    said = shell.launch("deepspeed", "d", "deepspeed_script.py", *options, "--folder", str(shell.folder / "saved"))
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", said)]
    assert losses[-1] < losses[0]
    ends = re.findall(r"rank (\d) of 2 ZeRO (\d) loss ([\d.]+)", said)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"]
    assert {stage for _, stage, _ in ends} == {options[1]}
    assert len({loss for *_, loss in ends}) == 1
    assert list((shell.folder / "saved").glob("*/*rank_1*")), "each rank wrote its part"
    shell.assert_accounted("d", nodes=2)


@needs("ray")
def test_ray_train_runs_once_beside_a_ray_of_the_job_and_leaves_nothing(shell: Shell, short_folder: Path):
    shell.env["TMPDIR"] = str(short_folder)
    said = shell.launch("ray", "r", "ray_script.py", "--workers", "2", "--folder", str(shell.folder / "results"))
    assert said.count("Ray with 1 nodes at 127.0.0.1:") == 1, "the script ran once, beside a Ray on loopback"
    assert {f"worker {rank} of 2" for rank in range(2)} <= set(re.findall(r"worker \d of \d", said))
    assert re.search(r"loss 0\.\d+ checkpoint ", said)
    assert list((shell.folder / "results").glob("**/weights.pt"))
    assert not list(short_folder.glob(f"{NAME_PREFIX}*"))
    shell.assert_accounted("r", nodes=2)


@needs("ray")
def test_a_script_of_ray_that_fails_is_the_one_that_is_named(shell: Shell):
    said = shell.launch("ray", "r", "ray_script.py", "--fail", code=1)
    assert "job r failed: rank 0 on node 0 failed first (exit code 1)" in said
    assert "the worker was asked to fail" in said


@needs("ray")
def test_a_job_of_ray_is_cancelled_with_its_ray(shell: Shell):
    script = [str(Path("examples/frameworks/ray_script.py").absolute()), "--steps", "100000000"]
    assert shell("launch", "--engine", "ray", "--nodes", "2", "--name", "c", "--detach", *script).startswith("c\n")
    shell.wait_for("c", "Ray with 1 nodes")
    assert shell("cancel", "c") == "job c: cancelled\n"
    assert shell.left() == []


@needs("tensorflow")
def test_tensorflow_trains_one_model_on_two_nodes(shell: Shell):
    said = shell.launch("tensorflow", "t", "tensorflow_script.py")
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 3
    ends = dict(re.findall(r"worker (\d) loss [\d.]+ weights ([\d.]+)", said))
    assert ends["0"] == ends["1"]
    assert "listens on all addresses" in said, "what is open is told before it opens"
    shell.assert_accounted("t", nodes=2)


@needs("tensorflow")
def test_a_training_of_keras_with_our_run_directory_is_launched(shell: Shell):
    """`TensorFlowDistributedTrainer` takes the workers that the engine names in TF_CONFIG."""
    said = shell.launch("tensorflow", "t", "tensorflow_trainer.py", str(shell.folder / "run"))
    assert len(set(re.findall(r"test loss (-?[\d.]+) after \d+ steps", said))) == 1
    result = RunDir(str(shell.folder / "run")).read_result()
    assert result is not None
    assert (result["world_size"], result["status"]) == (2, "succeeded")


@needs("ray")
def test_a_ray_trainer_uses_the_ray_of_its_job(shell: Shell, short_folder: Path):
    shell.env["TMPDIR"] = str(short_folder)
    said = shell.launch("ray", "r", "ray_trainer.py", str(shell.folder / "run"))
    assert "Connecting to existing Ray cluster at address: 127.0.0.1:" in said
    result = RunDir(str(shell.folder / "run")).read_result()
    assert result is not None
    assert result["weights_equal_on_ranks"]


@needs("tensorflow")
def test_a_worker_of_tensorflow_that_fails_ends_the_job(shell: Shell):
    said = shell.launch("tensorflow", "t", "tensorflow_script.py", "--fail", code=7)
    assert "rank 1 on node 1 failed first (exit code 7)" in said

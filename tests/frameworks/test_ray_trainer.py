"""`RayTrainer` on a real Ray of this machine: the losses of DDP, also where a worker is killed, and trials of Tune."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.small_windows import (
    FIGURES,
    QUIET,
    RANKS,
    SETTINGS,
    DiesOnce,
    largest_difference,
    losses,
    needs,
    stock_loss,
    stock_model,
    train_by_ddp,
    valid_losses,
    windows,
)
from trainer import DistributedConfig, FitResult, RayTrainer, TrainingFailedError
from trainer.config import ConfigError
from trainer.data.coverage import find_coverage_errors
from trainer.exit_codes import FAILED
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600), needs("ray.train", "ray[train,tune]")]
ROOT = Path(__file__).parents[2]
SAME = 0.0
"""Two workers of Ray are two ranks of ours: they add the same numbers in the same order as DDP's."""


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """A Ray of this machine, for all tests of this module."""
    import ray

    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", address="local", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_by_ddp(tmp_path_factory.mktemp("ddp") / "run")


def fit(run_dir: Path | None, train: Any = None, options: dict[str, Any] | None = None, **settings: Any) -> FitResult:
    config = DistributedConfig(**{**SETTINGS, **settings})
    trainer = RayTrainer(
        stock_model(), config, loss=stock_loss(), run_dir=run_dir, tracking=QUIET, **(options or {"num_workers": RANKS})
    )
    _, valid, test = (windows(split) for split in FIGURES)
    return trainer.fit(train if train is not None else windows("train"), valid, test)


def read(run_dir: Path, name: str) -> dict[str, Any]:
    return json.loads((run_dir / name).read_text())


def assert_same(run_dir: Path, by_ddp: Path) -> None:
    assert largest_difference(losses(run_dir), losses(by_ddp)) <= SAME
    assert largest_difference(valid_losses(run_dir), valid_losses(by_ddp)) <= SAME
    result, expected = read(run_dir, "result.json"), read(by_ddp, "result.json")
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["consumed"] == expected["consumed"]
    assert find_coverage_errors(result["consumed"], result["train_samples"], round(result["epochs"])) == []


def test_two_workers_learn_bit_for_bit_what_two_ranks_of_ddp_do(by_ddp: Path, tmp_path: Path) -> None:
    result = fit(tmp_path / "run")
    assert_same(tmp_path / "run", by_ddp)
    told = read(tmp_path / "run", "result.json")
    assert told["world_size"] == RANKS
    assert (result.steps, result.test) == (told["steps"], told["test"])
    best = torch.load(by_ddp / "model" / "weights.pt", weights_only=True)
    assert all(torch.equal(tensor, best[name]) for name, tensor in result.model.state_dict().items())
    assert Path(sys.argv[0]).name in read(tmp_path / "run", "job.json")["dataset"]["uri"]


def test_a_killed_worker_is_replaced_and_the_training_goes_on(by_ddp: Path, tmp_path: Path) -> None:
    """In the last epoch: what was done before is not done again."""
    mark, per_epoch = tmp_path / "mark", len(windows("train")) // RANKS
    fit(tmp_path / "run", DiesOnce(1, after=2 * per_epoch + 70, mark=mark), batch_size_per_gpu=16)
    assert mark.exists()
    rundir = RunDir(str(tmp_path / "run"))
    steps = {}
    for event in rundir.events("step"):
        steps.setdefault(event["generation"], []).append(event["step"])
    assert len(steps) == 2
    assert min(steps[max(steps)]) > len(losses(by_ddp)) // RANKS
    assert largest_difference(losses(tmp_path / "run"), losses(by_ddp)) <= SAME
    assert read(tmp_path / "run", "result.json")["consumed"] == read(by_ddp, "result.json")["consumed"]


def test_what_would_happen_again_is_not_tried_again(tmp_path: Path) -> None:
    """The loss is not finite on any rank."""
    with pytest.raises(TrainingFailedError, match="not finite at step") as failed:
        fit(tmp_path / "run", learning_rate=1e30, clip_norm=None, warmup_steps=0)
    assert failed.value.code == FAILED
    assert {event["generation"] for event in RunDir(str(tmp_path / "run")).events("end")} == {1}


def test_a_second_call_goes_on_from_the_run_directory(by_ddp: Path, tmp_path: Path) -> None:
    fit(tmp_path / "run", max_steps=6, schedule="constant", warmup_steps=0)
    result = fit(tmp_path / "run", max_steps=8, schedule="constant", warmup_steps=0)
    assert result.steps == 8
    assert [event["step"] for event in RunDir(str(tmp_path / "run")).events("step")] == list(range(1, 9))


def test_what_no_worker_could_read_is_refused_by_name(tmp_path: Path) -> None:
    class Locked(DiesOnce):
        def __init__(self) -> None:
            super().__init__(5, 0, tmp_path)
            self.lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"train \(Locked\) cannot be pickled"):
        fit(tmp_path / "run", Locked())


def test_trials_of_tune_train_in_place_and_are_compared_by_evaluations(tmp_path: Path) -> None:
    """As in a script: the values of the search are settings and the model's, and Tune ends a trial early."""
    from ray import tune

    def train(config: dict[str, Any]) -> dict[str, float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, config["hidden_size"]), torch.nn.Linear(config["hidden_size"], 2)
        )
        trainer = RayTrainer(model, config, tracking=QUIET)
        inputs = torch.randn(200, 2)
        points = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
        trainer.fit(points, points)
        return {"accuracy": trainer.best_accuracy}

    found = tune.Tuner(
        train,
        param_space={"hidden_size": 4, "lr": tune.grid_search([1e-6, 1e-1]), "batch_size": 20, "epochs": 3},
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="search", stop={"training_iteration": 2}),
    ).fit()
    assert [result.error for result in found] == [None, None]
    best = found.get_best_result("accuracy", "max")
    assert best.config is not None
    assert best.config["lr"] == 1e-1
    assert len(best.metrics_dataframe) == 2
    assert best.metrics["accuracy"] > 0.9
    ended = [read(path.parent, "result.json")["status"] for path in tmp_path.rglob("fit-1/job.json")]
    assert ended == ["stopped", "stopped"]


def test_workers_of_a_group_that_is_there_train_in_place(by_ddp: Path, tmp_path: Path) -> None:
    import ray.train
    from ray.train.torch import TorchTrainer

    def work() -> None:
        fit(tmp_path / "run", options={"num_workers": None})

    scaling = ray.train.ScalingConfig(num_workers=RANKS)
    TorchTrainer(work, scaling_config=scaling, run_config=ray.train.RunConfig(storage_path=str(tmp_path / "ray"))).fit()
    assert_same(tmp_path / "run", by_ddp)


def test_the_example_starts_a_ray_of_its_own(tmp_path: Path) -> None:
    script = ROOT / "examples" / "frameworks" / "ray_trainer.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "test loss -" in done.stdout
    assert read(tmp_path / "run", "result.json")["world_size"] == RANKS

"""What `RayTrainer` decides before Ray is asked: settings of a search, the planned world, and what Ray is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fit_jobs import network, points

from trainer import DistributedConfig, RayTrainer
from trainer.adapters import ray_trainer
from trainer.adapters.ray_trainer import is_right, plan_world, read_settings
from trainer.adapters.ray_worker import Reporter
from trainer.comm.launcher_env import RankFacts, rank_facts, rank_variables
from trainer.config import ConfigError
from trainer.engine.interruptions import Stopped
from trainer.runtime.launch import ORDER, with_order


def test_values_of_a_search_are_settings_or_the_models() -> None:
    config = read_settings({"lr": 0.1, "batch_size": 8, "epochs": 2, "hidden_size": 128})
    assert (config.learning_rate, config.batch_size_per_gpu, config.epochs) == (0.1, 8, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rat": 0.1}, "did you mean learning_rate"),
        ({"lr": 0.1, "learning_rate": 0.2}, "lr and learning_rate are the same setting"),
    ],
)
def test_settings_that_mean_something_else_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(given)


def test_the_planned_world_of_a_driver_is_that_of_its_group() -> None:
    assert plan_world(DistributedConfig(world_size=1), (3, 3)).world_size == 3
    assert plan_world(DistributedConfig(world_size=1), (1, 4)).world_size == 4
    assert plan_world(DistributedConfig(world_size=2, gradient_accumulation_steps=2), (1, 4)).world_size == 2


@pytest.mark.parametrize(
    ("world", "workers", "message"),
    [(2, (3, 3), "num_workers = 3 share 2 micro-batches"), (1, (0, 0), "num_workers"), (1, (3, 2), "num_workers")],
)
def test_workers_without_work_are_refused(world: int, workers: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_world(DistributedConfig(world_size=world), workers)


def test_a_worker_is_the_rank_that_its_variables_say() -> None:
    place = RankFacts(
        rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, master_addr="10.0.0.7", master_port=1234
    )
    assert rank_facts(rank_variables(place), DistributedConfig(world_size=4)) == place


STEP = {"step": 4, "epoch": 0, "loss": 0.5, "learning_rate": 0.1, "grad_norm": 1.0}


def test_ray_is_told_of_each_evaluation_once_by_all_ranks() -> None:
    told: list[dict[str, Any]] = []
    first, other = Reporter(told.append), Reporter(told.append)
    first.take("step", STEP)
    first.take("evaluation", {"step": 4, "split": "valid", "loss": 0.6, "metrics": {"accuracy": 0.9}})
    for reporter in (first, other):
        reporter.take("phase", {"name": "training", "seconds": 1.0})
        reporter.take("phase", {"name": "evaluation", "seconds": 1.0})
    figures = {name: STEP[name] for name in ("step", "epoch", "loss", "learning_rate")}
    assert told == [{**figures, "valid_loss": 0.6, "accuracy": 0.9}, {}]


def test_tunes_end_of_a_trial_is_an_end_with_all_reports_written() -> None:
    def leave(_: object) -> None:
        raise SystemExit(0)

    with pytest.raises(Stopped) as stopped:
        Reporter(leave).take("phase", {"name": "evaluation"})
    assert stopped.value.everybody


def test_classes_are_right_by_number_and_by_probability() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert is_right(outputs, torch.tensor([1, 1])).tolist() == [1.0, 0.0]
    assert is_right(outputs, torch.tensor([[0.0, 1.0], [0.3, 0.7]])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("variable", ["WORLD_SIZE", ORDER])
def test_other_launchers_are_refused_by_name(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = RayTrainer(network(), run_dir=tmp_path / "run")
    # Ray Train's local mode, where another test has used it in this process, leaves its marks of a worker.
    monkeypatch.setattr(ray_trainer, "find_worker_place", lambda: None)
    others = {"WORLD_SIZE": "2", **with_order({}, describe=str(tmp_path / "described"))}
    monkeypatch.setenv(variable, others[variable])
    with pytest.raises(ConfigError, match=r"python FILE\.PY"):
        trainer.fit(points())
    assert not (tmp_path / "run").exists()
    if variable == ORDER:
        assert "error" in (tmp_path / "described").read_text()

"""What a run of MLflow is made of, as pure functions; a real server has it in `test_reporter`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.config import DatasetRef, FactoryConfig, JobConfig
from trainer.observability.mlflow_sink import (
    NOTE_TAG,
    SOURCE_TAG,
    VALUE_LENGTH,
    dataset_of,
    figures_of_test,
    is_shown,
    metric_name,
    params_of,
    summarise,
    tags_of,
    verdict_tags,
)

MANIFEST = {
    "dataset_id": "0123456789abcdef",
    "source": {"name": "sp500_panel"},
    "columns": [{"name": "log_return", "type": "float", "role": "feature"}],
    "samples": {"train": 10, "test": 3},
}


def job(uri: str = "/data/d", **model: object) -> JobConfig:
    return JobConfig(
        job_id="j", run_dir="/runs/j", dataset=DatasetRef(uri=uri), model=FactoryConfig(factory="tcn", args=dict(model))
    )


def test_parameters_have_the_arguments_of_the_model_too() -> None:
    params = params_of(job(channels=8, kernels=[3, 5], name="x" * 2 * VALUE_LENGTH))
    assert (params["model"], params["model.channels"], params["model.kernels"]) == ("tcn", "8", "[3, 5]")
    assert len(params["model.name"]) == VALUE_LENGTH
    assert {"loss", "dataset", "epochs", "learning_rate", "world_size"} <= params.keys()
    assert all(isinstance(value, str) for value in params.values())
    assert len(params_of(job())) <= 16, "what is as it begins is not listed, but for what runs are compared by"
    changed = job()
    changed.training.keep_checkpoints += 1
    assert params_of(changed)["keep_checkpoints"] == str(changed.training.keep_checkpoints)
    assert "keep_checkpoints" not in params_of(job())


def test_a_run_says_what_was_trained_on_what_and_by_what() -> None:
    tags = tags_of(job(), MANIFEST)
    assert tags["dataset_id"] == "0123456789abcdef"
    assert tags[SOURCE_TAG] == "python -m trainer"
    assert tags[NOTE_TAG].startswith("tcn by student_t on 0123456789abcdef, 3 ranks.")
    assert tags_of(job("script:digits.py"), {})[SOURCE_TAG] == "digits.py"


@pytest.mark.parametrize(
    ("name", "here", "on_azure"),
    [
        ("train/loss", "train/loss", "train.loss"),
        ("cluster/gpu_utilization", "system/cluster/gpu_utilization", "cluster.gpu_utilization"),
    ],
)
def test_figures_of_machines_are_system_metrics(name: str, here: str, on_azure: str) -> None:
    assert (metric_name(name, False), metric_name(name, True)) == (here, on_azure)


def test_the_test_split_is_loss_score_margin_and_verdict() -> None:
    evaluation = {
        "model": {"nll": -2.0, "loss": -1.5, "coverage_90": 0.9, "rank_ic": 0.1, "table": [1], "good": True},
        "baselines": {
            "ewma": {"nll": -1.5}, "har": {"pinball": 0.1, "nll": -1.75}, "drift": {"mse_to_zero": 1.0},
            "odd": {"words": "x"},
        },
        "gate": {"passed": False, "reasons": ["why"]},
    }  # fmt: skip
    assert figures_of_test(evaluation) == {"test/nll": -2.0, "test/loss": -1.5, "test/margin": 0.25}
    assert verdict_tags(evaluation) == {"best_baseline": "har", "gate": "not passed"}
    assert verdict_tags({"gate": {"passed": True}}) == {"gate": "passed"}
    assert (figures_of_test({}), verdict_tags({})) == ({}, {})


def test_a_point_forecast_has_the_score_that_it_is_compared_by() -> None:
    evaluation = {"model": {"loss": 0.4, "mse_to_zero": 0.5}, "baselines": {"drift": {"mse_to_zero": 1.0}}}
    assert figures_of_test(evaluation) == {"test/loss": 0.4, "test/mse_to_zero": 0.5, "test/margin": 0.5}


def test_a_script_has_the_metrics_of_its_own() -> None:
    evaluation = {"model": {"loss": 1.0, "samples": 9, "own": 0.5}, "baselines": {}}
    assert figures_of_test(evaluation) == {"test/loss": 1.0, "test/own": 0.5}
    assert [is_shown(name) for name in ("valid/first", "test/first", "valid/pinball")] == [True, True, False]


def test_a_curve_in_short() -> None:
    events = [
        {"kind": "node", "time": 1.0, "node_id": 0, "step": step, "cpu_percent": percent}
        for step, percent in ((1, 20.0), (2, 60.0), (3, 40.0))
    ]
    damaged: list[dict[str, Any]] = [{"kind": "step", "time": 1.0}, {"kind": "node", "time": 1.0, "node_id": 0}, {}]
    damaged += [{"kind": "evaluation", "time": 1.0, "step": 1, "split": "valid", "loss": "words"}]
    events += damaged
    assert summarise(events)["node_0/cpu_percent"] == {
        "last": 40.0, "step": 3, "least": 20.0, "greatest": 60.0, "mean": 40.0, "points": 3,
    }  # fmt: skip


def test_a_dataset_has_its_columns_samples_and_place() -> None:
    found = dataset_of(job(), MANIFEST)
    assert (found["name"], found["digest"], found["source_type"]) == ("sp500_panel", "0123456789abcdef", "local")
    assert json.loads(found["schema"])["mlflow_colspec"] == [{"name": "log_return", "type": "float", "required": True}]
    assert json.loads(found["profile"]) == {"samples_train": 10, "samples_test": 3}
    other = dataset_of(job("az://store/" + "d" * 50), {})
    assert (len(other["digest"]), other["source_type"]) == (36, "az")

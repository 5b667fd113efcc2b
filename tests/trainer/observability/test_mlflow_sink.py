"""What a run of MLflow is made of, as pure functions; a real server has it in `test_reporter`."""

from __future__ import annotations

import json

import pytest

from trainer.config import DatasetRef, FactoryConfig, JobConfig
from trainer.observability.mlflow_sink import (
    NOTE_TAG,
    SOURCE_TAG,
    VALUE_LENGTH,
    dataset_of,
    figures_of_test,
    metric_name,
    params_of,
    tags_of,
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
        ("node_0/cpu_percent", "system/node_0/cpu_percent", "node_0.cpu_percent"),
        ("cluster/gpu_utilization", "system/cluster/gpu_utilization", "cluster.gpu_utilization"),
    ],
)
def test_figures_of_machines_are_system_metrics(name: str, here: str, on_azure: str) -> None:
    assert (metric_name(name, False), metric_name(name, True)) == (here, on_azure)


def test_of_a_baseline_the_score_is_shown_that_models_are_compared_by() -> None:
    evaluation = {
        "model": {"nll": -2.0, "coverage_90": 0.9, "table": [1], "good": True},
        "baselines": {"har": {"pinball": 0.1, "nll": -1.9}, "drift": {"mse_to_zero": 1.0}, "odd": {"words": "x"}},
    }
    assert figures_of_test(evaluation) == {
        "test/nll": -2.0, "test/coverage_90": 0.9, "baseline/har_nll": -1.9, "baseline/drift_mse_to_zero": 1.0,
    }  # fmt: skip
    assert figures_of_test({}) == {}


def test_a_dataset_has_its_columns_samples_and_place() -> None:
    found = dataset_of(job(), MANIFEST)
    assert (found["name"], found["digest"], found["source_type"]) == ("sp500_panel", "0123456789abcdef", "local")
    assert json.loads(found["schema"])["mlflow_colspec"] == [{"name": "log_return", "type": "float", "required": True}]
    assert json.loads(found["profile"]) == {"samples_train": 10, "samples_test": 3}
    other = dataset_of(job("az://store/" + "d" * 50), {})
    assert (len(other["digest"]), other["source_type"]) == (36, "az")

"""What a space may be, what is drawn from it, and what is said of one that cannot be searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain_dagster.search.space import SpaceError, check_space, extremes, job_of_trial, parse_space
from trainer.config import ConfigError, DatasetRef, FactoryConfig, JobConfig, OptimizerConfig

RATE = {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}}
BASE = JobConfig(job_id="base", run_dir="/tmp/base", dataset=DatasetRef(uri="/tmp/data"))


def said(document: Any, base: JobConfig = BASE) -> str:
    with pytest.raises(SpaceError) as found:
        check_space(parse_space(document), base)
    return str(found.value)


class TestWhatIsRefused:
    """Each message names the parameter and the remedy."""

    @pytest.mark.parametrize(
        ("item", "words"),
        [
            ({"low": -1.0, "high": 1.0, "log": True}, ["`low > 0` must hold for `log=True`"]),
            ({"low": 2.0, "high": 1.0}, ["`low <= high` must hold"]),
            ({"low": 1.0}, ["either choices, or low and high"]),
            ({"low": "1", "high": 2}, ["low = '1': it should be a number"]),
            ({"low": True, "high": 2}, ["low = True: it should be a number"]),
            ({"low": 1.0, "high": float("inf")}, ["high = inf: it should be a number"]),
            ({"lo": 1.0, "high": 2.0}, ["lo is not a setting: did you mean low?"]),
            ({"low": 1.0, "high": 2.0, "log": "yes"}, ["log = 'yes': it should be a valid boolean"]),
            ({"low": 1.0, "high": 2.0, "log": True, "step": 0.1}, ["`step` is not supported when `log` is true"]),
            ({"low": 1.0, "high": 2.0, "step": 0}, ["step = 0 does not fit between 1.0 and 2.0"]),
            ({"low": 1, "high": 10, "step": 20}, ["step = 20 does not fit between 1 and 10"]),
            ({"low": 1, "high": 9, "step": 0.5}, ["whole numbers need whole bounds and steps"]),
            ({"low": 1.5, "high": 3, "type": "int"}, ["whole numbers need whole bounds"]),
            ({"low": 1, "high": 3, "type": "integer"}, ["type = 'integer': it should be 'int' or 'float'"]),
            ({"low": 1, "high": 3, "choices": [1]}, ["high belongs to a range, not to choices"]),
            ({}, ["either choices, or low and high"]),
            ([], ["at least 1 item"]),
            ([1, 1], ["1 is listed twice"]),
            (0.1, ["is not a range"]),
            ({"low": 1.0, "high": 2.0, "when": {"model.factory": "tcn"}}, ["when is not a setting"]),
        ],
    )
    def test_a_range(self, item: Any, words: list[str]) -> None:
        told = said({"training.learning_rate": item})
        assert told.startswith("space: training.learning_rate")
        assert all(word in told for word in words), told

    @pytest.mark.parametrize("document", [{}, [], None])
    def test_an_empty_space(self, document: Any) -> None:
        assert "name at least one field and its range" in said(document)

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("training.learning_rat", "did you mean training.learning_rate?"),
            ("learning_rate", "did you mean training.learning_rate?"),
            ("training.learning_rate.low", "did you mean training.learning_rate?"),
            ("training.none.none", "fields are training.NAME"),
            ("model.factori", "did you mean model.factory?"),
            ("training.world_size", "says how a job runs"),
            ("run_dir", "fields are training.NAME"),
            ("model.args.", "fields are training.NAME"),
            ("dataset.args.seed", "fields are training.NAME"),
        ],
    )
    def test_a_field_that_is_not_there(self, name: str, hint: str) -> None:
        assert hint in said({name: {"low": 1, "high": 2}})

    def test_values_that_the_field_does_not_take(self) -> None:
        assert "training.min_lr_fraction = 2.0" in said({"training.min_lr_fraction": {"low": 0.1, "high": 2.0}})
        assert "training.precision" in said({"training.precision": ["fp32", "fp8"]})

    def test_a_trial_that_could_not_be_trained(self) -> None:
        def check(job: JobConfig) -> list[str]:
            if job.training.learning_rate > 0.01:
                raise ConfigError("it would not fit into memory")
            return ["not tried out"]

        with pytest.raises(SpaceError, match=r"training\.learning_rate = 0\.1 could not be trained: it would not fit"):
            check_space(parse_space(RATE), BASE, check)
        assert check_space(parse_space({"training.seed": [1, 2]}), BASE, check) == ["not tried out"]


class TestTheJobOfATrial:
    """What is drawn is in it, and it could be trained."""

    def test_arguments_of_another_model_do_not_go_along(self) -> None:
        base = JobConfig(**{**{name: getattr(BASE, name) for name in ("job_id", "run_dir", "dataset")},
                            "model": FactoryConfig(factory="tcn", args={"dropout": 0.5})})  # fmt: skip
        assert job_of_trial(base, {"model.factory": "tcn"}).model.args == {"dropout": 0.5}
        assert job_of_trial(base, {"model.factory": "lstm"}).model.args == {}

    def test_arguments_of_an_optimizer_are_varied_where_the_job_has_one(self) -> None:
        space = parse_space({"optimizer.args.lr": {"low": 1e-3, "high": 1e-1, "log": True}})
        with pytest.raises(SpaceError, match="the job has no optimizer of its own; give it one"):
            check_space(space, BASE)
        base = replace(BASE, optimizer=OptimizerConfig(factory="torch.optim:SGD", args={"lr": 0.01, "momentum": 0.9}))
        assert check_space(space, base) == []
        job = job_of_trial(base, {"optimizer.args.lr": 0.02})
        assert job.optimizer is not None
        assert job.optimizer.args == {"lr": 0.02, "momentum": 0.9}

    def test_the_ends_of_each_model_are_tried(self) -> None:
        found = extremes(parse_space({"model.factory": ["tcn", "lstm"], **RATE}))
        pairs = {(item["model.factory"], item["training.learning_rate"]) for item in found}
        assert pairs == {(model, rate) for model in ("tcn", "lstm") for rate in (1e-4, 1e-1)}

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from trainer.config import (
    ConfigError,
    DatasetRef,
    DistributedTrainingConfig,
    FactoryConfig,
    JobConfig,
    TLSConfig,
    TrackingConfig,
    parse_job,
    settings_of,
)

LEAST = {"job_id": "job-1", "run_dir": "/runs/1", "dataset": {"uri": "/data/1"}}


def parse(*overrides: str, **changes: object) -> JobConfig:
    return parse_job(json.dumps({**LEAST, **changes}), list(overrides))


def test_a_job_needs_an_id_a_folder_and_a_dataset_and_no_more() -> None:
    job = parse()
    assert (job.model.factory, job.loss.factory, job.training.epochs) == ("tcn", "student_t", 6)
    assert job.training.global_batch_size == 128 * 2 * 3


def test_what_is_written_reads_the_same() -> None:
    job = parse("training.epochs=2", 'model={"factory": "lstm", "args": {"hidden": 8}}', "tracking.tags.team=quant")
    assert parse_job(job.to_json()) == job


def test_a_job_of_an_older_version_may_have_settings_that_are_none_now() -> None:
    old = json.loads(parse("training.epochs=2").to_json())
    old["training"]["bind_cores"] = False
    assert parse_job(json.dumps(old)).training.epochs == 2


def test_a_way_to_sum_that_older_versions_chose_is_read_as_all_reduce_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = json.loads(parse().to_json())
    old["training"]["communication"] = "auto"
    with caplog.at_level("INFO"):
        assert parse_job(json.dumps(old)).training.communication == "allreduce"
    assert "training.communication = 'auto' is no longer a value, and is read as 'allreduce'" in caplog.text
    with pytest.raises(ConfigError, match=r"training.communication = 'auto': .*'topk' or 'hierarchical'"):
        parse("training.communication=auto")


def test_overrides_are_json_or_plain_text_and_reach_any_depth() -> None:
    job = parse("training.clip_norm=null", "training.precision=bf16", "loss.factory=mse", "training.learning_rate=1e-4")
    assert (job.training.clip_norm, job.training.precision) == (None, "bf16")
    assert (job.loss.factory, job.training.learning_rate) == ("mse", 1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epochs=0", "training.epochs = 0: .*greater than or equal to 1"),
        ("training.epochs=true", "training.epochs = True: .*valid integer"),
        ('training.epochs="3"', "training.epochs = '3': .*valid integer"),
        ("training.learning_rate=NaN", "training.learning_rate = nan: .*finite"),
        ("training.precision=fp8", "training.precision = 'fp8': .*'fp32', 'tf32', 'bf16' or 'fp16'"),
        ("training.epoch=3", r"training.epoch is not a setting: did you mean training.epochs\?$"),
        ("training.bind_cores=true", "training.bind_cores is no longer a setting: .*; leave it out$"),
        ("training.master_port=70000", "training.master_port = 70000: .*65535"),
        ("job_id=../elsewhere", "job_id = '../elsewhere': .*pattern"),
        (f"job_id={'x' * 201}", "job_id = 'x+…: .*pattern"),
        ("training=3", "training = 3: .*object"),
        ("epochs", "dotted.key=value, such as training.epochs=3"),
        ("job_id.part=1", "'job_id' is not a section of job.json"),
    ],
)
def test_a_bad_value_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(override)


Training = DistributedTrainingConfig


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Training(learnin_rate=1), "training.learnin_rate is not a setting: did you mean learning_rate?"),
        (lambda: Training(xyz=1), "training.xyz is not a setting: the reference lists all"),
        (lambda: Training(epochs=0), "training.epochs = 0: it should be greater than or equal to 1"),
        (lambda: Training(epochs="x"), "training.epochs = 'x': it should be a valid integer, unable to parse string as "
         "an integer"),
        (lambda: Training(precision="x" * 300), f"training.precision = '{'x' * 119}…: it should be 'fp32', 'tf32', "
         "'bf16' or 'fp16'"),
        (lambda: Training(strategy="fsdp", compile="default"), "training.strategy = 'fsdp' cannot be combined with "
            "training.compile = 'default': set training.compile = 'off'"),
        (lambda: Training(tls={"certificate": "a", "kye": "b", "ca": "c"}), "training.tls.kye is not a setting: did "
         "you mean key?"),
        (lambda: Training(3), "DistributedTrainingConfig(…) was given settings without names: give them by name"),
        (lambda: Training({"epochs": 1}), "DistributedTrainingConfig(…) was given settings without names: give the "
         "mapping as **settings"),
        (lambda: replace(Training(), seed=-1), "training.seed = -1: it should be greater than or equal to 0"),
        (lambda: TLSConfig(certificat="a", key="b", ca="c"), "training.tls.certificat is not a setting: did you mean "
         "certificate?"),
        (lambda: TLSConfig(key="b", ca="c"), "training.tls.certificate is missing"),
        (lambda: TrackingConfig(xyz=1), "tracking.xyz is not a setting: choose from tensorboard, mlflow_tracking_uri, "
         "mlflow_experiment, mlflow_run_name, tags, registered_model"),
        (lambda: DatasetRef(url="x"), "dataset.url is not a setting: did you mean uri?"),
        (lambda: FactoryConfig(factory=3), "factory = 3: it should be a valid string"),
        (lambda: JobConfig(**LEAST, training={"epohcs": 1}), "training.epohcs is not a setting: did you mean epochs?"),
        (lambda: parse("mlflow_experiment=x"), "job.json: mlflow_experiment is not a setting: did you mean "
         "tracking.mlflow_experiment?"),
        (lambda: settings_of(3, Training, "config"), "config is of the type int: give DistributedTrainingConfig(…), or "
         "a mapping of its settings"),
        (lambda: settings_of(Training, Training, "config"), "config is the class DistributedTrainingConfig: give "
         "DistributedTrainingConfig(…), or a mapping of its settings"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_used_is_told_in_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value) == sentence


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("training.epochs=0", "training.seed=-1")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not JSON") for text in ("{", '{"training": {"learning_rate": NaN}}', "[" * 100_000)),
        ("[]", "must hold a JSON object, not list"),
        ("{}", "job.json: job_id is missing"),
    ],
)
def test_text_that_is_no_job_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job(text)

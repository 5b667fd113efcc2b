"""A size that cannot be bought any more is named before anything is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain_dagster.cli.job_options import say_what_is_wrong
from dtrain_dagster.settings.environment import load_settings
from harness.small_job import write_dataset
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"DTRAIN_CLUSTER": "azure_ml", "DTRAIN_STORAGE": "az://dtrain", "DTRAIN_GPU_TYPE": "Standard_NC6s_v3"}, True),
        ({"DTRAIN_CLUSTER": "azure_ml", "DTRAIN_STORAGE": "az://dtrain"}, False),
        ({"DTRAIN_GPU_TYPE": "Standard_NC6s_v3"}, False),  # where it is a stand-in, nothing is bought
    ],
)
def test_it_is_told_with_one_that_can_be_bought(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variables: dict[str, str],
    says: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    dataset = write_dataset(tmp_path / "walks")
    job = JobConfig(
        job_id="j", run_dir=str(tmp_path / "jobs" / "j"), dataset=DatasetRef(uri=str(dataset)),
        training=DistributedTrainingConfig(world_size=2),
    )  # fmt: skip
    say_what_is_wrong(job, 2, load_settings(), rehearses=False)
    told = capsys.readouterr().err
    assert ("Azure retired Standard_NC6s_v3 on 2025-09-30" in told) == says
    assert ("DTRAIN_GPU_TYPE=Standard_NC24ads_A100_v4" in told) == says

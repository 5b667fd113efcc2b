"""Mistakes that a user can make on the command line: each gets one clear message with the name that the user wrote, the
code of a refusal, and no stack trace; and no node starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dtrain_dagster.__main__ import main as home
from dtrain_dagster.cli.job_options import say_what_is_wrong
from dtrain_dagster.cli.main import main
from dtrain_dagster.registry.endpoints import endpoint
from dtrain_dagster.settings.environment import load_settings
from harness.small_job import write_dataset
from trainer.config import DatasetRef, JobConfig

TRAIN = ("train", "--dataset", "walks", "--nodes", "1")
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("nope",), "No such command 'nope'"),
    (("train",), "give one of --dataset, --config and --script"),
    (("train", "--script", "nowhere.py"), "--script nowhere.py: there is no such file"),
    (
        ("train", "--script", "small.py", "--nodes", "9"),
        "--script small.py: 8 training samples cannot feed 9 micro-batches",
    ),
    (("train", "--script", "silent.py", "--model", "tcn"), "--model cannot be combined with --script"),
    (("train", "--dataset", "walks", "more.py"), "arguments belong to a --script: more.py"),
    (("train", "--dataset", "nowhere"), "--dataset nowhere"),
    (("train", "--config", "nowhere.json"), "--config nowhere.json: there is no such file"),
    (("train", "--config", "folder"), "--config folder is a folder"),
    (("train", "--config", "latin.json"), "--config latin.json is not JSON"),
    (("train", "--config", "empty.json"), "empty.json is not JSON"),
    (("train", "--config", "broken.json"), "line 2"),
    (("train", "--config", "nan.json"), "NaN is not a number there"),
    ((*TRAIN, "--nodes", "9999"), "use fewer ranks"),
    ((*TRAIN, "--model", "tcnn"), "--model = 'tcnn' is neither a stock model"),
    ((*TRAIN, "--model", "a:b"), "set DTRAIN_FACTORY_MODULES=a"),
    ((*TRAIN, "--loss", "nll"), "--loss = 'nll' is neither a stock loss"),
    ((*TRAIN, "--model", "tcn", "--set", 'model.args={"channel": 8}'), "it accepts: channels"),
    ((*TRAIN, "--set", "training.epochs=-1"), "training.epochs = -1: it should be greater than or equal to 1"),
    ((*TRAIN, "--set", "training.epohcs=3"), "did you mean training.epochs?"),
    ((*TRAIN, "--name", "../x"), "--name '../x'"),
    ((*TRAIN, "--backend", "mpi"), "there is no backend 'mpi'"),
    ((*TRAIN, "--backend", "horovod", "--set", "training.encryption=required"), "unencrypted"),
    ((*TRAIN, "--settings", "nowhere"), "there is no such file"),
    (("tune", "--dataset", "walks", "--seconds", "nan"), "--seconds nan"),
    (("tune", "--dataset", "walks", "--model", "tcnn"), "--model = 'tcnn'"),
    (("launch", "--nodes", "1", "--", "nowhere.py"), "there is no script 'nowhere.py'"),
    (("launch", "--nodes", "1", "--", "/no/such/program"), "there is no program '/no/such/program'"),
    (("launch", "--nodes", "999", "silent.py"), "DTRAIN_NODES=999"),
    (("launch", "--name", 201 * "x", "silent.py"), "at most 200"),
    (("status",), "latest: there are no jobs"),
    (("status", "nojob"), "no job 'nojob': there is none yet; `dtrain jobs` lists them"),
    (("status", "../x"), "the name of the job is '../x'"),
    (("status", "latest", "--html", "a.html", "--follow"), "give one of them"),
    (("cost", "--usage-export", __file__), "--usage-export needs the name of a job"),
    (("ui", "mlflow", "--host", "0.0.0.0"), "the page mlflow has no --host"),
    (("status", "latest", "--trace"), "latest: there are no jobs"),
    (("search", "--show", "nosearch"), "no search 'nosearch'"),
    (("search", "--dataset", "walks"), "give the --space"),
    ((*TRAIN, "--name", "latest"), "--name latest"),
]
SCRIPTS = {
    "silent": "print('nothing to do')\n",
    "small": "import torch\n"
    "from trainer import Trainer\n"
    "data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 3))\n"
    "Trainer(torch.nn.Linear(2, 3), {'batch_size_per_gpu': 4}, loss=torch.nn.MSELoss()).fit(data)\n",
}
SETTINGS = [
    ("DTRAIN_NODES", "three", "DTRAIN_NODES='three'"),
    ("DTRAIN_NODES", "0", "greater than or equal to 1"),
    ("DTRAIN_CLUSTER", "gke", "'kubernetes' or 'ray'"),
    ("DTRAIN_GPU_TYPE", "Standard_Nope", "Standard_Nope"),
    ("DTRAIN_REGION", "mars", "DTRAIN_REGION"),
    ("DTRAIN_PROCESSES_PER_NODE", "99", "unset it for the default"),
    ("DTRAIN_RETRAIN_CRON", "0 6 * * 6", "DTRAIN_RETRAIN_CRON is gone: give `build_training_assets"),
    ("DTRAIN_HOME", "/proc/none", "/proc/none"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a dataset and files that are no job.json."""
    write_dataset(tmp_path / "walks")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nan.json").write_text('{"training": {"learning_rate": NaN}}')
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe{}")
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name, text in (("empty", ""), ("broken", '{"a": 1,\n "b": }')):
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path


def refused(arguments: tuple[str, ...], command: click.Command = main, **environment: str) -> Any:
    result = CliRunner().invoke(command, arguments, env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), f"{arguments}: {result.exception!r}"
    assert result.exit_code == 2, (arguments, result.output)
    assert "Traceback" not in result.output
    return result.output


@pytest.mark.slow
def test_each_mistake_is_named_as_the_user_wrote_it(folder: Path):
    for arguments, words in MISTAKES:
        said = refused(arguments)
        assert words in said, (arguments, said)
        assert len(said.strip().splitlines()) <= 4, (arguments, said)
    assert not list((folder / "home").glob("storage/jobs/*/launch.json")), "no node was started for any of these"


def test_each_mistake_of_what_is_no_verb_is_named_as_well(folder: Path):
    assert "no job 'nojob'" in refused(("check", "nojob", "--url", "http://127.0.0.1:1"), endpoint)
    assert "cannot be started" in refused(("work", "nonesuch-command"), home)


def test_a_module_that_may_be_imported_and_is_not_there_is_named(folder: Path):
    said = refused((*TRAIN, "--model", "no_such_module:make"), DTRAIN_FACTORY_MODULES="no_such_module")
    assert "there is no module 'no_such_module' on the Python path here" in said


def test_each_setting_that_cannot_be_is_named(folder: Path):
    for name, value, words in SETTINGS:
        said = refused(TRAIN, **{name: value})
        assert words in said, (name, said)
        assert "default, None" not in said
    assert not list((folder / "home").glob("storage/jobs/*/launch.json"))


def test_a_size_that_cannot_be_bought_any_more_is_named(folder: Path, monkeypatch, capsys):
    size = {"DTRAIN_GPU_TYPE": "Standard_NC6s_v3"}
    on_azure = {"DTRAIN_CLUSTER": "azure_ml", "DTRAIN_STORAGE": "az://dtrain"}
    job = JobConfig(job_id="j", run_dir=str(folder / "j"), dataset=DatasetRef(uri=str(folder / "walks")))
    job.training.world_size = 2
    for variables, is_told in ((size | on_azure, True), (on_azure, False), (size, False)):  # here it is a stand-in
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            say_what_is_wrong(job, 2, load_settings(), rehearses=False)
        told = capsys.readouterr().err
        assert ("Azure retired Standard_NC6s_v3 on 2025-09-30" in told) == is_told
        assert ("DTRAIN_GPU_TYPE=Standard_NC24ads_A100_v4" in told) == is_told

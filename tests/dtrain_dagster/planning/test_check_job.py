"""What is wrong with a training is found before any node is asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.planning.check_job import FIGURES, check_job, check_strategy
from harness.small_job import write_dataset
from trainer.config import ConfigError, DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, parse_job
from trainer.data.manifest import DatasetError, describe, read_dataset_manifest
from trainer.evaluation.window_report import PROPER_SCORES
from trainer.isolation.runner import random_inputs
from trainer.spec import WINDOWS
from trainer.storage.open import open_storage

OWN = '''
import torch

def make(spec, outputs, width=4, mistake=""):
    if mistake == "raises":
        raise ValueError("width must be even")
    if mistake == "network":
        import socket
        socket.create_connection(("192.0.2.1", 80), timeout=5)
    if mistake == "variable":
        import os
        os.environ["DTRAIN_LAUNCH"]
    if mistake == "file":
        open("/etc/not-there")
    out = 1 if mistake == "outputs" else outputs
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(spec.window * len(spec.features), out))

class Frozen(torch.nn.Module):
    """A loss through which no gradient flows."""
    outputs = 1

    def __init__(self, spec):
        super().__init__()

    def forward(self, outputs, target):
        return outputs.detach()[:, 0] - target
'''


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("check") / "dataset")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own on the path."""
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "own_parts")


def test_the_figures_of_windows_are_those_that_are_judged() -> None:
    assert set(FIGURES[WINDOWS]) == {"mse_to_zero", *PROPER_SCORES}


def job_of(dataset: Path, **sections: Any) -> JobConfig:
    document = {"job_id": "j", "run_dir": "/tmp/none", "dataset": {"uri": str(dataset)}, **sections}
    return parse_job(json.dumps(document))


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_mistake_is_named_as_the_user_wrote_it(dataset: Path):
    """A step is tried in a process of its own: what refuses it there is said here, and what is raised there."""
    sections = {"model": {"factory": "own_parts:make"}, "loss": {"factory": "own_parts:Frozen"}}
    with pytest.raises(ConfigError, match=r"training step.*grad") as found:
        check_job(job_of(dataset, **sections), ranks=1)
    assert "Traceback" not in str(found.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"training": {"monitor": "f1", "mode": "max"}},
            "'f1' is not measured of such data: choose one of .*mse_",
        ),
        ({"model": {"factory": "tcnn"}}, "neither a stock model"),
        ({"model": {"factory": "own_part:make"}}, "own_part"),
        ({"training": {"world_size": 5000}}, "micro-batches"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_mistake_that_is_seen_without_a_step_is_named(dataset: Path, sections: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words) as found:
        check_job(job_of(dataset, **sections), ranks=1)
    assert "Traceback" not in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"factory": "tcn", "args": {"channel": 8}}}, r"model.args = .*'channel'.*accepts: channels"),
        (
            {"optimizer": {"factory": "torch.optim:Adafactor"}, "training": {"strategy": "fsdp"}},
            r"leaves each rank rows of every parameter, and .*Adafactor",
        ),
        ({"model": {"factory": "tcn", "args": {"channels": "many"}}}, "model.factory = 'tcn' raised TypeError"),
        ({"loss": {"factory": "student_t", "args": {"nu": 3}}}, "loss.args"),
        ({"model": {"factory": "own_parts:mak"}}, "has no attribute 'mak'"),
        ({"model": {"factory": "own_parts:make", "args": {"mistake": "raises"}}}, "ValueError: width must be even"),
        ({"model": {"factory": "own_parts:make", "args": {"mistake": "outputs"}}}, r"expected \(2, 3\)"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_step_refuses_it_as_the_user_wrote_it(dataset: Path, sections: dict[str, Any], words: str):
    """What the process of a step does, done in this one."""
    from trainer.model.build import training_step  # not above: torch

    job, spec = job_of(dataset, **sections), describe(read_dataset_manifest(open_storage(str(dataset))))
    with pytest.raises(ConfigError, match=words):
        training_step(job, spec, random_inputs(spec)[1], 10, ("own_parts",))


@pytest.mark.long
@pytest.mark.usefixtures("own")
def test_what_works_passes_and_what_only_a_node_can_tell_is_said(dataset: Path):
    good = {"model": {"factory": "own_parts:make", "args": {"width": 6}}, "loss": {"factory": "gaussian"}}
    assert check_job(job_of(dataset, **good), ranks=3).sentences == ()
    for mistake, error in (
        ("network", "ConnectionRefusedError"),
        ("file", "NotFound"),
        ("variable", "KeyError"),
    ):
        parts = {"model": {"factory": "own_parts:make", "args": {"mistake": mistake}}}
        [said] = check_job(job_of(dataset, **parts), ranks=1).sentences
        assert "the nodes try them first" in said
        assert error in said


def test_stock_parts_are_known_to_work_and_start_no_process(dataset: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nothing/that/runs")
    assert check_job(job_of(dataset), ranks=3).sentences == ()
    changed = replace(job_of(dataset), model=FactoryConfig(factory="tcn", args={"channels": 8}))
    assert check_job(changed, ranks=3, rehearses=False).sentences == (), "it has trained before"
    with pytest.raises(FileNotFoundError):
        check_job(changed, ranks=3)


def test_a_dataset_that_cannot_be_trained_on(dataset: Path, tmp_path: Path):
    with pytest.raises(DatasetError, match=r"holds no manifest.json"):
        check_job(replace(job_of(dataset), dataset=DatasetRef(uri=str(tmp_path))), ranks=1)
    with pytest.raises(ConfigError, match="would have nothing to do"):
        check_job(job_of(dataset, training={"world_size": 1, "gradient_accumulation_steps": 2}), ranks=3)


def test_gpus_on_several_hosts_are_refused_where_encryption_is_required(dataset: Path) -> None:
    job = job_of(dataset, training={"world_size": 3, "encryption": "required"})
    assert check_job(job, ranks=3, hosts=3).sentences == ()
    assert check_job(job, ranks=3, hosts=1, has_gpus=True).sentences == ()
    with pytest.raises(ConfigError, match="GPUs on 3 hosts communicate through NCCL"):
        check_job(job, ranks=3, hosts=3, has_gpus=True)


def test_a_package_that_nodes_of_this_machine_lack_is_told_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, fsdp, horovod = (DistributedTrainingConfig(strategy=name) for name in ("ddp", "fsdp", "horovod"))
    assert check_strategy(ddp, 1, False, is_here=True) == check_strategy(fsdp, 2, False, is_here=False) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the Python package 'horovod', which is not installed"):
        check_strategy(horovod, 1, False, is_here=True)
    [said] = check_strategy(horovod, 1, False, is_here=False)
    assert "'horovod' on the nodes, which cannot be seen from here" in said
    with pytest.raises(ConfigError, match=r"its own connections, which are not encrypted, .*encryption = 'off'"):
        check_strategy(horovod, 2, False, is_here=False)
    assert check_strategy(replace(horovod, encryption="off"), 2, False, is_here=False) == [said]

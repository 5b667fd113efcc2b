"""The model of a script becomes a version as others do: with its data, hours and dollars, a server that answers, and
no alias by luck. What nodes have changed is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.orders import keep_order, order_of
from dtrain_dagster.registry import base
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.promotion import choose_alias, compare_measures
from dtrain_dagster.registry.registration import register_job
from dtrain_dagster.registry.run_model import RunModelError, load_run_model
from dtrain_dagster.registry.smoke_test import Candidate
from dtrain_dagster.registry.versions import TrainingProvenance
from harness.accuracy import Accuracy
from harness.tables import copy_tables
from tests.dtrain_dagster.registry.scoring import scoring_here
from trainer import Trainer
from trainer.evaluation.gate import Gate
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow
MADE = TrainingProvenance(
    nodes=2, node_hours=0.25, cost_usd="$0.50", cost_usd_total=0.5, code_version="abc", dagster_run_id="", sku="NC6"
)


def reported(value: float, samples: str = "these", mode: str = "max") -> dict[str, Any]:
    chance = {"figure": "right", "mode": mode, "value": value, "shuffled": 0.5, "deviation": 0.1, "samples": samples}
    return {"model": {"samples": 40}, "chance": chance}


@pytest.mark.parametrize(
    ("own", "its", "alias", "said"),
    [
        (reported(0.9), reported(0.8), "champion", "right 0.90000 beats the champion (version 1)'s 0.80000"),
        (reported(0.8), reported(0.9), "challenger", "does not beat the champion (version 1)'s 0.90000"),
        (reported(0.2, mode="min"), reported(0.3, mode="min"), "champion", "beats"),
        (reported(0.9), reported(0.8, "others"), "champion", "because it was judged on other samples"),
        (reported(0.9), {"model": {}}, "champion", "because it was judged by another figure"),
    ],
)
def test_scripts_are_compared_by_their_measure(own: Any, its: Any, alias: str, said: str) -> None:
    decision = choose_alias(Gate(True, ()), compare_measures("1", own, its))
    assert decision.alias == alias
    assert said in decision.reason


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(50, 8),
            nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).mean(1))


def texts(rows: int, seed: int) -> TensorDataset:
    words = torch.randint(0, 50, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words.sum(1) > 150).long())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose job was ordered from the home beside it; the training has registered its model, too."""
    folder = tmp_path_factory.mktemp("script")
    copy_tables(folder / "mlflow.db")
    tracking = {"mlflow_tracking_uri": f"sqlite:///{folder}/mlflow.db", "tensorboard": False}
    config = {"epochs": 8, "batch_size_per_gpu": 16, "learning_rate": 0.05, "monitor": "right", "mode": "max"}
    trainer = Trainer(
        Net(), config, loss=nn.CrossEntropyLoss(), metrics={"right": Accuracy()}, tracking=tracking, registry="here",
        run_dir=folder / "job",
    )  # fmt: skip
    result, test = trainer.fit(texts(200, 0), texts(40, 1), texts(40, 2)), texts(40, 2).tensors[0]
    assert result.model_version == "here version 1"
    with torch.no_grad():
        np.savez(folder / "asked.npz", inputs=test.numpy(), outputs=result.model.eval()(test).numpy())
    keep_order(folder / "home", RunDir(str(folder / "job")).read_job(), None)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, whose files a test may change."""
    home, run = tmp_path / "home", tmp_path / "job"
    shutil.copytree(trained / "job", run)
    document = json.loads((run / "job.json").read_text())
    (run / "job.json").write_text(json.dumps(document | {"run_dir": str(run)}))
    keep_order(home, RunDir(str(run)).read_job(), None)
    return tmp_path


def test_a_script_is_registered_as_others_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "scoring_server", scoring_here)
    copy_tables(folder / "mlflow.db")
    uri, told = f"sqlite:///{folder}/mlflow.db", list[str]()
    rundir = RunDir(str(folder / "job"))
    (folder / "job" / "tracking.json").unlink()  # its run is in the other MLflow
    found = register_job(
        MLflowRegistry(uri), str(folder / "home"), rundir.uri, "texts", MADE, experiment="e", told=told.append
    )
    assert found.serving.passed, found.serving.message
    assert found.serving.measured["rows"] == 32
    assert {item.name for item in found.serving.findings} >= {"answers", "schema", "equality", "refusal"}
    assert (found.decision.alias, found.verdict.passed) == ("champion", True), found.decision
    assert found.decision.reason == "the gate passed, and there is no other champion"
    assert re.search(r"The gate passed: right 0\.\d+, with shuffled targets 0\.\d+ \(t \d", found.card)
    assert re.match(r"right 0\.\d+, with shuffled .* for \$0\.50", worth_line(found.evaluation, 0.5) or "")
    import mlflow

    version = mlflow.MlflowClient(uri).get_model_version("texts", "1")
    job = rundir.read_job()
    expected = {"nodes": "2", "node_hours": "0.250000", "cost_usd": "$0.50", "code_version": "abc", "sku": "NC6"}
    expected |= {"dataset_id": job.dataset.dataset_id, "model": "Net", "loss": "CrossEntropyLoss", "job_id": job.job_id}
    assert expected.items() <= version.tags.items()
    assert "0.2500 node-hours on 2 node(s) (NC6)" in found.card
    with MLflowRegistry(uri).files("texts", "1") as files:
        [taken] = mlflow.models.Model.load(str(files)).signature.inputs.inputs
    assert (str(taken.type), taken.shape) == ("int64", (-1, 6))
    assert rundir.read_json("registration.json") == {"name": "texts", "version": "1", "alias": "champion"}
    again = MLflowRegistry(uri).register_model(
        Candidate(rundir.uri, order_of(folder / "home", rundir)), "texts", MADE.tags(), found.card, "e"
    )
    assert (again.version, again.created) == ("1", False)


def test_a_training_registers_its_model_by_itself(trained: Path) -> None:
    """As `Trainer(…, registry=…)` does where no orchestrator is; without dropout, and with the averages of training."""
    import mlflow

    uri = f"sqlite:///{trained}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    loaded, asked = mlflow.pyfunc.load_model("models:/here@challenger"), np.load(trained / "asked.npz")
    found = loaded.predict(asked["inputs"])
    np.testing.assert_allclose(found.to_numpy(), asked["outputs"], rtol=1e-4, atol=1e-5)
    assert list(found.columns) == ["prediction_1", "prediction_2"]
    assert loaded.input_example.shape == (3, 6)
    [version] = mlflow.MlflowClient(uri).search_model_versions("name='here'")
    job, result = RunDir(str(trained / "job")).read_job(), RunDir(str(trained / "job")).read_json("result.json")
    said = {"dataset_id": job.dataset.dataset_id, "loss": "CrossEntropyLoss", "steps": str(result["steps"])}
    assert said.items() <= version.tags.items()


def changed_program(folder: Path) -> None:
    path = folder / "program.pt2"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def changed_shape(folder: Path) -> None:
    text = (folder / "program.json").read_text()
    (folder / "program.json").write_text(text.replace('"shape": [6]', '"shape": [7]'))


def failed_export(folder: Path) -> None:
    (folder / "program.json").write_text('{"error": "the model cannot be exported"}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_program, r"program\.pt2 has sha256 .* it is damaged or was changed"),
        (changed_shape, "is not of the shape that program.json says"),
        (failed_export, r"could not be exported \(the model cannot be exported\): train again"),
        (lambda folder: (folder / "example.npz").unlink(), r"example\.npz is missing"),
        (lambda folder: (folder / "program.json").write_text("[]"), "holds a list, no object"),
    ],
)
def test_what_nodes_have_changed_is_not_used(folder: Path, change: Any, message: str) -> None:
    change(folder / "job" / "model")
    rundir = RunDir(str(folder / "job"))
    with pytest.raises(RunModelError, match=message):
        load_run_model(rundir, order_of(folder / "home", rundir))


def test_a_program_that_is_not_the_registered_one_is_not_used(folder: Path) -> None:
    """Whoever changes the program after its registration can change what `program.json` says of it as well."""
    rundir = RunDir(str(folder / "job"))
    order = order_of(folder / "home", rundir)
    assert order
    known = load_run_model(rundir, order).digests
    for name in known:
        with pytest.raises(RunModelError, match=rf"{name} is .* 000000000000… was registered"):
            load_run_model(rundir, replace(order, registered={**known, name: "0" * 64}))


def test_a_job_of_another_home_is_not_run(folder: Path) -> None:
    rundir = RunDir(str(folder / "job"))
    with pytest.raises(RunModelError, match="no such job was ordered from this DTRAIN_HOME"):
        load_run_model(rundir, order_of(folder / "elsewhere", rundir))

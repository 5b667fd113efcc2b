"""From a CSV file as people have it to a registered model that takes its rows: dates, categories, booleans, whole
numbers and missing values, by the names of the columns."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from dtrain_dagster.data.rows import RowParams, build_rows
from dtrain_dagster.registry import base
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.promotion import compare
from dtrain_dagster.registry.smoke_test import Candidate
from harness.tables import copy_tables
from tests.dtrain_dagster.registry.scoring import scoring_here
from tests.dtrain_dagster.registry.test_rows import assert_judged_by_its_weights, trained
from trainer.isolation.runner import Isolated, IsolationError
from trainer.rundir import RunDir

ROWS = 600


def visits() -> pd.DataFrame:
    """Rows with their split, of which the target follows from all columns but one."""
    random = np.random.default_rng(1)
    seen = pd.Timestamp("2021-03-01") + pd.to_timedelta(random.integers(0, 700 * 24, ROWS), unit="h")
    frame = pd.DataFrame({
        "seen": pd.Series(seen).where(random.random(ROWS) > 0.1),
        "age": pd.Series(random.integers(18, 90, ROWS)).where(random.random(ROWS) > 0.2).astype("Int64"),
        "calls": random.integers(0, 9, ROWS),
        "income": random.lognormal(10, 0.4, ROWS),
        "member": random.random(ROWS) > 0.5,
        "insured": pd.Series(random.random(ROWS) > 0.5).where(random.random(ROWS) > 0.2),
        "region": pd.Series(random.choice(["north", "south", "None"], ROWS)).where(random.random(ROWS) > 0.1),
        "split": np.array(["train", "train", "train", "valid", "test"])[np.arange(ROWS) % 5],
    })  # fmt: skip
    score = frame["calls"] - 4 + 2 * frame["member"] + (frame["region"] == "south") + (frame["age"] > 60).fillna(False)
    frame["bought"] = np.where(score + random.normal(0, 0.5, ROWS) > 1, "yes", "no")
    frame.loc[frame.index % 15 == 4, "region"] = "abroad"  # no training row has it
    return frame


@pytest.mark.slow
def test_a_registered_model_takes_the_rows_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "visits.csv"
    visits().to_csv(file, index=False)
    made = build_rows(str(file), str(tmp_path), RowParams(target="bought", split_by="split", missing="mean"))
    run = trained(tmp_path, made.uri, "mlp", "logistic", epochs=4, learning_rate=3e-3)
    copy_tables(tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    models = MLflowRegistry(uri)
    first = Candidate(run)
    version = models.register_model(first, "visits", {}, "# card")
    mlflow.set_tracking_uri(uri)
    loaded = mlflow.pyfunc.load_model(version.uri)
    said = {
        column["name"]: (column["type"], column["required"]) for column in loaded.metadata.signature.inputs.to_dict()
    }
    assert said == {
        "seen": ("datetime", False), "age": ("double", False), "calls": ("long", True), "income": ("double", True),
        "member": ("any", True), "insured": ("any", False), "region": ("string", False),
    }  # fmt: skip
    example = loaded.input_example
    assert list(example.columns) == list(said)

    rows = pd.read_csv(file, parse_dates=["seen"])
    rows = rows[rows["split"] == "test"].reset_index(drop=True)
    judged = np.load(RunDir(run).storage.path("predictions.npz"))
    found = loaded.predict(rows)
    assert found["prediction"].tolist() == judged["mu"].tolist()
    told = np.where(judged["target"] == 1, found["probability_1"], found["probability_0"])
    assert -np.log(told) == pytest.approx(judged["loss"], rel=1e-4, abs=1e-5), "the trainer's own evaluation"

    order = ["insured", "region", "income", "calls", "member", "age", "seen"]
    pd.testing.assert_frame_equal(loaded.predict(rows[order]), found)
    plain = loaded.predict(rows.drop(columns=["age", "region"]))
    blank = loaded.predict(rows.assign(age=np.nan, region=None))
    pd.testing.assert_frame_equal(plain, blank)
    spaced = loaded.predict(rows.assign(region=" " + rows["region"] + " "))
    pd.testing.assert_frame_equal(spaced, found)  # as the file's cells were read
    with pytest.raises(MlflowException, match=r"missing inputs \['calls'\]"):
        loaded.predict(rows.drop(columns="calls"))
    with pytest.raises(MlflowException, match="member holds a value that is missing"):
        loaded.predict(rows.assign(member=None))
    with pytest.raises(MlflowException, match=r"the column 'member' holds 2\.0, and is true or false"):
        loaded.predict(rows.assign(member=2))
    with pytest.raises(MlflowException, match=r"the column 'insured' holds .*, and is a boolean"):
        loaded.predict(rows.assign(insured="yes"))
    with pytest.raises(MlflowException, match="income holds a value that is missing"):
        loaded.predict(rows.assign(income=np.nan))

    monkeypatch.setattr(base, "scoring_server", scoring_here)
    checked = models.check_serving(first, version)
    assert checked.passed, checked.message
    assert f"{checked.measured['rows']} rows of prediction, probability_0, probability_1" in str(
        checked.figures()["schema"]
    )
    assert "compared: prediction" in str(checked.figures()["equality"])
    assert checked.measured["max_relative_difference_to_training"] == 0
    assert loaded.metadata.metadata["categories"]["region"] == ["north", "south"]
    assert loaded.metadata.metadata["classes"] == ["no", "yes"]
    with models.files(version.name, version.version) as files:
        compared = compare(first, version.version, files, files)
    assert compared.note == ""
    assert_judged_by_its_weights(first, "log_loss")
    with models.files(version.name, version.version) as files, monkeypatch.context() as patched:
        patched.setattr(Isolated, "predict", Mock(side_effect=IsolationError("missing inputs ['dials']")))
        other = compare(first, version.version, files, files)
    assert other.champion is None
    assert other.note == "it gave no forecasts of these samples: missing inputs ['dials']"
    logged = (RunDir(run).read_json("evaluation.json") or {})["model"]["log_loss"]
    assert (compared.champion, compared.candidate) == (pytest.approx(logged), pytest.approx(logged))

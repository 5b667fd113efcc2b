"""A model of rows becomes a version in the registry, and answers from there as it did in the run directory."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from dtrain_dagster.registry.endpoint import _payload, _text_of_date, listening_port
from dtrain_dagster.registry.registration import EvaluationError, judge_again
from dtrain_dagster.registry.smoke_test import SAME_WEIGHTS_TOLERANCE, TRAINING_TOLERANCE, Candidate, compare_answers
from dtrain_dagster.registry.versions import scores_table
from tests.kinds import build_table, table
from trainer.config import parse_job
from trainer.engine.run_job import run_job
from trainer.evaluation.gate import gate
from trainer.rundir import RunDir


def trained(folder: Path, uri: str, model: str, loss: str, name: str = "run", **training: float) -> str:
    run_dir = RunDir(str(folder / name))
    run_dir.make()
    document = {
        "job_id": name, "run_dir": run_dir.uri, "dataset": {"uri": uri}, "tracking": {"tensorboard": False},
        "model": {"factory": model}, "loss": {"factory": loss},
        "training": {"world_size": 1, "batch_size_per_gpu": 64, "gradient_accumulation_steps": 1, "epochs": 1,
                     **training},
    }  # fmt: skip
    job = parse_job(json.dumps(document))
    run_dir.write_job(job)
    assert run_job(job) == 0
    return run_dir.uri


@pytest.mark.long
def test_the_gate_reads_what_the_weights_answer_with_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With classes it does so in `test_table_inputs`."""
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    run_dir = trained(tmp_path, build_table(tmp_path, "value").uri, "mlp", "squared_error")
    assert_judged_by_its_weights(Candidate(run_dir), "rmse")


def assert_judged_by_its_weights(candidate: Candidate, score: str) -> None:
    said = candidate.rundir.read_json("evaluation.json")
    assert said is not None
    forged = copy.deepcopy(said)
    forged["baselines"]["linear"]["model_gain"], forged["canaries"] = 9.0, {}
    found = judge_again(candidate, forged)
    assert found["baselines"].keys() == said["baselines"].keys()
    for name, row in said["baselines"].items():
        assert found["baselines"][name] == pytest.approx(row, rel=1e-3, abs=1e-4)
    assert found["canaries"].keys() == said["canaries"].keys()
    assert found["gate"]["passed"] == said["gate"]["passed"]
    assert gate(found).passed == said["gate"]["passed"]
    forged["model"] = {**said["model"], score: 0.5 * said["model"][score]}
    with pytest.raises(EvaluationError, match=rf"says model\.{score} = .* was changed after the training"):
        judge_again(candidate, forged)


@pytest.mark.slow
def test_a_target_far_from_zero_is_judged_and_answered_by_its_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the same target near zero: single precision has one number for all 1200 of them."""
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    frame = table()[["x", "y", "colour", "value"]]
    runs, reports = {}, {}
    for name, offset in (("near", 0.0), ("far", 1.7e12)):
        shifted = frame.assign(value=frame["value"] + offset, x=frame["x"] + offset / 1000)
        runs[name] = trained(tmp_path, build_table(tmp_path, "value", shifted).uri, "mlp", "squared_error", name)
        reports[name] = RunDir(runs[name]).read_json("evaluation.json") or {}
    for part in ("model", "constant", "linear"):
        near, far = ((reports[name]["baselines"] | reports[name])[part] for name in runs)
        assert far == pytest.approx(near, rel=1e-3)
    assert reports["far"]["model"]["rmse"] < 100
    far = Candidate(runs["far"], None, str(tmp_path / "cache"))
    sample = far.sample
    assert compare_answers(sample, sample.expected)[1] <= TRAINING_TOLERANCE
    off = {"prediction": sample.expected["prediction"] + 0.01}
    assert compare_answers(sample, off)[0] > SAME_WEIGHTS_TOLERANCE, "a hundredth is much beside a deviation of 30"


def test_dates_are_sent_in_one_form_whatever_their_fractions() -> None:
    """A server of MLflow's reads a column by the form of its first value."""
    times = pd.Series([pd.Timestamp("2021-01-08 03:00:00"), pd.Timestamp("2021-04-09 23:30:00.218477")])
    content = json.dumps(_payload(pd.DataFrame({"at": times}), "mlflow"), default=_text_of_date)
    sent = [row[0] for row in json.loads(content)["dataframe_split"]["data"]]
    assert pd.to_datetime(pd.Series(sent)).equals(times)


def test_a_server_is_asked_only_where_it_listens_itself() -> None:
    serves = "import socket; own = socket.create_server(('127.0.0.1', 0)); print(own.getsockname()[1], flush=True)"
    started = [
        subprocess.Popen([sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for code in (serves, "print(0, flush=True)")
    ]
    (server, port), (other, _) = [(each, int(each.stdout.readline())) for each in started if each.stdout]
    assert listening_port(server.pid) == port
    assert listening_port(other.pid) is None
    for each in started:
        each.kill()
        each.communicate()


def test_names_and_figures_that_a_node_wrote_are_text_of_a_table() -> None:
    figures = {"rmse": 1.23456789, "![x](http://evil/p)": 1, "huge": 10**400}
    text = scores_table({"model": figures, "baselines": {}}, is_table=True)
    assert "1.2346" in text
    assert "![x]" not in text
    assert text.splitlines()[-1].count("–") == 1

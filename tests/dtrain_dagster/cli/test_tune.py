"""`dtrain tune` on a real cluster of two ranks, and what a training takes from the file that it writes."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from shells import Shell, shell_in

from dtrain_dagster.assets.plan_options import TrainingOptions, job_on
from dtrain_dagster.cli.job_options import Asked, stated_fields
from dtrain_dagster.cli.tune import summary
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.jobs.start import fingerprint
from dtrain_dagster.planning.tuned_settings import Tuned
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from harness.small_job import write_dataset
from tests.kinds import build_table
from trainer.config import ConfigError, DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig
from trainer.spec import DataSpec
from trainer.tuning.search_space import TrialSettings
from trainer.tuning.trial import TuningTrial
from trainer.tuning.tuner import Tuner, with_layout

SMALL = ("--set", "training.batch_size_per_gpu=32")
EVIDENCE: dict[str, Any] = {
    "dataset_id": "d1", "world_size": 2, "samples_per_rank": 256,
    "model": {"factory": "tcn", "args": {}}, "loss": {"factory": "student_t", "args": {}},
}  # fmt: skip
OF_THE_USUAL = EVIDENCE | {
    "model": {"factory": "har_tcn", "args": {}}, "loss": {"factory": "return_and_volatility", "args": {}},
}  # fmt: skip
"""The same of the model and the loss that a training on prices has where nobody says otherwise."""
CUT = {"batch_size_per_gpu": 256, "gradient_accumulation_steps": 1, "precision": "bf16"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Shell]:
    write_dataset(tmp_path / "walks")
    with shell_in(tmp_path, DTRAIN_NODES="2") as made:
        yield made


def write(folder: Shell, name: str, document: Any) -> str:
    (folder.folder / name).write_text(json.dumps(document))
    return name


def left(folder: Shell) -> list[psutil.Process]:
    """Processes that stay; one that is in its exit is given the time for that."""
    return psutil.wait_procs(folder.processes(), timeout=30)[1]


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_measure_settings_and_a_training_takes_them(folder: Shell):
    said = folder("tune", "--dataset", "walks", "--seconds", "10", "--out", "fast.json", "--name", "t", *SMALL)
    document = kept = folder.job("t").read_json("tuned.json")
    if kept["evidence"]["complete"] or kept["training"]:  # a busy machine may leave too little time to confirm
        document = json.loads((folder.folder / "fast.json").read_text())
        assert kept["training"] == document["training"]
        assert document["evidence"]["cost"]["node_seconds"] > 10
    evidence = document["evidence"]
    assert (evidence["world_size"], evidence["samples_per_rank"]) == (2, 64)
    assert evidence["baseline"]["samples_per_second"]["median"] > 0
    rows = evidence["candidates"]
    assert {row["group"] for row in rows} >= {"layout", "precision"}
    assert all(row["settings"] | row["change"] == row["settings"] for row in rows)
    assert any("samples_per_second" in row for row in rows)
    cuts = [row["settings"] for row in rows if row["group"] == "layout"]
    assert all(cut["batch_size_per_gpu"] * cut["gradient_accumulation_steps"] == 64 for cut in cuts)
    assert "node-seconds" in said
    assert ("keep the settings as configured" in said) == (evidence["complete"] and not document["training"])
    assert not left(folder)

    document["training"] = {"batch_size_per_gpu": 64, "gradient_accumulation_steps": 1, "precision": "bf16"}
    write(folder, "fast.json", document)  # whatever was fastest just now
    steps = ("--set", "training.max_steps=2", "--set", "training.gradient_accumulation_steps=2")
    asked = ("train", "--dataset", "walks", "--nodes", "1", "--name", "stated", *SMALL, *steps)
    assert "measured with world_size 2, and this training has 1" in folder.here(*asked, "--settings", "fast.json")
    training = folder.job("stated").read_job().training
    assert (training.precision, training.batch_size_per_gpu) == ("bf16", 32)  # what is stated on the command line wins
    assert folder.job("stated").read_json("result.json")["status"] == "succeeded"


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_ends_the_job_and_leaves_nothing_running(folder: Shell):
    process = folder.start("tune", "--dataset", "walks", "--seconds", "300", "--name", "t", *SMALL)
    until = time.monotonic() + 100
    while not any(event["doing"] == "ready" for event in folder.job("t").events("tune")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cancelling job t" in err
    assert "tuning cost" in err
    assert not left(folder)
    # It was written by the ranks, at the end of their interval; what is not worth a file makes none.
    document = folder.job("t").read_json("tuned.json")
    assert not document["evidence"]["complete"]
    assert (folder.folder / "tuned.json").exists() == bool(document["training"])


def test_nothing_is_started_that_could_not_be_delivered_or_told(folder: Shell):
    (folder.folder / "folder").mkdir()
    asked = ("tune", "--dataset", "walks")
    assert "--out folder cannot be written: it is a folder" in folder.refused(*asked, "--out", "folder")
    assert "--out nowhere/fast.json cannot be written" in folder.refused(*asked, "--out", "nowhere/fast.json")
    assert "--seconds 1: settings cannot be compared in less than 10 s" in folder.refused(*asked, "--seconds", "1")
    assert "settings cannot be compared" in folder.refused(*asked, "--seconds", "nan")
    assert "give either --config or --dataset" in folder.refused("tune")
    assert "use fewer ranks" in folder.refused(*asked, "--set", "training.gradient_accumulation_steps=9999")
    assert not (folder.home / "storage" / "jobs").exists()


def test_a_file_that_cannot_be_used_is_refused_with_its_reason(folder: Shell):
    asked = ("train", "--dataset", "walks", "--settings")
    said = folder.refused(*asked, "nowhere.json")
    assert "there is no such file; `dtrain tune` and `dtrain search` write one" in said
    wrong = write(folder, "wrong.json", {"training": {"precision": "bf16", "epochs": 3}, "comment": "fast"})
    said = folder.refused(*asked, wrong)
    assert "'comment', 'training.epochs' cannot be set by such a file" in said
    assert "batch_size_per_gpu" in said
    assert 'must be a JSON object with "training" in it' in folder.refused(*asked, write(folder, "list.json", []))
    (folder.folder / "cut.json").write_text('{"training": ')
    assert "cut.json cannot be read" in folder.refused(*asked, "cut.json")
    assert "training.precision = 'bf17'" in folder.refused(
        *asked, write(folder, "value.json", {"training": {"precision": "bf17"}})
    )
    half = write(folder, "half.json", {"training": {"batch_size_per_gpu": 512}})
    assert f"{folder.folder}/half.json: one of training.batch_size_per_gpu" in folder.refused(*asked, half)
    other = write(folder, "other.json", {"training": CUT, "evidence": EVIDENCE})
    said = folder.refused(*asked, other, "--model", "lstm")
    assert "measured with model {'factory': 'tcn', 'args': {}}, and this training has {'factory': 'lstm'" in said
    assert not (folder.home / "storage" / "jobs").exists()


class TestWhatATrainingTakes:
    JOB = JobConfig(
        job_id="j", run_dir="r", dataset=DatasetRef(uri="data", dataset_id="d1"),
        training=DistributedTrainingConfig(world_size=2),
    )  # fmt: skip
    TUNED = Tuned("tuned.json", CUT, EVIDENCE)

    def test_all_of_it_without_a_word_where_it_was_measured_on_this_very_training(self):
        assert self.TUNED.settings_for(self.JOB, ()) == (CUT, [])

    def test_what_is_stated_stays_and_the_two_that_make_a_batch_stay_together(self):
        assert self.TUNED.settings_for(self.JOB, {"precision"})[0] == {n: v for n, v in CUT.items() if n != "precision"}
        assert self.TUNED.settings_for(self.JOB, {"gradient_accumulation_steps"})[0] == {"precision": "bf16"}

    def test_other_data_or_ranks_are_named(self):
        data = replace(self.JOB, dataset=DatasetRef(uri="data", dataset_id="d2"))
        used, [said] = self.TUNED.settings_for(data, ())
        assert used == CUT
        assert "measured with dataset_id d1, and this training has d2" in said
        ranks = replace(self.JOB, training=replace(self.JOB.training, world_size=3))
        assert "measured with world_size 2, and this training has 3" in self.TUNED.settings_for(ranks, ())[1][0]
        assert "does not say what it was measured on" in Tuned("mine.json", CUT).settings_for(self.JOB, ())[1][0]

    def test_a_search_that_ended_early_is_told_of(self):
        [said] = Tuned("tuned.json", CUT, EVIDENCE | {"complete": False}).settings_for(self.JOB, ())[1]
        assert "ended early" in said

    def test_another_number_of_samples_in_a_step_is_another_training(self):
        other = replace(self.JOB, training=replace(self.JOB.training, batch_size_per_gpu=512))
        with pytest.raises(ConfigError, match=r"256 samples per rank and step, .* has 1024; .*state both"):
            self.TUNED.settings_for(other, ())
        assert self.TUNED.settings_for(other, {"batch_size_per_gpu"})[0] == {"precision": "bf16"}


def test_tuned_settings_are_a_part_of_a_plan_and_of_its_identity(tmp_path: Path):
    settings = Settings(home=tmp_path, nodes=2)
    resources: dict[str, Any] = build_resources(settings)
    dataset = BuiltDataset(
        uri="data", dataset_id="d1", rows=1, samples={}, excluded={}, built=True, shared_uri="data"
    )  # fmt: skip
    (tmp_path / "fast.json").write_text(json.dumps({"training": CUT, "evidence": OF_THE_USUAL}))

    def planned(**options: Any) -> JobConfig:
        return job_on(2, TrainingOptions(**options), resources["cluster"], resources["project"], dataset)

    file = str(tmp_path / "fast.json")
    plain, tuned = planned(), planned(settings_file=file)
    assert (tuned.training.batch_size_per_gpu, tuned.training.precision) == (256, "bf16")
    assert tuned.training.global_batch_size == plain.training.global_batch_size
    assert fingerprint(tuned, 2, 1) != fingerprint(plain, 2, 1)
    assert planned(settings_file=file, more={"precision": "fp32"}).training.precision == "fp32"
    assert planned(settings_file=file, batch_size_per_gpu=64).training.batch_size_per_gpu == 64
    with pytest.raises(ConfigError, match="measured with model"):
        planned(settings_file=file, model="lstm")


WORN_OUT: list[int] = []


def tires(spec: DataSpec, outputs: int) -> torch.nn.Module:
    """A model that runs out of memory in its first step once it is worn out."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(len(spec.features), outputs)

        def forward(self, windows: torch.Tensor) -> torch.Tensor:
            if WORN_OUT and self.training:
                raise MemoryError
            return self.layer(windows[:, -1])

    return Model()


@contextlib.contextmanager
def tuning(run_dir: Path, uri: str, model: str, loss: str, seconds: float = 30.0) -> Iterator[Tuner]:
    """A single rank, in this process."""
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    training = DistributedTrainingConfig(world_size=1, batch_size_per_gpu=64, gradient_accumulation_steps=1, epochs=100)
    job = JobConfig(
        job_id="t", run_dir=str(run_dir), dataset=DatasetRef(uri=uri), model=FactoryConfig(factory=model),
        loss=FactoryConfig(factory=loss), training=training,
    )  # fmt: skip
    made = Tuner(job, seconds)
    try:
        yield made
    finally:
        made.close()
        signal.signal(signal.SIGTERM, handler)
        torch.set_num_threads(threads)
        gc.unfreeze()


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", __name__)
    with tuning(tmp_path / "t", str(write_dataset(tmp_path / "walks")), f"{__name__}:tires", "student_t") as made:
        yield made
    WORN_OUT.clear()


@pytest.mark.slow
def test_the_rows_of_a_table_are_tuned_like_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    with tuning(tmp_path / "t", build_table(tmp_path).uri, "mlp", "logistic", seconds=4.0) as made:
        learned = made.learn(TrialSettings(), 20)
        assert learned.first > learned.loss, learned.why
        made.search.run()
        assert {"layout", "precision", "input"} <= {row["group"] for row in made.search.rows}
        assert made.document()["evidence"]["dataset_id"] == made.data.dataset_id


def test_what_is_learned_begins_at_the_first_weights_and_has_the_whole_schedule(tuner: Tuner):
    assert not tuner.prepare(TrialSettings())
    short, again, longer = (tuner.learn(TrialSettings(), steps) for steps in (20, 20, 60))
    assert short == again
    by_hand = TuningTrial(tuner.job, TrialSettings(), tuner.world, tuner.faults)
    by_hand.enter_world(tuner.world)
    assert short.first == longer.first == by_hand.validation_loss()
    by_hand.total_steps = 20
    by_hand.train_steps(20)
    assert short.loss == by_hand.validation_loss()
    by_hand.close()
    assert short.first > short.loss > longer.loss
    halves = TrialSettings((("batch_size_per_gpu", 32), ("gradient_accumulation_steps", 2)))
    assert tuner.learn(halves, 20).loss == pytest.approx(short.loss, abs=1e-4)


def test_what_runs_out_of_memory_while_it_learns_is_told_and_ends_nothing(tuner: Tuner):
    WORN_OUT.append(1)
    assert tuner.learn(TrialSettings(), 20).why == "out of memory"
    WORN_OUT.clear()
    assert not tuner.learn(TrialSettings(), 20).why
    assert not tuner.prepare(TrialSettings())


def test_a_batch_is_written_as_both_of_its_parts():
    config = DistributedTrainingConfig(world_size=2, batch_size_per_gpu=64, gradient_accumulation_steps=2)
    assert with_layout((("batch_size_per_gpu", 256),), config) == {
        "batch_size_per_gpu": 256, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    assert with_layout((("precision", "bf16"),), config) == {"precision": "bf16"}


def test_what_is_stated_is_found_in_whole_sections_and_in_the_environment(folder: Shell, tmp_path: Path):
    asked = ["training.precision=bf16", "training.epochs=2", 'training={"clip_norm": 1}', "model.factory=lstm"]
    assert stated_fields(asked) == {"precision", "epochs", "clip_norm"}
    training = CUT | {"threads_per_rank": 7}
    file = tmp_path / "fast.json"
    file.write_text(json.dumps({"training": training, "evidence": OF_THE_USUAL | {"dataset_id": None}}))
    for threads, used in ((None, 7), (2, 2)):
        settings = Settings(home=tmp_path / "home", nodes=2, threads_per_rank=threads)
        sets = ('training={"clip_norm": 0.5, "precision": "fp32"}',)
        job, _ = Asked(dataset=str(tmp_path / "walks"), nodes=2).job(settings, sets, "j", str(file))
        found = job.training
        assert (found.threads_per_rank, found.clip_norm, found.precision) == (used, 0.5, "fp32")
        assert found.batch_size_per_gpu == 256


def test_the_result_is_said_in_sentences() -> None:
    pace = {"samples_per_second": {"low": 900.0, "median": 1000.0, "high": 1100.0}}
    rows: list[dict[str, Any]] = [{"group": "input", "verdict": "too few rounds to tell"}]
    gain = {"low": 1.1, "median": 1.2, "high": 1.3}
    evidence = {"complete": True, "baseline": pace, "chosen": pace, "gain": gain, "candidates": rows}
    out, chosen = Path("fast.json"), {"precision": "bf16"}
    assert summary({"training": {}, "evidence": evidence}, out) == [
        "1 candidate(s) had too little time: a larger --seconds compares more of them",
        "keep the settings as configured (1,000 samples/s): no change was faster beyond noise",
    ]
    rows[0] = {"verdict": "confirmed", "gain_interval": {"low": 1.13, "middle": 1.2, "high": 1.27}, "rounds": 25}
    [said, _] = summary({"training": chosen, "evidence": evidence}, out)
    assert said == (
        "precision = bf16: 1,000 samples/s instead of 1,000, +20.0 % (95 % interval +13.0 to +27.0 %, 25 rounds), "
        "measured apart from the search"
    )
    rows.clear()
    assert summary({"training": chosen, "evidence": evidence | {"complete": False}}, out) == [
        "ended early: this is the best so far, not compared with the untuned settings; it may be no faster",
        "precision = bf16: 1,000 samples/s instead of 1,000, +20 % (+10 to +30 %)",
        "use it: dtrain train … --settings fast.json",
    ]

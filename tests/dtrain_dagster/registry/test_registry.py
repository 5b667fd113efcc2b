from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.orders import Order, keep_order
from dtrain_dagster.registry import promotion
from dtrain_dagster.registry.endpoint import ScoringEndpoint, ServingError, check_endpoint, scoring_server
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.promotion import Comparison, choose_alias
from dtrain_dagster.registry.registration import register_job
from dtrain_dagster.registry.run_model import RunModelError
from dtrain_dagster.registry.smoke_test import (
    SAME_WEIGHTS_TOLERANCE,
    TRAINING_TOLERANCE,
    Candidate,
    Sample,
    compare_answers,
)
from dtrain_dagster.registry.versions import (
    PACKED_TAG,
    RUN_TAGS,
    PackedError,
    RegisteredModel,
    RegistryError,
    TrainingProvenance,
    folder_digest,
    model_card,
    open_client,
)
from dtrain_dagster.support.formatting import in_markdown
from dtrain_dagster.support.user_code import stage_for_serving
from harness import small_job
from harness.tables import copy_tables
from harness.waiting import until
from tests.leaks import leaks
from trainer.engine import reports
from trainer.evaluation.gate import RULE, Gate, gate
from trainer.observability import mlflow_sqlite
from trainer.rundir import RunDir
from trainer.secrets.redaction import STRUCK, remember

TOKEN = "pl4nt3d/robot+tobor=="
PASSED, REFUSED = Gate(True, ()), Gate(False, ("NLL 1.0 is not below ewma's 0.9",))
PROVENANCE = TrainingProvenance(
    nodes=3,
    node_hours=0.0123,
    cost_usd="$0.0377 (stand-in price, nothing was billed)",
    code_version="abc",
    dagster_run_id="d1",
)


def comparison(candidate: float | None, champion: float | None, note: str = "") -> Comparison:
    return Comparison(
        champion_version="4", metric="NLL", candidate=candidate, champion=champion, windows=100, note=note
    )


def test_two_that_open_a_new_sqlite_file_at_once_get_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whom one is a training, say."""
    made = list[Path]()

    def make(path: Path) -> None:
        made.append(path)
        time.sleep(0.2)
        path.write_text("tables")

    monkeypatch.setattr(mlflow_sqlite, "_make", make)
    with ThreadPoolExecutor(2) as both:
        list(both.map(mlflow_sqlite.make_tables, [f"sqlite:///{tmp_path}/mlflow.db"] * 2))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("verdict", "champion", "alias", "says"),
    [
        (PASSED, None, "champion", "no other champion"),
        (
            PASSED,
            comparison(-2.0, -1.9),
            "champion",
            "-2.00000 beats the champion (version 4)'s -1.90000 on the same 100",
        ),
        (PASSED, comparison(-1.9, -2.0), "challenger", "does not beat"),
        (PASSED, comparison(-2.0, -2.0), "challenger", "does not beat"),
        (PASSED, comparison(None, None, "its window is 30, not 60"), "champion", "not compared"),
        (REFUSED, None, "challenger", "NLL 1.0 is not below ewma's 0.9"),
        (REFUSED, comparison(-2.0, -1.9), "challenger", "the gate did not pass"),
    ],
)
def test_only_a_better_model_that_passed_becomes_champion(
    verdict: Gate, champion: Comparison | None, alias: str, says: str
) -> None:
    decision = choose_alias(verdict, champion)
    assert decision.alias == alias
    assert says in decision.reason


@pytest.mark.parametrize(
    ("its", "test_first", "note"),
    [
        ({"train_last": "2015-12-31", "valid_last": "2016-06-30"}, "2017-01-02", ""),
        ({"train_last": "2015-12-31", "valid_last": "2017-06-30"}, "2017-01-02", "saw days up to 2017-06-30"),
        ({"train_last": "2017-01-02"}, "2017-01-02", "saw days up to 2017-01-02"),
        ({"dataset_id": "d1"}, "", ""),
        ({"dataset_id": "d2"}, "", "was trained on another dataset"),
    ],
)
def test_a_champion_that_saw_what_is_tested_now_is_favoured_and_it_is_said(
    its: dict[str, str], test_first: str, note: str
) -> None:
    found = promotion.overlap_note({"dataset_id": "d1"}, its, test_first)
    assert note in found
    assert bool(found) == bool(note)


WINDOWS = {"window": 60, "features": ["a"], "target": "log_return", "horizon": 5, "dataset_id": "d1"}
TABLE = {"task": "binary", "target": "y", "classes": ["a", "b"], "inputs": [{"name": "x", "type": "boolean"}]}


@pytest.mark.parametrize(
    ("own", "changes", "difference"),
    [
        (WINDOWS, {"dataset_id": "d2"}, ""),
        (WINDOWS, {"window": 30}, "its window is 30, not 60"),
        (WINDOWS, {"horizon": 10}, "its horizon is 10, not 5"),
        (TABLE, {"inputs": [{"name": "z", "type": "string"}]}, ""),  # its signature tells
        (TABLE, {"inputs": [{"name": "x", "type": "number"}]}, ""),
        (TABLE, {"inputs": [{"name": "x", "type": "string"}]}, "its column 'x' is of type string, and here boolean"),
        (TABLE, {"classes": ["a", "c"]}, "its classes is ['a', 'c'], not ['a', 'b']"),
        (TABLE, {"inputs": []}, "it was registered by an older version: train and register it again"),
    ],
)
def test_models_are_compared_where_they_take_and_forecast_the_same(
    own: dict[str, Any], changes: dict[str, Any], difference: str
) -> None:
    assert promotion.input_difference(own, own | changes) == difference


def test_a_champion_gets_whole_numbers_in_the_type_that_it_takes() -> None:
    rows = pd.DataFrame({name: [1, 2] for name in ("whole", "number", "gone", "other")} | {"word": ["a", "b"]})
    inputs = [
        {"name": "whole", "type": "integer", "missing": False},
        {"name": "number", "type": "number", "missing": False},
        {"name": "gone", "type": "integer", "missing": True},
        {"name": "word", "type": "string", "missing": True},
    ]
    found = promotion.as_taken(rows, inputs)
    assert [found[name].dtype.kind for name in rows] == ["i", "f", "f", "i", "O"]


def test_what_a_module_imports_travels_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    for name, text in {
        "lonely_model.py": "import scipy.stats\nfrom lonely_helper import f\nfrom grouped.inner import shared\n",
        "lonely_helper.py": "f = 1\n",
        "unrelated.py": "",
        "grouped/inner/__init__.py": "from . import shared\n",
        "grouped/inner/shared.py": "from ..sibling import g\n",
        "grouped/inner/table.csv": "1",
        "grouped/sibling.py": "g = 1\n",
        "grouped/other.py": "",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    monkeypatch.syspath_prepend(str(source))
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "lonely_model")
    target = tmp_path / "code"
    target.mkdir()
    staged = stage_for_serving(["lonely_model:make", "tcn"], target)
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert {path for path in copied if not path.startswith("trainer/")} == {
        "lonely_model.py",
        "lonely_helper.py",
        "grouped/inner/__init__.py",
        "grouped/inner/shared.py",
        "grouped/inner/table.csv",
        "grouped/sibling.py",
    }
    assert any(requirement.startswith("scipy==") for requirement in staged.requirements)
    assert all("+" not in requirement for requirement in staged.requirements)


@pytest.fixture(autouse=True)
def _own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "mine")


@dataclass
class Home:
    path: Path
    dataset: Path
    tracking_uri: str

    @property
    def models(self) -> MLflowRegistry:
        return MLflowRegistry(self.tracking_uri)

    def train(self, job_id: str, **options: Any) -> str:
        return small_job.train(self.path, options.pop("dataset", self.dataset), job_id, **options)

    def register(self, trained: Candidate, name: str, card: str = "# card") -> RegisteredModel:
        tags = {**PROVENANCE.tags(), "asked_by": f"https://robot:{TOKEN}@example.org"}
        return self.models.register_model(trained, name, tags, f"{card}\n\n{TOKEN}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_CACHE", str(path / "cache"))
        copy_tables(path / "mlflow.db")
        patch.setattr(reports, "OPENING_SECONDS", 60.0)  # on a machine that is used up, MLflow takes longer than usual
        remember(TOKEN)
        yield Home(path, small_job.write_dataset(path / "dataset"), f"sqlite:///{path}/mlflow.db")


@pytest.fixture(scope="module")
def run_dir(home: Home) -> Iterator[str]:
    """A job with a model of one's own that reported to MLflow while it trained."""
    source = home.path / "source"
    (source / "mine").mkdir(parents=True)
    (source / "mine" / "net.py").write_text(
        "from torch import nn\nfrom mine.size import HIDDEN\n\n\ndef make(spec, outputs):\n"
        "    size = spec.window * len(spec.features)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))\n"
    )
    (source / "mine" / "size.py").write_text("HIDDEN = 4\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(source))
        patch.setenv("PYTHONPATH", str(source))
        patch.setenv("DTRAIN_FACTORY_MODULES", "mine")
        yield home.train("job-a", model="mine.net:make", tracking_uri=home.tracking_uri)


def ordered(run_dir: str) -> Candidate:
    return Candidate(run_dir, Order(job=RunDir(run_dir).read_job()))


@pytest.fixture(scope="module")
def trained(run_dir: str) -> Candidate:
    """Its model, which is asked once for all tests."""
    return ordered(run_dir)


@pytest.fixture(scope="module")
def card(run_dir: str) -> str:
    return card_of(run_dir, PROVENANCE)


def card_of(run_dir: str, provenance: TrainingProvenance) -> str:
    rundir = RunDir(run_dir)
    job = rundir.read_job()
    result, evaluation = rundir.read_json("result.json"), rundir.read_json("evaluation.json")
    manifest = json.loads((Path(job.dataset.uri) / "manifest.json").read_text())
    verdict = gate(evaluation)
    return model_card("forecaster", job, result, evaluation, manifest, provenance, verdict)


@pytest.fixture(scope="module")
def model(home: Home, trained: Candidate, card: str) -> RegisteredModel:
    return home.register(trained, "forecaster", card)


@pytest.fixture(scope="module")
def server(home: Home, model: RegisteredModel) -> Iterator[ScoringEndpoint]:
    """It runs elsewhere and without PYTHONPATH: code that did not travel is missed."""
    with home.models.served(model) as running:
        yield running


@pytest.mark.slow
def test_a_version_tells_where_it_comes_from(home: Home, run_dir: str, model: RegisteredModel) -> None:
    client = open_client(home.tracking_uri)
    version = client.get_model_version("forecaster", model.version)
    result = RunDir(run_dir).read_json("result.json")
    manifest = json.loads((home.dataset / "manifest.json").read_text())
    expected = {
        "job_id": "job-a",
        "dataset_id": manifest["dataset_id"],
        "code_version": "abc",
        "world_size": "1",
        "nodes": "3",
        "node_hours": "0.012300",
        "cost_usd": PROVENANCE.cost_usd,
        "checkpoint": result["checkpoint"],
        "weights_sha256": result["weights_sha256"],
        "dagster_run_id": "d1",
        "test_nll": f"{result['test']['nll']:.6f}",
    }
    assert expected.items() <= version.tags.items()
    of_run = open_client(home.tracking_uri).get_run(version.run_id).data.tags
    own = {name: value for name, value in of_run.items() if not name.startswith("mlflow.")}
    assert set(own) <= {*RUN_TAGS, "best_baseline"}, "what the version has is not said twice"
    assert {name: own[name] for name in ("job_id", "weights_sha256")}.items() <= version.tags.items()
    assert version.run_id == result["mlflow_run_id"] == model.run_id
    assert "mlartifacts" in version.source
    assert client.get_run(model.run_id).info.artifact_uri.startswith(str(home.path / "mlartifacts"))
    with home.models.files(model.name, model.version) as folder:
        assert {path.name for path in folder.iterdir()} >= {"MLmodel", "model_card.md", "evaluation.json"}


@pytest.mark.slow
def test_a_secret_of_a_tag_or_the_card_is_struck_out_of_all_that_is_kept(home: Home, model: RegisteredModel) -> None:
    assert STRUCK in model.tags["asked_by"]
    assert leaks([home.path], [TOKEN]) == []


@pytest.mark.slow
def test_the_saved_model_has_signature_example_and_no_pickle(home: Home, model: RegisteredModel) -> None:
    from mlflow.models import Model

    with home.models.files(model.name, model.version) as folder:
        saved = Model.load(folder)
        example = np.array(json.loads((folder / "input_example.json").read_text()), dtype=np.float32)
        assert not list(folder.rglob("*.pkl"))
        requirements = (folder / "requirements.txt").read_text().split()
    assert saved.signature.inputs.inputs[0].shape == (-1, small_job.WINDOW, len(small_job.FEATURES))
    assert saved.signature.outputs.input_names() == ["mu", "sigma", "nu", "q05", "q25", "q50", "q75", "q95"]
    assert example.shape == (3, small_job.WINDOW, len(small_job.FEATURES))
    assert np.ptp(example) > 0
    assert all("==" in line for line in requirements)
    assert {line.split("==")[0] for line in requirements} == {"mlflow", "numpy", "pandas", "pydantic", "scipy", "torch"}


@pytest.mark.slow
def test_the_same_job_is_registered_once_and_other_weights_of_it_beside(
    home: Home, run_dir: str, trained: Candidate, model: RegisteredModel
) -> None:
    """Each version has files of its own in the run that it was registered from, and knows their digest."""
    again = home.register(ordered(run_dir), "forecaster")
    assert (again.version, again.created, model.created) == (model.version, False, True)
    client = open_client(home.tracking_uri)
    before = len(client.search_model_versions("name = 'forecaster'"))
    copy = RunDir(str(shutil.copytree(run_dir, home.path / "again" / "job-a")))
    copy.write_json("result.json", (copy.read_json("result.json") or {}) | {"weights_sha256": "0" * 64})
    same = ordered(copy.uri)
    same.sample = trained.sample  # so that it is not asked again
    other, repeated = home.register(same, "forecaster"), home.register(ordered(copy.uri), "forecaster")
    assert (other.created, repeated.created, repeated.version) == (True, False, other.version)
    assert len(client.search_model_versions("name = 'forecaster'")) == before + 1
    assert other.run_id == model.run_id
    sources = {client.get_model_version("forecaster", version).source for version in (model.version, other.version)}
    assert len(sources) == 2
    for each in (model, other):
        with home.models.files(each.name, each.version) as folder:
            assert folder_digest(folder) == each.tags[PACKED_TAG]


@pytest.mark.slow
def test_the_card_says_what_it_is_and_what_it_is_not(
    home: Home, run_dir: str, card: str, model: RegisteredModel
) -> None:
    evaluation = RunDir(run_dir).read_json("evaluation.json")
    for baseline, row in evaluation["baselines"].items():
        [line] = [line for line in card.splitlines() if line.startswith(f"| {in_markdown(baseline)} |")]
        assert f"{row['nll']:.5g}" in line if "nll" in row else "–" in line
    assert f"{evaluation['model']['nll']:.5g}" in card
    assert evaluation["notes"][0] in card
    assert f"A model passes if {RULE}; the linear one is ridge" in card
    assert f"Earned {worth_line(evaluation, PROVENANCE.cost_usd_total)}." in card
    assert " launches" not in card
    assert "launches" not in PROVENANCE.tags()
    resumed = replace(PROVENANCE, launches=2, train_seconds=1234.0)
    assert "1234 s of training over 2 launches." in card_of(run_dir, resumed)
    assert resumed.tags()["launches"] == "2"
    for text in (
        "public domain",
        "synthetic",
        "stand-in price",
        "curl",
        "not investment advice",
        "drawn, not observed",
    ):
        assert text in card
    client = open_client(home.tracking_uri)
    assert "`champion` is the version" in client.get_registered_model("forecaster").description
    version = client.get_model_version("forecaster", model.version)
    assert len(version.description) <= 5000
    assert version.description.startswith("# forecaster")


@pytest.mark.slow
def test_a_training_that_did_not_succeed_is_refused(home: Home, run_dir: str, tmp_path: Path) -> None:
    stopped = RunDir(str(tmp_path / "stopped"))
    job = RunDir(run_dir).read_job()
    job.job_id = "stopped"
    stopped.write_job(job)
    stopped.write_json("result.json", {"status": "stopped"})
    with pytest.raises(RegistryError, match="status 'stopped'"):
        home.register(ordered(stopped.uri), "forecaster")


@pytest.mark.slow
def test_a_model_of_ones_own_is_served_without_its_folder(
    home: Home, server: ScoringEndpoint, trained: Candidate
) -> None:
    with pytest.raises(RunModelError, match="nothing of it is imported; train it from here"):
        home.register(Candidate(trained.run_dir), "unordered")
    check = check_endpoint(server, trained, SAME_WEIGHTS_TOLERANCE)
    assert check.passed, check.message
    assert check.measured["rows"] == 32
    assert [item.name for item in check.findings] == ["answers", "schema", "equality", "refusal"]
    assert "compared: mu, sigma, nu" in check.findings[2].message
    assert server.url.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_a_server_of_another_model_does_not_pass(server: ScoringEndpoint, trained: Candidate) -> None:
    other = ordered(trained.run_dir)
    own = trained.sample.expected
    other.sample = replace(trained.sample, expected=own | {"sigma": 1.01 * own["sigma"]})  # the weights alone
    check = check_endpoint(server, other, SAME_WEIGHTS_TOLERANCE)
    assert not check.passed
    assert [item.name for item in check.findings if not item.passed] == ["equality"]
    found = check.measured
    assert found["max_relative_difference_to_training"] < 1e-5 < 1e-3 < found["max_relative_difference"]


def test_predictions_of_another_training_do_not_pass() -> None:
    answers = {"mu": np.array([0.1, -0.1]), "sigma": np.array([1.0, 2.0])}
    sample = Sample(windows=np.zeros((2, 12, 8)), expected=answers, trained=answers)
    assert compare_answers(sample, answers) == (0, 0)
    found = compare_answers(replace(sample, trained=answers | {"sigma": answers["sigma"] * 1.01}), answers)
    assert found[0] == 0
    assert found[1] > TRAINING_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "says"),
    [
        (np.zeros((2, 3, 8)), r"\(2, 3, 8\).*\(-1, 12, 8\)"),
        (np.full((2, 12, 8), np.nan), "window 0 holds a value that is not finite"),
    ],
)
def test_the_server_says_what_is_wrong_with_a_request(server: ScoringEndpoint, windows: np.ndarray, says: str) -> None:
    status, body = server.post(windows)
    assert status == 400
    assert re.search(says, body.decode())


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(
    home: Home, trained: Candidate, model: RegisteredModel, tmp_path: Path
) -> None:
    check = home.models.check_serving(trained, replace(model, version="99"))
    assert not check.passed
    assert "version=99" in check.message
    with pytest.raises(ServingError, match="ended with exit code"), scoring_server(tmp_path):
        pass


@pytest.mark.slow
def test_the_server_is_one_process_and_dies_with_whoever_started_it(
    home: Home, server: ScoringEndpoint, model: RegisteredModel
) -> None:
    """The second one loses its parent while it starts, when all that ends it has been set."""
    [ready] = [each for each in psutil.Process().children(recursive=True) if is_scoring(each)]
    assert ready.children() == []
    with home.models.files(model.name, model.version) as folder:
        starting = multiprocessing.get_context("fork").Process(target=start_server, args=(folder,))
        starting.start()
        try:
            until(lambda: any(is_scoring(each) for each in psutil.Process(starting.pid).children()))
            [process] = psutil.Process(starting.pid).children()
        finally:
            starting.kill()
            starting.join()
        try:
            until(lambda: not alive(process))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def is_scoring(process: psutil.Process) -> bool:
    """Whether it runs a model's server, and no longer what sets its limits; nor that of another test's experiments."""
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    words = process.cmdline()
    return any("scoring_server" in word for word in words) and not any(word.endswith("limited.py") for word in words)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_server(folder: Path) -> None:
    with scoring_server(folder):
        time.sleep(60)


@pytest.mark.slow
def test_champion_and_challenger_are_judged_on_the_same_windows(
    home: Home, trained: Candidate, model: RegisteredModel
) -> None:
    worse_dir = home.train("job-worse", model="mine.net:make", steps=1, learning_rate=1e-6)
    worst = ordered(worse_dir)
    worst.sample = trained.sample  # so that it is not asked
    worse = home.register(worst, "forecaster")
    assert home.models.judge_champion(trained, model) is None
    home.models.promote(worse, choose_alias(PASSED, None))

    with pytest.MonkeyPatch.context() as patch:  # a champion of days further ahead forecasts something else
        read = promotion._metadata
        horizons = iter((1, 10))
        patch.setattr(promotion, "_metadata", lambda folder: {**read(folder), "horizon": next(horizons)})
        other = home.models.judge_champion(trained, model)
    assert other is not None
    assert (other.champion, other.note) == (None, "its horizon is 10, not 1")

    compared = home.models.judge_champion(trained, model)

    assert compared is not None
    assert (compared.champion_version, compared.metric, compared.note) == (worse.version, "NLL", "")
    better_nll, worse_nll = (
        RunDir(each).read_json("result.json")["test"]["nll"] for each in (trained.run_dir, worse_dir)
    )
    assert compared.candidate == pytest.approx(better_nll, rel=1e-6)
    assert compared.champion == pytest.approx(worse_nll, rel=1e-5)
    decision = choose_alias(PASSED, compared)
    assert decision.alias == "champion"
    assert home.models.promote(model, decision) == worse.version
    assert home.models.champion_version("forecaster") == model.version
    tags = open_client(home.tracking_uri).get_model_version("forecaster", model.version).tags
    assert tags["alias_reason"] == decision.reason


@pytest.mark.slow
def test_changed_files_of_a_version_are_not_used(home: Home, model: RegisteredModel) -> None:
    version = open_client(home.tracking_uri).get_model_version(model.name, model.version)
    [weights] = Path(version.source.removeprefix("file://")).rglob("weights.pt")
    before = weights.read_bytes()
    weights.write_bytes(before + b" ")
    try:
        with pytest.raises(PackedError), home.models.files(model.name, model.version):
            pass
    finally:
        weights.write_bytes(before)


@pytest.mark.slow
def test_a_version_of_other_weights_gets_no_alias_by_these(home: Home, run_dir: str, model: RegisteredModel) -> None:
    """As where a job was removed and trained anew, and the registry has its version from before."""

    class Found(MLflowRegistry):
        def register_model(self, *_: Any) -> RegisteredModel:
            return replace(model, tags={**model.tags, "weights_file_sha256": "0" * 64})

    keep_order(home.path, RunDir(run_dir).read_job(), None)
    before = home.models.champion_version("forecaster")
    with pytest.raises(RunModelError, match=r"weights_file_sha256 .* 000000000000… was registered"):
        register_job(Found(home.tracking_uri), str(home.path), run_dir, "forecaster", PROVENANCE, experiment="anew")
    assert home.models.champion_version("forecaster") == before


@pytest.mark.slow
def test_an_alias_moves_and_no_version_has_two(home: Home, model: RegisteredModel) -> None:
    client = open_client(home.tracking_uri)
    for decision, expected in (
        (choose_alias(PASSED, None), ["champion"]),
        (choose_alias(REFUSED, None), ["challenger"]),
        (choose_alias(PASSED, None), ["champion"]),
    ):
        home.models.promote(model, decision)
        assert client.get_model_version(model.name, model.version).aliases == expected

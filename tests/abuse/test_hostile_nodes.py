"""Nodes that write what they like into the run directory: what reads it imports and calls nothing of theirs, and says
what is wrong. And code of a model that is allowed: it is asked where there are no secrets, and within limits."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain_dagster.jobs.orders import Order, OrderError, keep_order, keep_registration, order_of
from dtrain_dagster.registry.registration import EvaluationError, judge_again
from dtrain_dagster.registry.run_model import RunModelError, load_run_model
from dtrain_dagster.registry.smoke_test import AnswerError, Candidate
from tests.abuse import hostile_nodes
from tests.abuse.hostile_nodes import TARGETS, VARIANTS, Place, edit_json
from trainer.checkpoint.manager import CheckpointError, CheckpointManager
from trainer.config import ConfigError, FactoryConfig
from trainer.documents.factory_arguments import check_arguments
from trainer.model import losses, rows, stock
from trainer.model.allowed_factories import STOCK, is_module_allowed, modules_of_settings, parse_modules, refuse_foreign
from trainer.model.factories import build_from_factory
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir


class TestFactories:
    def test_the_stock_parts_are_those_of_the_modules(self) -> None:
        parts = {
            "model": (stock.STOCK, rows.MODELS),
            "loss": (losses.STOCK, rows.LOSSES),
        }
        assert {kind: tuple(sorted({*chain(*of_kinds)})) for kind, of_kinds in parts.items()} == STOCK

    @pytest.mark.parametrize("target", TARGETS)
    def test_nothing_is_imported_that_the_settings_do_not_name(self, target: str) -> None:
        module = target.partition(":")[0]
        with pytest.raises(ConfigError, match=f"set DTRAIN_FACTORY_MODULES={module}"):
            build_from_factory("loss", FactoryConfig(factory=target), {})

    def test_what_a_module_has_imported_is_not_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mine_abused.py").write_text(
            "import functools\nfrom subprocess import Popen\nfrom os import system\nfrom json import loads\n"
            "bound = functools.partial(Popen, 'true')\ncall = Popen.poll\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "mine_abused")
        for name, says in {
            "Popen": "defined in the module 'subprocess'",
            "loads": "defined in the module 'json'",
            "call": "defined in the module 'subprocess'",
            "system": "must be a function or a class",
            "bound": "must be a function or a class",
            "__builtins__": "not something to call",
        }.items():
            with pytest.raises(ConfigError, match=says):
                build_from_factory("model", FactoryConfig(factory=f"mine_abused:{name}"), {})

    def test_a_module_stands_for_itself_and_what_lies_below(self) -> None:
        assert is_module_allowed("mine", ("mine",))
        assert is_module_allowed("mine.deep.parts", ("mine",))
        assert not is_module_allowed("mine_too", ("mine",))
        assert not is_module_allowed("min", ("mine",))
        assert not is_module_allowed("mine", ("mine.parts",))
        assert not is_module_allowed("mine", ())
        assert modules_of_settings({}) == ()

    @pytest.mark.parametrize("text", ["os", "builtins", "subprocess", "a b", "a:b", "../x", "a..b", "*", ".a"])
    def test_what_is_no_module_of_ones_own_cannot_be_allowed(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"name"):
            parse_modules(text)
        with pytest.raises(ConfigError, match="DTRAIN_FACTORY_MODULES="):
            modules_of_settings({"DTRAIN_FACTORY_MODULES": text})

    @pytest.mark.parametrize("name", ["mine:a.b", "mine:", ":make", "mine", "mine:a b", "mine/x:make", "mine\n:make"])
    def test_a_name_has_one_form(self, name: str) -> None:
        with pytest.raises(ConfigError, match="written as package"):
            refuse_foreign("model", name, ("mine",))

    @pytest.mark.parametrize(
        "value",
        [print, type, object(), {1: 2}, {"a": {2: 3}}, float("nan"), [float("inf")], b"x", {1, 2}, list(range(10_001)),
         "x" * 100_001, [[[[[[[[[[1]]]]]]]]]]],
    )  # fmt: skip
    def test_arguments_are_bounded_data(self, value: Any) -> None:
        with pytest.raises(ValueError, match="args"):
            check_arguments({"value": value})
        with pytest.raises(ValueError, match="args"):
            FactoryConfig(factory="tcn", args={"value": value})


class TestOrders:
    def test_a_job_is_what_was_ordered_or_is_refused(self, place: Place, tmp_path: Path) -> None:
        run_dir = place.fresh("order")
        rundir = RunDir(run_dir)
        edit_json(Path(run_dir, "job.json"), lambda job: job | {"model": {"factory": "os:system", "args": {"a": 1}}})
        with pytest.raises(
            OrderError, match=r"model\.factory = 'os:system', but 'tcn' was ordered|model\.args"
        ) as caught:
            order_of(place.home, rundir)
        assert "check who can write there" in str(caught.value)
        job = RunDir(place.good).read_job()
        with pytest.raises(OrderError):
            keep_order(place.home, job, rundir.read_job())
        assert order_of(tmp_path, rundir) is None

    def test_a_budget_and_who_follows_may_change(self, place: Place) -> None:
        run_dir = place.fresh("budget")

        def change(job: dict[str, Any]) -> dict[str, Any]:
            job["training"]["max_node_seconds"] = 5.0
            job["tracking"]["tags"] = {"dagster_run_id": "another"}
            return job

        edit_json(Path(run_dir, "job.json"), change)
        assert order_of(place.home, RunDir(run_dir)) is not None

    def test_orders_are_for_this_user_only_and_one_that_begins_anew_forgets(self, place: Place, tmp_path: Path) -> None:
        job = RunDir(place.good).read_job()
        keep_order(tmp_path, job, None)
        keep_registration(tmp_path, job.job_id, {"name": "m", "version": "1"})
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "orders").iterdir()} == {0o600}
        assert (tmp_path / "orders").stat().st_mode & 0o777 == 0o700
        found = order_of(tmp_path, RunDir(place.good))
        assert found is not None
        assert found.registered["version"] == "1"
        keep_order(tmp_path, job, job)
        assert order_of(tmp_path, RunDir(place.good)).registered  # type: ignore[union-attr]
        keep_order(tmp_path, job, None)
        assert not order_of(tmp_path, RunDir(place.good)).registered  # type: ignore[union-attr]

    def test_a_model_that_was_changed_after_it_was_registered_is_refused(self, place: Place) -> None:
        run_dir, job = place.fresh("registered"), RunDir(place.good).read_job()
        known = load_run_model(RunDir(run_dir), Order(job=job)).digests
        edit_json(Path(run_dir, "model/model.json"), lambda value: value | {"note": "changed"})
        with pytest.raises(RunModelError, match="the model was changed since"):
            load_run_model(RunDir(run_dir), Order(job=job, registered=known))


def test_checkpoints_of_nodes_are_not_run(place: Place, tmp_path: Path) -> None:
    run_dir, marker = place.fresh("checkpoint"), tmp_path / "marker"
    [folder, *_] = sorted(Path(run_dir, "checkpoints").glob("g*-s*"))
    data = pickle.dumps(hostile_nodes.Marker(marker), protocol=2)
    (folder / "state.pt").write_bytes(data)
    described = {"state.pt": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    edit_json(folder / "manifest.json", lambda value: value | {"files": described})
    fingerprint = json.loads((folder / "manifest.json").read_text())["fingerprint"]
    with pytest.raises(CheckpointError, match="was not written by"):
        CheckpointManager(RunDir(run_dir), 3, fingerprint).load(f"checkpoints/{folder.name}")
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*VARIANTS, "texts"])
def test_what_reads_a_hostile_run_directory_runs_nothing_of_it_and_believes_nothing(place: Place, kind: str) -> None:
    """Texts are believed, and shown without effect. Weights are read in a process of their own, which is costly."""
    chance, change = random.Random(7), VARIANTS.get(kind, hostile_nodes.change_texts)
    for number in range(1 if kind == "weights" else 3):
        run_dir = place.fresh(f"{kind.replace(' ', '-')}-{number}")
        change(chance, Path(run_dir), place.marker)
        found = place.read(run_dir, asks_model=kind != "texts")
        assert found["done"] == []
        assert not place.marker.exists()
        assert bool(found["error"]) == (kind != "texts"), found["error"]
        assert "<script" not in found["card"].lower()
        assert "](javascript" not in found["card"].lower()


@pytest.mark.slow
def test_code_of_an_allowed_model_gets_no_secret_and_is_limited(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, canary, error, seconds = tmp_path / "told.json", tmp_path / "canary-5d1f", None, 5.0
    canary.write_text("")
    monkeypatch.setenv("DTRAIN_ABUSE_SECRET", "secret-81c0")
    with canary.open() as file:
        os.set_inheritable(file.fileno(), True)
        while not told.exists() and seconds < 100:  # on a busy machine imports alone take long
            seconds *= 2
            error = place.ask(told, seconds)
    found = json.loads(told.read_text())
    assert "secret-81c0" not in str(found["environment"])
    assert canary.name not in str(found["descriptors"])
    assert found["memory"] == "no more", "it got twice its limit"
    assert error == f"the model took longer than {seconds:g} s and was stopped"


def test_predictions_that_do_not_give_the_figures_are_refused(place: Place) -> None:
    rundir = RunDir(place.fresh("better"))
    path = Path(place.good, PREDICTIONS)
    with np.load(path) as file:
        columns = {name: file[name] for name in ("row", "target", "loss", "mu", "sigma", "nu")}
    report = rundir.read_json(EVALUATION)
    assert report is not None
    for change in ({"mu": columns["target"]}, {"sigma": -columns["sigma"]}, {"row": columns["row"] + 1}):
        np.savez(rundir.storage.local_path(PREDICTIONS), **columns | change)
        with pytest.raises((EvaluationError, AnswerError), match=r"model\.nll|predictions\.npz"):
            judge_again(Candidate(rundir.uri), report)

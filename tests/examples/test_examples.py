"""The examples run as they are written: the commands of their READMEs and docstrings, in a home of their own."""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dagster import AssetKey, DagsterInstance

from tests.docs.blocks import ROOT, Part, script_of
from tests.page import Page
from trainer.config import ConfigError

TABLE = Part("examples/table/README.md")
LANGUAGE_MODEL = Part("examples/language_model/README.md", slice(0, 1))
LANGUAGE_MODEL_GRAPH = Part("examples/language_model/README.md", slice(1, 2))


def run(script: str, home: Path) -> str:
    """What the commands print, run from the repository's folder by a shell that ends at the first failure."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path, "PYTHONPATH": str(ROOT), "DTRAIN_HOME": str(home), "DTRAIN_CACHE": str(home / "cache"),
        "DTRAIN_PROCESSES_PER_NODE": "1", "DTRAIN_OPTIONS": "command_tracking=off",
        "DAGSTER_HOME": str(home / "dagster"),
    }  # fmt: skip
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    """With the script's own command; where it writes is the folder that it was started in."""
    script = f"cd {tmp_path} && python {ROOT}/examples/digits.py"
    found = re.search(r"([\d.]+)% of 250 digits", run(script, tmp_path))
    assert found
    assert float(found[1]) > 93


@pytest.mark.slow
def test_tar_files_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with one pass instead of three."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    streams = importlib.import_module("streams")
    stream = streams.tar_files(streams.write_digits(str(tmp_path)), streams.decode_digit)
    assert [len(list(stream.make(number))) for number in range(3)] == [109, 108, 108]
    result = streams.train(stream, str(tmp_path / "run"), epochs=1, batch_size_per_gpu=4)
    assert result.samples_seen == 1297
    assert result.test["accuracy"] > 0.6
    with pytest.raises(ConfigError, match=r"has 12 sub-streams, and a global batch 5 micro-batches"):
        streams.train(stream, str(tmp_path / "other"), gradient_accumulation_steps=5)


@pytest.mark.long
def test_a_table(tmp_path: Path) -> None:
    """On one node and for fewer epochs, which tell as much."""
    script = script_of(TABLE.read()).replace("tumours.parquet", f"{tmp_path}/t.parquet")
    script = script.replace("--nodes 2 --epochs 30", "--nodes 1 --epochs 12")
    assert "--nodes 1" in script
    said = run(script, tmp_path / "home")
    found = re.search(r"test accuracy +([\d.]+) \(constant ([\d.]+), linear ([\d.]+)\)", said)
    assert found, said
    assert float(found[1]) > max(0.85, float(found[2]))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_language_model(tmp_path: Path) -> None:
    said = run(script_of(LANGUAGE_MODEL.read()), tmp_path / "home")
    found = re.search(r"test nats per byte ([\d.]+) \(counts of bytes ([\d.]+), pairs ([\d.]+)\)", said)
    assert found, said
    assert float(found[1]) < float(found[3]) < float(found[2])
    assert len(re.findall(r"the model writes: \S", said)) == 1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_language_model_as_a_graph(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "dagster").mkdir(parents=True)
    shutil.copy(ROOT / "dagster.yaml", home / "dagster")
    run(script_of(LANGUAGE_MODEL_GRAPH.read()), home)
    with DagsterInstance.from_config(str(home / "dagster")) as instance:
        made = instance.get_latest_materialization_event(AssetKey(["python_bytes", "trained_checkpoint"]))
    assert made is not None
    assert made.asset_materialization is not None
    page = Page(made.asset_materialization.metadata)
    assert float(page["test_bits_per_byte"]) < 5
    assert "` training " in str(page["picture"])


RECIPES = ("one_cycle", "best_by_f1", "averaged", "clipped_by_value", "mixup", "smoothed", "phases")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a few steps each."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    recipes = importlib.import_module("recipes")
    assert {recipe.__name__ for recipe in recipes.RECIPES} | {"averaged"} == set(RECIPES)
    settings = recipes.SETTINGS | {"max_steps": 6, "eval_frequency": 3, "threads_per_rank": 1}
    monkeypatch.setattr(recipes, "SETTINGS", settings)
    found = getattr(recipes, name)()
    result = found[0] if isinstance(found, tuple) else found
    assert result.steps == 6
    assert math.isfinite(result.test["loss"])
    if name == "best_by_f1":
        assert 0 < result.best_score <= 1
    if name == "averaged":
        average = found[1]
        assert any(
            not torch.equal(mine, theirs)
            for mine, theirs in zip(average.parameters(), result.model.parameters(), strict=True)
        )

"""A stream of tokens as a node reads it: piece by piece, verified."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kinds import build_texts
from trainer.data.manifest import DatasetError
from trainer.data.token_data import TokenData

CONTEXT = 16


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build_texts(tmp_path_factory.mktemp("tokens"), shard_tokens=5000).uri)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def test_each_token_is_predicted_once_from_those_before(built: Path, cache: Path) -> None:
    data = TokenData(str(built), cache)
    for split in ("train", "valid", "test"):
        parts = [shard for shard in data.manifest["shards"] if shard["split"] == split]
        stored = np.concatenate([np.fromfile(built / shard["path"], dtype="<u2") for shard in parts])
        count = data.count(split)
        assert count == (len(stored) - 1) // CONTEXT
        ids, following = data.gather(split, np.arange(count))
        assert ids.shape == following.shape == (count, CONTEXT)
        assert np.array_equal(ids.numpy().ravel(), stored[: count * CONTEXT])
        assert np.array_equal(following.numpy().ravel(), stored[1 : count * CONTEXT + 1])
        assert np.array_equal(data.stream(split, 3, 50), stored[3:50])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(context=0), r"context = 0"),
        (lambda m: m.update(vocabulary=1), r"vocabulary = 1"),
        (lambda m: m["samples"].update(train=7), r"samples.train = 7 does not match"),
        (lambda m: m["units"].update(test=-1), r"units.test = -1"),
        (lambda m: m["shards"][0].update(path="/etc/passwd"), r"not a relative path"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(copy: Path, cache: Path, change: Any, message: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DatasetError, match=message):
        TokenData(str(copy), cache)


@pytest.mark.parametrize(
    ("change", "is_told", "message"),
    [
        (lambda data: data[:-2] + b"xx", False, r"has sha256 .* damaged"),
        (lambda data: data[:-2], True, r"the manifest says \d+ rows, the shards hold \d+"),
        (lambda data: data[:-2] + b"\xff\xff", True, r"has the id 65535, .* a vocabulary of 256"),
    ],
)
def test_a_damaged_shard_is_refused_and_leaves_nothing(
    copy: Path, tmp_path: Path, change: Any, is_told: bool, message: str
) -> None:
    """``is_told``: the manifest has the new sha256."""
    manifest = json.loads((copy / "manifest.json").read_text())
    path = copy / manifest["shards"][0]["path"]
    path.write_bytes(change(path.read_bytes()))
    if is_told:
        manifest["shards"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DatasetError, match=message):
        TokenData(str(copy), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []

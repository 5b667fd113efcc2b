"""Documents become streams of ids, or are refused with the file and the remedy; nothing half-written is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.tokens import TokenParams, build_tokens, division_of
from tests.kinds import build_texts, documents
from trainer.errors import ConfigError

OWN = """
def encode(document):
    return [len(word) for word in document.decode().split()]

def wrong(document):
    return "no ids"
"""


def stream(made: Any, split: str) -> np.ndarray:
    kind = "<u2" if made.manifest["vocabulary"] <= 1 << 16 else "<u4"
    shards = [shard for shard in made.manifest["shards"] if shard["split"] == split]
    return np.concatenate([np.fromfile(Path(made.uri, shard["path"]), dtype=kind) for shard in shards])


def test_every_document_is_whole_in_one_split(tmp_path: Path) -> None:
    made = build_texts(tmp_path, shard_tokens=5000)
    found = [
        text
        for split in ("train", "valid", "test")
        for text in bytes(stream(made, split).astype(np.uint8)).split(b"\0")
    ]
    given = [path.read_bytes() for path in (tmp_path / "texts").iterdir()]
    assert sorted(filter(None, found)) == sorted(given)
    assert made.manifest["units"] == {
        split: len(stream(made, split)) - int((stream(made, split) == 0).sum()) for split in ("train", "valid", "test")
    }
    assert made.manifest["samples"]["train"] == (len(stream(made, "train")) - 1) // 16
    assert sum(shard["split"] == "train" for shard in made.manifest["shards"]) > 1, "of 5000 ids each"


def test_a_document_that_is_there_twice_is_taken_once(tmp_path: Path) -> None:
    once = build_texts(tmp_path)
    (tmp_path / "texts" / "copy.txt").write_bytes((tmp_path / "texts" / "000.txt").read_bytes())
    params = TokenParams(context=16, valid_fraction=0.15, test_fraction=0.15)
    assert not build_tokens(str(tmp_path / "texts"), str(tmp_path), params).built, "it is the same dataset"
    assert once.manifest["source"]["documents"] == 40


def test_few_documents_are_divided_by_themselves(tmp_path: Path) -> None:
    params = TokenParams(context=4, valid_fraction=0.1, test_fraction=0.2)
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 201)))
    made = build_tokens(str(tmp_path / "one.txt"), str(tmp_path), params)
    assert stream(made, "train").tolist() == [*range(1, 141), 0]
    assert stream(made, "valid").tolist() == [*range(141, 161), 0]
    assert stream(made, "test").tolist() == [*range(161, 201), 0]
    assert division_of(200, "digest", params, is_alone=False)[0][1:] == (0, 200)


@pytest.mark.parametrize(("vocabulary", "width"), [(100, 2), (70_000, 4)])
def test_a_tokenizer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, width: int) -> None:
    name = f"own_tokens_{vocabulary}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    params = {"encoding": f"{name}:encode", "vocabulary": vocabulary, "context": 8}
    with pytest.raises(ConfigError, match=rf"DTRAIN_FACTORY_MODULES={name}"):
        build_texts(tmp_path, **params)
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", name)
    made = build_tokens(str(tmp_path / "texts"), str(tmp_path), TokenParams(**params))
    assert set(stream(made, "train")) <= {3, 4, 5}
    assert made.manifest["shards"][0]["bytes"] == width * made.manifest["shards"][0]["rows"]
    assert made.manifest["end"] is None
    with pytest.raises(DataError, match="did not return a list of whole numbers"):
        build_tokens(str(tmp_path / "texts"), str(tmp_path), TokenParams(**{**params, "encoding": f"{name}:wrong"}))
    with pytest.raises(DataError, match=r"gave ids from 3 to 5 .* the vocabulary has 4: set --vocabulary"):
        build_tokens(str(tmp_path / "texts"), str(tmp_path), TokenParams(**{**params, "vocabulary": 4}))


@pytest.mark.parametrize(
    ("change", "params", "message"),
    [
        (lambda place: (place / "000.txt").write_bytes(b"ab\0c"), {}, r"000.txt holds a zero byte"),
        (lambda place: None, {"context": 5000}, r"split has \d+ tokens, less than one sample of 5000"),
        (lambda place: [path.unlink() for path in place.iterdir()], {}, r"no file in it matches"),
        (lambda place: None, {"vocabulary": 300}, r"bytes are 256 ids"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, change: Any, params: dict, message: str) -> None:
    place = documents(tmp_path)
    change(place)
    with pytest.raises(DataError, match=message):
        build_tokens(str(place), str(tmp_path), TokenParams(**{"context": 16, **params}))
    assert not list(tmp_path.glob("datasets/*")), "nothing half-written"

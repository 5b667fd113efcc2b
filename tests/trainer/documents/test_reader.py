"""The one reader: what it lets pass, what it refuses, and that it neither waits nor follows nor fills the memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.documents import schemas
from trainer.documents.presences import INCARNATION_KEY, NodePresence
from trainer.documents.reader import EVENTS_LINES, is_event, parse_events, read_document
from trainer.documents.strict_json import Document, parse_strict_json
from trainer.elastic.generation import Candidate
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import EVENTS, FOLLOW_BYTES, RunDir, SeenFiles, event
from trainer.storage.open import open_storage

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e100, 1e100) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_what_json_can_say_is_read_as_python_reads_it(value: Any):
    assert parse_strict_json(json.dumps(value).encode(), "x") == value


@given(st.binary(max_size=60) | st.text('[]{}":,0123456789.eE+-\\udNaInfty ', max_size=60).map(str.encode))
def test_any_bytes_are_a_value_that_can_be_written_again_or_damage(data: bytes):
    try:
        value = parse_strict_json(data, "x")
    except DamagedError:
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"\xff{}", "not UTF-8"), (b'{"a": NaN}', "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"), (b"[1e999]", "out of range"), (b"[1e200]", "out of range"),
        (b'["\\ud800"]', "half a character"), (b'{"\\uDfff": 1}', "half a character"), (b'{"a":1,"a":2}', "twice"),
        (b"[" * 100 + b"]" * 100, "deeper than 64"), (b"[" * 10**6, "deeper than 64"), (b"9" * 5000, "out of range"),
        (b"[18446744073709551617]", "out of range"), (b'{"a":1}x', "not JSON"),
    ],
)  # fmt: skip
def test_what_others_cannot_hold_is_refused(data: bytes, wrong: str):
    with pytest.raises(DamagedError, match=f"^here is damaged: .*{wrong}"):
        parse_strict_json(data, "here")


def test_a_key_that_is_missing_names_the_file(tmp_path: Path):
    (tmp_path / "plan.json").write_text('{"estimate": {"usd": {}}}')
    found = read_document(open_storage(str(tmp_path)), "plan.json")
    assert isinstance(found["estimate"], Document)
    assert found.get("x") is None
    with pytest.raises(DamagedError, match=r"plan\.json is damaged: it has no 'expected'"):
        found["estimate"]["usd"]["expected"]


def test_nothing_but_a_file_of_the_folder_is_opened(tmp_path: Path):
    folder, outside = tmp_path / "run", tmp_path / "secret.json"
    (folder / "sub").mkdir(parents=True)
    outside.write_text('{"secret": 1}')
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "out").symlink_to(outside)
    (folder / "away").symlink_to(tmp_path)
    (folder / "file").write_text("[]")
    storage = open_storage(str(folder))
    for name in ("pipe", "zero", "out", "away/secret.json", "sub", "file/x.json"):
        with pytest.raises(DamagedError, match=f"{name} is damaged: "):
            storage.read_bounded(name, 100)
    for name in ("none", "sub/none", "nowhere/none"):
        with pytest.raises(FileNotFoundError, match=name):
            storage.read_bounded(name, 100)
    (tmp_path / "link").symlink_to(folder)  # a person may keep run directories elsewhere
    assert open_storage(str(tmp_path / "link")).read_bounded("file", 100) == b"[]"


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_too_large_is_not_held_in_memory(tmp_path: Path, remote: bool):
    storage = open_storage(f"memory://{tmp_path.name}" if remote else str(tmp_path))
    storage.write("x", b"12345")
    assert storage.read_bounded("x", 5) == b"12345"
    with pytest.raises(DamagedError, match="it has 5 bytes, and such a file has at most 4"):
        storage.read_bounded("x", 4)
    if remote:
        return
    os.truncate(tmp_path / "x", 370 << 20)
    tracemalloc.start()
    with pytest.raises(DamagedError, match="it has 387,973,120 bytes"):
        RunDir(str(tmp_path)).read_json("x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_events_of_the_wrong_form_are_left_out_and_counted():
    good = event("step", 0, 1, step=1, loss=0.5)
    changes: list[dict[str, Any]] = [{"step": "x"}, {"loss": [1]}, {"step": -1}, {"time": "now"}, {"time": 1e12}]
    for wrong in (*changes, {"kind": 1}, {"rank": True}):
        found, left_out = parse_events(b"\n".join(json.dumps(item).encode() for item in (good, good | wrong)))
        assert (found, left_out) == ([good], 1), wrong
    many, left_out = parse_events(
        json.dumps(good).encode() + b"\n" + b"x\n" * 3 + b'{"kind":"a","time":1}\n' * EVENTS_LINES
    )
    assert (len(many), left_out) == (EVENTS_LINES, 4)


def test_many_events_are_read_in_several_looks(tmp_path: Path):
    """And whoever adds them up hears of what had to be left out."""
    rundir, seen = RunDir(str(tmp_path)), SeenFiles()
    words = "x" * (FOLLOW_BYTES // 4)
    for number in range(1, 7):
        for rank in range(2):
            rundir.append_events(1, rank, number, [event("error", rank, 1, message=words, number=number)])
    looks = list(rundir.looks(seen))
    assert len(looks) > 1
    assert [item["number"] for look in looks for item in look] == sorted([*range(1, 7)] * 2), "side by side in time"
    assert not seen.is_behind
    assert rundir.follow(seen) == []
    assert len(list(rundir.events(strict=True))) == 12
    os.mkfifo(tmp_path / EVENTS / "g0001-r00000-000007.jsonl")
    assert len(list(rundir.events())) == 12
    with pytest.raises(DamagedError, match="1 line"):
        rundir.events(strict=True)


@given(st.text())
def test_visible_text_is_safe_stays_so_and_keeps_what_can_be_read(text: str):
    shown = visible(text)
    assert shown.isprintable() or all(part.isprintable() or not ord(part) < 0xA0 for part in shown.replace("\t", ""))
    assert visible(shown) == shown
    assert visible(text, keep_lines=True).replace("\n", "\\n") == shown


def test_what_a_terminal_would_obey_is_shown():
    assert visible("\x1b]8;;http://x\x07a\u202eb\r\n\x85") == "\\x1b]8;;http://x\\x07a\\u202eb\\r\\n\\x85"
    assert visible("déjà 日本 ✓\t[bold]") == "déjà 日本 ✓\t[bold]"
    assert str(DamagedError("a\x1b[2J", "b\nc")).startswith("a\\x1b[2J is damaged: b\\nc; restore it")


def test_an_event_is_held_against_the_types_of_its_class() -> None:
    for row, is_good in (
        ({"kind": "step", "step": 3, "loss": None}, True),
        ({"kind": "step", "step": 3, "loss": "low"}, False),
        ({"kind": "step", "step": None}, False),
        ({"kind": "step", "step": True}, False),
        ({"kind": "evaluation", "split": "valid", "metrics": {"accuracy": None}}, True),
        ({"kind": "link", "seconds": [[0, 1, 0.5]]}, True),
        ({"kind": "link", "seconds": [[0, 1]]}, False),
        ({"kind": "hang", "rank": 0, "generation": 1}, False),
        ({"kind": "membership", "nodes": [0], "lost": ["one"]}, False),
        ({"kind": "of a newer version", "step": "x"}, True),
    ):
        assert is_event({"time": 1.0, **row}) is is_good, row


def test_every_field_of_a_nodes_presence_has_a_type_in_its_form():
    """What `presence_of` takes over unseen."""
    names = {INCARNATION_KEY if field.name == "incarnation" else field.name for field in fields(NodePresence)}
    assert names <= schemas.PRESENCE.fields.keys()


def test_a_dataclass_is_a_form_by_its_annotations():
    form = schemas.record_of(Candidate)
    seat = {"member": "n0p0-1", "node": 0, "local_rank": 0, "launch": 1, "host": "h", "port": 1}
    for change, wrong in (
        ({}, ""),
        ({"of a newer version": [1]}, ""),
        ({"port": 1 << 16}, "'port' is out of range"),
        ({"node": True}, "'node' is not a whole number"),
        ({"chunk": None}, ""),
        ({"chunk": 0}, "'chunk' is out of range"),
        ({"view": {"n1p0-1": 3}}, "'view' is 'n1p0-1' in it is not text"),
        ({"certificates": "mine"}, "'certificates' is not one of , launch, files"),
    ):
        assert form(seat | change) == (wrong and f"an object whose {wrong}")
    assert form({"member": "n0p0-1"}) == "an object without 'node'"
    assert schemas.make(Candidate, seat | {"of a newer version": 1}) == Candidate(**seat)

"""The check of the samples that a training has used, of each kind of data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.assets.checks import _samples_check
from trainer.data.coverage import digest_of_all, digest_of_stream

WHOLE = {"epoch": 0, "samples": 9, "digest": digest_of_all(9)}
DRAWS = WHOLE | {"kind": "draws"}
STREAM = {
    "epoch": 0,
    "samples": 5,
    "digest": digest_of_stream([3, 2]),
    "kind": "stream",
    "drawn": [3, 2],
    "ended": [0, 1],
}
WEIGHTED = "mine-weights-0123456789ab"


@pytest.mark.parametrize(
    ("dataset_id", "consumed", "passed", "wrong"),
    [
        ("mine", [WHOLE], True, ""),
        ("mine", [WHOLE | {"digest": 1}], False, "9 samples were used, but not each exactly once"),
        ("mine", [DRAWS], False, "what was recorded are draws, and not samples"),
        (WEIGHTED, [DRAWS], True, ""),
        (WEIGHTED, [DRAWS | {"digest": 1}], False, "9 draws were used, but not each exactly once"),
        (WEIGHTED, [WHOLE], False, "what was recorded are samples, and not draws"),
        ("stream-1-of-2", [STREAM], True, ""),
        ("stream-1-of-2", [STREAM | {"digest": 1}], False, "5 samples were used, but not each exactly once"),
        ("stream-1-of-2", [STREAM | {"drawn": [10**15, 2]}], False, "were used, and all steps have 9"),
        ("mine", [STREAM], False, "what was recorded are stream, and not samples"),
    ],
)
def test_what_was_used_is_held_against_what_the_data_is(
    dataset_id: str, consumed: list[dict[str, Any]], passed: bool, wrong: str
) -> None:
    job = {"script": {"samples": {"train": 9}}, "dataset": {"uri": "script:x", "dataset_id": dataset_id}}
    found = _samples_check({"consumed": consumed, "epochs": 1.0}, SimpleNamespace(job=job))  # type: ignore[arg-type]
    assert found.passed is passed
    said = {name: value.value for name, value in found.metadata.items()}
    assert wrong in str(said["wrong"])
    assert said["counted"] == ("stream" if "-of-" in dataset_id else "draws" if "weights" in dataset_id else "samples")
    assert said["samples"] == (5 if "-of-" in dataset_id else 9)

"""Checkpoints of several parts: they count when all parts are there, and are put together as one of a whole model."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_storage import Checkpoints

from trainer.checkpoint.files import assemble
from trainer.checkpoint.manager import CheckpointError, CheckpointManager
from trainer.rundir import RunDir

ROWS = torch.arange(10.0).reshape(5, 2)


def part(place: int, size: int, step: int = 4) -> dict[str, Any]:
    mine = torch.chunk(ROWS + step, size)[place].clone()
    return {
        "place": place,
        "size": size,
        "rows": {"weights": {"w": mine}, "exp_avg": {"w": mine / 2}, "exp_avg_sq": {"w": mine / 4}},
        "aliases": {"again": "w"},
        "updates": step,
        "groups": [{"lr": 0.1, "params": [0]}],
        "buffers": {"b": torch.ones(1)},
        "best_buffers": {},
        "order": ["w", "b", "again"],
        "progress": {"step": step},
    }


def manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(RunDir(str(folder)), 3, "same")


def test_parts_are_the_state_that_one_rank_would_have_saved() -> None:
    whole = assemble([part(0, 3), part(1, 3), part(2, 3)])
    assert list(whole["model"]) == ["w", "b", "again"]
    assert torch.equal(whole["model"]["again"], ROWS + 4)
    assert torch.equal(whole["step"]["optimizer"]["state"][0]["exp_avg"], (ROWS + 4) / 2)
    assert float(whole["step"]["optimizer"]["state"][0]["step"]) == 4.0
    with pytest.raises(ValueError, match=r"places \[0, 2\] of 3"):
        assemble([part(0, 3), part(2, 3)])
    with pytest.raises(ValueError, match="different steps"):
        assemble([part(0, 2), part(1, 2, step=5)])


def test_a_checkpoint_counts_once_all_its_parts_are_there(tmp_path: Path) -> None:
    first, second = manager(tmp_path), manager(tmp_path)
    for step in (4, 8):
        assert first.save(part(0, 2, step), step, 1)
        assert not first.wait(0.5), "the other part is missing"
        found = manager(tmp_path).load_latest()
        assert (found[1]["progress"]["step"] if found else 0) == step - 4, "the one before it counts"
        assert second.save(part(1, 2, step), step, 1)
        assert second.wait(30)
        assert first.wait(30)
    assert first.committed_step() == 8
    found = manager(tmp_path).load_latest()
    assert found is not None
    assert torch.equal(found[1]["model"]["w"], ROWS + 8)
    first.close(5)
    second.close(5)


def test_a_part_that_is_early_is_not_taken_for_litter(tmp_path: Path) -> None:
    """One rank is at the next checkpoint while the other makes this one count, and deletes what is not needed."""
    first, second = manager(tmp_path), manager(tmp_path)
    for step in (4, 8):
        assert second.save(part(1, 2, step), step, 1)
        assert second.wait(30)
    for step in (4, 8):
        assert first.save(part(0, 2, step), step, 1)
        assert first.wait(10)
        assert first.committed_step() == step
    first.close(5)
    second.close(5)


def test_a_damaged_part_is_found(tmp_path: Path) -> None:
    first, second = manager(tmp_path), manager(tmp_path)
    first.save(part(0, 2), 4, 1)
    second.save(part(1, 2), 4, 1)
    assert first.wait(30)
    [file] = (tmp_path / "checkpoints").glob("g*/part-0001-of-0002.pt")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="sha256"):
        manager(tmp_path).load(f"checkpoints/{file.parent.name}")
    assert manager(tmp_path).load_latest() is None


def test_who_leads_a_newer_generation_waits_no_longer_for_parts_of_lost_ranks(tmp_path: Path) -> None:
    lead = Checkpoints(RunDir(str(tmp_path)))
    lead.save(part(0, 2), 4, 1)
    ended = threading.Event()
    threading.Thread(target=lambda: (lead.wait(60), ended.set()), daemon=True).start()
    time.sleep(0.2)
    assert not ended.is_set()
    lead.fence(2)
    assert ended.wait(30)
    assert [item["gives_up"] for item in lead.told if item["kind"] == "checkpoint_failed"] == [True]
    assert lead.committed_step() is None
    lead.close(5)

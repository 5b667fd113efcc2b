"""Trainings that are started at the same moment, on one machine and in one tracking database."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.host import Workplace
from benchmarks.load import measure_together
from trainer.config import DatasetRef

from .small_job import write_dataset


@pytest.mark.long
def test_of_jobs_that_start_at_once_nothing_is_lost(tmp_path: Path):
    """Results, weights, checkpoints, steps, samples, events, bills, and runs in MLflow, whose database is still to be
    made by whoever comes first."""
    place = Workplace(tmp_path / "home", DatasetRef(uri=str(write_dataset(tmp_path / "dataset"))))
    try:
        found = measure_together(place, count=2, steps=4)
    finally:
        place.manager.cleanup_cluster()
    assert found["jobs"]["lacks"] == {}
    assert (found["jobs_ended"], found["jobs_lost"]) == (2, 0)

"""A training of many steps holds no more objects at its end than after its start, in all threads together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from worlds import Job

EVERY, MOST_STEPS = 400, 1200
"""Passes between two counts: two in each step. The dataset has 40 steps in an epoch."""
A_STEP = 0.9
"""Blocks that a step may add: an epoch adds a record of its samples, with its copies for checkpoints, which is half a
block for each of its 40 steps."""


@pytest.mark.long
@pytest.mark.slow
def test_objects_do_not_grow_with_the_steps(new_job: Callable[..., Job], tmp_path: Path) -> None:
    counts = tmp_path / "counts.txt"
    job = new_job(
        world_size=1, epochs=1000, max_steps=MOST_STEPS, log_frequency=1, checkpoint_frequency=50, eval_frequency=200
    )
    job.sections["model"] = {"factory": "user_parts:counting", "args": {"path": str(counts), "every": EVERY}}
    job.sections["tracking"] = {"tensorboard": True}
    assert job.start().wait(300) == [0], job.log()
    found = [int(line) for line in counts.read_text().split()]
    assert len(found) == 2 * MOST_STEPS // EVERY
    grown = [after - before for before, after in pairwise(found)]  # what is made once is in one of them, a leak in all
    assert min(grown) < A_STEP * EVERY // 2, found

"""Gloo's threads stay behind those that send."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import Forked, Job


@pytest.mark.slow
def test_gloos_threads_do_not_preempt_those_that_send(new_job: Callable[..., Job]) -> None:
    job = new_job(world_size=2, epochs=1000).start(2)

    def trains() -> bool:
        return bool(job.losses())

    policies = []
    try:
        job.signal_when(trains, number=0)
        for process in job.processes:
            assert isinstance(process, Forked)
            tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
            loops = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == "gloo_tcp_loop"]
            policies.append({os.sched_getscheduler(loop) for loop in loops})
    finally:
        job.kill()
    assert policies == [{os.SCHED_BATCH}] * 2

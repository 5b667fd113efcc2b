"""The frameworks that the benchmark of throughput compares, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frameworks.framework_process import start
from benchmarks.frameworks.protocol import Case
from benchmarks.host import real_dataset

STEPS = 5


def faults(pid: int) -> int:
    """Pages that the kernel has handed to a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.mark.long
@pytest.mark.slow
def test_the_bound_pays_for_no_pages(tmp_path: Path) -> None:
    """Nothing can be faster than it only if it has all that the trainer has: here, its setting of malloc."""
    case = Case(model="tcn", batch=1024, ranks=1, dataset=real_dataset(tmp_path).uri, folder="", port=0)
    [bound], failed = start(["bound"], 1, tmp_path)
    try:
        bound.begin(case)
        bound.measure(STEPS)
        before = faults(bound.processes[0].pid)
        bound.measure(STEPS)
        taken = (faults(bound.processes[0].pid) - before) / STEPS
        bound.end()
    finally:
        bound.close()
    assert not failed
    assert taken < 1000  # as malloc is by default: two to twenty thousand

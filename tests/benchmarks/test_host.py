"""What the line of a benchmark says of its machine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.host import RESULTS, busy_beside, lockstep, stolen_percent, tell


def times(**seconds: float) -> SimpleNamespace:
    return SimpleNamespace(**{"user": 0.0, "nice": 0.0, "system": 0.0, "idle": 0.0, "steal": 0.0, **seconds})


def test_what_a_host_gave_away_is_a_share_of_what_was_wanted():
    before, after = times(user=100.0, steal=7.0), times(user=160.0, system=20.0, nice=10.0, idle=500.0, steal=17.0)
    assert stolen_percent(before, after) == 10.0
    assert stolen_percent(after, after) == 0.0
    assert stolen_percent(SimpleNamespace(user=1.0), SimpleNamespace(user=2.0)) is None


def test_a_line_names_its_commit_machine_and_load_and_says_what_is_missing(capsys: pytest.CaptureFixture[str]):
    tell("none", {"missing": ["a part"]}, save=False)
    line = json.loads(capsys.readouterr().out)
    assert not (RESULTS / "none.json").exists()
    assert line["partial"] is True
    assert len(line["commit"].removesuffix("+")) == 12
    assert {"date", "cpu", "cores", "torch", "load_before", "load_after", "stolen_percent"} <= set(line)


def test_ranks_that_wait_for_each_other_take_the_longest_of_each_step():
    assert lockstep([[1.0, 2.0, 3.0], [2.0, 1.0, 4.0]]) == 8.0
    assert lockstep([[1.0, 2.0, 3.0]]) == 6.0


@pytest.mark.parametrize(("cores", "seed", "processes"), [(0.0, None, 0), (0.5, None, 1), (1.5, None, 2), (0.6, 1, 2)])
def test_other_work_is_of_processes_of_one_core_at_most_and_ends(cores: float, seed: int | None, processes: int):
    before = set(psutil.Process().children())
    with busy_beside(cores, seed):
        started = set(psutil.Process().children()) - before
        assert len(started) == processes
        assert all(process.is_running() for process in started)
    assert not any(process.is_running() for process in started)

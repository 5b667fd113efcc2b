"""A result of a busy machine is not saved as one of a quiet one."""

from __future__ import annotations

import json

import pytest

from benchmarks import recovery
from benchmarks.host import RESULTS, is_busy


@pytest.mark.parametrize(("load", "cores", "busy"), [(14.28, 2, True), (1.6, 2, True), (1.4, 2, False), (3, 8, False)])
def test_a_machine_is_busy_by_its_load_per_core(load: float, cores: int, busy: bool) -> None:
    assert is_busy(load, cores) is busy


def test_a_busy_machine_saves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The load is set here; nothing else is."""
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    before = (RESULTS / "recovery.json").read_bytes()
    with pytest.raises(SystemExit) as refused:
        recovery.main(["--save", "--kills", "0"])
    assert refused.value.code == 2
    assert "the load is 1000.0" in capsys.readouterr().err
    assert (RESULTS / "recovery.json").read_bytes() == before


def test_a_line_of_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    monkeypatch.setattr(recovery, "stop_on_signals", lambda: None)
    assert recovery.main(["--kills", "0"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["busy"] is True
    assert line["load_before"] == line["load_after"] == 1000.0


def test_the_saved_line_is_marked_if_its_machine_was_busy() -> None:
    saved = json.loads((RESULTS / "recovery.json").read_text())
    assert saved.get("busy", False) is is_busy(saved["load_before"], saved["cores"])


def test_a_lost_job_is_no_pause() -> None:
    """Three kills: after one no step came, after another the survivors went on and were never three again."""
    figures = recovery.Figures(pauses=[0.1, 0.3], back=[4.0], back_to_three=[3.0], redone=[2, 7], repeats=3)
    found = recovery.summary(figures)
    assert (found["p50_seconds"], found["p95_seconds"], found["back_seconds"]) == (0.2, 0.3, 4.0)
    assert (found["survivors_lost"], found["never_back_to_three"]) == (1, 1)
    assert found["steps_redone_max"] == 7
    assert found["regroup_p50_seconds"] is None


def test_only_the_local_cluster_is_frozen_or_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recovery.main(["--fault", "cut", "--engine", "ray"])
    assert "on the local cluster only" in capsys.readouterr().err

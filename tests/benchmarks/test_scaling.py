"""What the benchmarks of communication conclude from their trainings."""

from __future__ import annotations

import pytest

from benchmarks.scaling_figures import against_plain, settled_on


def row(mode: str, seconds: float, turn: int = 0, hosts: int = 3, **more: object) -> dict[str, object]:
    named = {"rate": "100mbit", "model": "wide", "communication": mode, "round": turn, "hosts": hosts}
    return {**named, "step_seconds": seconds, "whole_run_step_seconds": 2 * seconds, "chosen": [], **more}


def test_rounds_are_compared_with_themselves_and_other_trainings_with_nothing():
    rows = [
        row("allreduce", 8.0), row("topk", 0.1), row("auto", 2.0, chosen=[[30, "fp16"], [60, "topk"]]),
        row("auto", 0.5, 1, chosen=[[30, "fp16"]]), row("allreduce", 0.5, 1), row("allreduce", 100.0, hosts=2),
        row("auto", 100.0, rate="1gbit", chosen=[[30, "hierarchical"]]),
    ]  # fmt: skip
    found = against_plain(rows, "100mbit", "wide", "auto_vs{}_here")
    assert found["auto_vs_here"] == pytest.approx(2.0)
    assert found["auto_vs_here_rounds"] == [4.0, 1.0]
    assert found["auto_vs_whole_run_here"] == pytest.approx(2.0)
    assert settled_on(rows, "100mbit") == "topk"


def test_who_never_chose_has_stayed_with_allreduce():
    assert settled_on([row("auto", 1.0)], "100mbit") == "allreduce"

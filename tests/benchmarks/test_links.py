"""Ways to sum gradients side by side: what `benchmarks.links` concludes from its trainings."""

from __future__ import annotations

import pytest

from benchmarks.links import against_plain


def row(mode: str, seconds: float, turn: int = 0, hosts: int = 3, rate: str = "100mbit") -> dict[str, object]:
    named = {"rate": rate, "model": "wide", "communication": mode, "round": turn, "hosts": hosts}
    return {**named, "step_seconds": seconds, "whole_run_step_seconds": 2 * seconds}


def test_rounds_are_compared_with_themselves_and_other_trainings_with_nothing():
    rows = [
        row("allreduce", 8.0), row("fp16", 0.1), row("topk", 2.0), row("topk", 0.5, 1), row("allreduce", 0.5, 1),
        row("allreduce", 100.0, hosts=2), row("topk", 100.0, rate="1gbit"),
    ]  # fmt: skip
    found = against_plain(rows, "100mbit", "wide", "topk_vs{}_here")
    assert found["topk_vs_here"] == pytest.approx(2.0)
    assert found["topk_vs_here_rounds"] == [4.0, 1.0]
    assert found["topk_vs_whole_run_here"] == pytest.approx(2.0)

"""Runs laid over each other: their curves over steps, samples and dollars, what they differ in, and who is best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
from told_events import START, event, told, write_run

from benchmarks.abuse.websites import served
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.overlay import (
    HIGHER,
    LOWER,
    curve,
    curve_words,
    differing,
    results,
    samples_per_step,
    settings_of,
    thinned,
    usd_until,
)
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.monitoring.learning import Evaluation

SKU = "Standard_NC6s_v3"


def usage(node: int, began: float, ended: float) -> NodeUsage:
    return NodeUsage(node_id=node, sku=SKU, started_at=began, ended_at=ended)


def test_dollars_grow_with_the_nodes_that_are_there():
    """One node for two hours, a second one for the second of them; then nobody, then the first one again."""
    nodes = [usage(0, 0, 7200), usage(1, 3600, 7200), usage(0, 10_800, 14_400)]
    paid = CostTracker("", nodes, "dedicated").nodes
    times = [14_400.0, 0.0, 3600.0, 5400.0, 7200.0, 9000.0, 20_000.0]
    hours = [4, 0, 1, 2, 3, 3, 4]
    assert usd_until(paid, times) == pytest.approx([3.06 * each for each in hours])
    assert usd_until(paid, times)[-1] == pytest.approx(CostTracker("", nodes, "dedicated").total_usd)
    assert usd_until([], [1.0]) == [0.0]


def test_a_long_curve_is_thinned_to_means():
    rows = [{"step": float(step), "time": float(step), "loss": float(step % 2)} for step in range(1, 1001)]
    thin = thinned(rows, most=100)
    assert len(thin) == 100
    assert {row["loss"] for row in thin} == {0.5}
    assert (thin[0]["step"], thin[-1]["step"]) == (10, 1000)
    assert thinned(rows[:7], most=100) == rows[:7]
    assert thinned([]) == []


def test_a_curve_has_the_axes_that_are_known():
    rows = [{"step": 10.0, "time": 3600.0, "loss": 2.0}, {"step": 20.0, "time": 7200.0}]
    paid = CostTracker("", [usage(0, 0, 7200)], "dedicated").nodes
    assert curve(rows, 768.0, paid) == {"step": [10], "loss": [2], "samples": [7680], "usd": [pytest.approx(3.06)]}
    assert curve(rows, None, ()).keys() == {"step", "loss"}


def test_samples_of_a_step_are_counted_or_follow_from_the_settings():
    training = {"world_size": 3, "batch_size_per_gpu": 128, "gradient_accumulation_steps": 2}
    assert samples_per_step({"samples_seen": 1000, "steps": 10}, training) == 100
    assert samples_per_step({}, training) == 768
    assert samples_per_step({}, {**training, "world_size": None}) is None


def test_only_settings_in_which_runs_differ_are_told():
    def job(job_id: str, rate: float, **model: Any) -> dict[str, Any]:
        training = {"learning_rate": rate, "seed": 0, "master_port": 1000 + len(job_id)}
        return {
            "job_id": job_id,
            "model": {"factory": "tcn", "args": model},
            "training": training,
            "tracking": {"tags": {"a": job_id}},
        }

    found = [settings_of(job("a", 0.1), {"node_count": 2}), settings_of(job("bb", 0.2, width=64), {"node_count": 2})]
    assert differing(found) == [
        {"name": "model.args.width", "values": ["", "64"]},
        {"name": "training.learning_rate", "values": ["0.1", "0.2"]},
    ]
    assert differing([found[0], found[0]]) == []


def test_the_best_is_marked_where_there_is_one():
    found = results(
        [
            {"loss": (1.0, "1.0", LOWER), "rank ic": (0.1, "0.1", HIGHER), "state": (None, "failed", 0)},
            {"loss": (2.0, "2.0", LOWER), "rank ic": (0.2, "0.2", HIGHER)},
            {"loss": (1.0, "1.0", LOWER)},
        ]
    )
    assert found == [
        {"name": "loss", "values": ["1.0", "2.0", "1.0"], "best": [0, 2]},
        {"name": "rank ic", "values": ["0.1", "0.2", "–"], "best": [1]},
        {"name": "state", "values": ["failed", "–", "–"], "best": []},
    ]  # fmt: skip
    mixed = results([{"steps": (None, "5", 0)}, {"test: loss": (1.0, "1.0", LOWER), "steps": (None, "6", 0)}])
    assert [row["name"] for row in mixed] == ["test: loss", "steps"]
    same = results([{"loss": (1.0, "1.0", LOWER)}, {"loss": (1.0, "1.0", LOWER)}])
    assert same[0]["best"] == []


def test_a_curve_is_told_in_words():
    training = {"step": [10.0, 1000.0], "loss": [2.0, 0.5]}
    told_of = curve_words("mine", training, Evaluation(step=500, loss=-2.0))
    assert told_of == "mine: training loss from 2 to 0.5 at step 1,000; best validation loss -2 at step 500."
    nothing: dict[str, list[float]] = {"step": [], "loss": []}
    assert curve_words("mine", nothing, None) == "mine: no loss was reported yet."


def test_the_best_evaluation_is_a_jobs_own_and_no_mean_of_neighbours(tmp_path: Path):
    """Of 2,500 evaluations, which are more than a curve has points, one is far below its neighbours."""
    judged = [
        event("evaluation", START + step, split="valid", loss=-9.0 if step == 1234 else 1.0, step=step, seconds=0.1)
        for step in range(1, 2501)
    ]
    for name in ("a", "b"):
        write_run(tmp_path, name, judged if name == "a" else told(2), state="running")
    board = JobBoard(str(tmp_path), "dedicated")
    with served(build_app(board)) as port:
        found = requests.get(f"http://127.0.0.1:{port}/overlay.json?job=a&job=b", timeout=60).json()
    assert min(found["runs"][0]["validation"]["loss"]) > -9.0, "the curve itself is thinned"
    assert found["runs"][0]["words"].endswith("best validation loss -9 at step 1,234.")
    best = next(row for row in found["results"] if row["name"] == "best validation loss")
    assert best["values"] == ["-9.0000", "–"]


def test_two_to_eight_jobs_are_overlaid(tmp_path: Path):
    for number in range(9):
        judged = [
            event("evaluation", START + at, split="valid", loss=-1.0 - at, step=5 * at, seconds=1.0) for at in (2, 4)
        ]
        rundir = write_run(tmp_path, f"run-{number}", [*told(5), *judged], state="succeeded")
        job = rundir.read_json("job.json")
        job["training"]["learning_rate"] = 0.001 * (1 + number)
        rundir.write_json("job.json", job)
    with served(build_app(JobBoard(str(tmp_path), "dedicated"))) as port:

        def ask(*names: str) -> requests.Response:
            query = "&".join(f"job={name}" for name in names)
            return requests.get(f"http://127.0.0.1:{port}/overlay.json?{query}", timeout=30)

        found = ask("run-0", "run-3").json()
        assert [run["id"] for run in found["runs"]] == ["run-0", "run-3"]
        assert len(found["runs"][0]["training"]["loss"]) == 5
        assert found["runs"][0]["validation"]["loss"] == [-3, -5]
        assert [row["name"] for row in found["settings"]] == ["training.learning_rate"]
        assert found["live"] is False
        assert ask(*(f"run-{number}" for number in range(8))).status_code == 200
        assert ask(*(f"run-{number}" for number in range(9))).status_code == 400
        assert (ask("run-0").status_code, ask("run-0", "run-0").status_code) == (400, 400)
        assert (ask("run-0", "nobody").status_code, ask("run-0", "..%2fx").status_code) == (404, 404)
        (tmp_path / "run-8/status.json").write_text("{")
        damaged = ask("run-0", "run-8")
        assert (damaged.status_code, "run-8 cannot be read" in damaged.text) == (500, True)

"""What a person is told whose job has failed: whom the message names, whose log it quotes, and what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import OWNER
from dtrain_dagster.clusters.exit_policy import ProcessEnd
from dtrain_dagster.clusters.resume_advice import explain_failure, how_to_go_on, memory_advice, name_larger_skus
from dtrain_dagster.costs.plan import PLAN, PLANNED_FOR
from dtrain_dagster.costs.prices import price_table
from trainer.rundir import RESULT, RunDir

GIB = 1 << 30
MEMORY = {
    "device": "cuda",
    "total_bytes": 16 * GIB,
    "free_bytes": 2 * GIB,
    "wanted_samples": 8,
    "fitting_samples": 3,
    "needed_bytes": 30 * GIB,
    "measured": [[1, GIB // 3], [2, GIB // 2]],
}


def test_the_cheapest_skus_with_enough_memory_are_named_with_their_prices() -> None:
    prices = price_table("eastus").values()
    larger = [row for row in prices if row.gpu_memory_gib >= 30 and "dedicated" in row.figures]
    cheapest = min(larger, key=lambda row: row.usd_per_hour("dedicated"))
    told = name_larger_skus(prices, MEMORY, ranks=1)
    assert told.startswith(f"{cheapest.sku} ({cheapest.gpu_memory_gib} GiB for each GPU, $")
    assert f"${cheapest.usd_per_hour('dedicated'):.3g} an hour" in told
    assert told.count("an hour") == 2
    assert "NC6s_v3" not in told, "it has 16 GiB"
    assert name_larger_skus(prices, {**MEMORY, "needed_bytes": 1000 * GIB}, ranks=1) == ""


def test_ranks_share_a_hosts_memory() -> None:
    prices = price_table("eastus").values()
    host = {**MEMORY, "device": "cpu", "needed_bytes": 50 * GIB}
    assert "Standard_NC8as_T4_v3" in name_larger_skus(prices, host, ranks=1)  # 56 GiB
    assert "Standard_NC8as_T4_v3" not in name_larger_skus(prices, host, ranks=2)


def test_where_no_size_could_be_measured_any_larger_one_is_named() -> None:
    unknown: dict[str, Any] = {**MEMORY, "needed_bytes": None}
    told = name_larger_skus(price_table("eastus").values(), unknown, ranks=1)
    assert told
    assert "T4" not in told


def test_who_began_a_job_is_told_how_to_go_on_with_it(tmp_path: Path) -> None:
    rundir = RunDir(str(tmp_path / "run"))
    assert how_to_go_on(rundir, "mine") == "There is no checkpoint yet: run `dtrain train --name mine` to start over"
    rundir.write_json("checkpoints/LATEST.json", {"path": "checkpoints/g0001-s000000151", "step": 151})
    kept = f"The checkpoint of step 151 is kept in {rundir.uri}/checkpoints/g0001-s000000151"
    assert how_to_go_on(rundir, "mine") == f"{kept}: run `dtrain train --name mine` to resume from it"
    rundir.write_json(OWNER, {"dagster_run_id": "0123"})
    rundir.write_json(PLAN, {PLANNED_FOR: "trained_checkpoint"})
    assert how_to_go_on(rundir, "mine") == f"{kept}: materialize trained_checkpoint again to resume from it"
    rundir.write_json(OWNER, {"dagster_run_id": None})  # a person has continued it
    assert "dtrain train --name mine" in how_to_go_on(rundir, "mine")


@pytest.mark.parametrize("launch", [1, 2])
def test_the_message_of_a_failed_job_says_so(tmp_path: Path, launch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    rundir = RunDir(str(tmp_path / "run"))
    rundir.write_json(RESULT, {"status": "failed", "error": "out of memory at step 3", "launch": 1, "memory": MEMORY})
    failure = ProcessEnd(rank=0, node_id=0, code=1)
    told = explain_failure(rundir, {"launch": launch, "job_id": "job", "processes_per_node": 1}, failure)
    if launch == 2:  # the result is of the launch before
        assert "SKUs" not in told
        return
    assert told.startswith("out of memory at step 3; SKUs with 30 GiB: Standard_")
    assert "an hour" in told
    assert "--name job" in told
    assert memory_advice({"status": "failed"}, {"launch": 1}) == ""


WITH_TWO: dict[str, Any] = {"launch": 2, "job_id": "j", "processes_per_node": 2}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"launch": 2, "node_id": 0, "local_rank": 1}, "rank 1 on node 0 failed first (exit code 1): OSError: broken;"),
        ({"launch": 2, "node_id": 1, "local_rank": 1}, "rank 3 on node 1 failed first (exit code 1); the end"),
        ({"launch": 1, "node_id": 0, "local_rank": 1}, "rank 3 on node 1 failed first (exit code 1); the end"),
        ({"launch": 2}, "rank 3 on node 1 failed first (exit code 1); the end"),
    ],
)
def test_who_raised_is_named_though_another_process_ended_before_it(
    tmp_path: Path, result: dict[str, Any], said: str
) -> None:
    """The other one ends at once, since the job is over; who raised has yet to write its reports."""
    rundir = RunDir(str(tmp_path))
    for node in (0, 1):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / f"node-{node}.log").write_text(f"log of node {node}\n")
    rundir.write_json(RESULT, {"status": "failed", "error": "OSError: broken\nwith more", **result})
    found = explain_failure(rundir, WITH_TWO, ProcessEnd(rank=3, node_id=1, code=1))
    assert found.startswith(said)
    assert f"log of node {said.split('node ')[1][0]}" in found

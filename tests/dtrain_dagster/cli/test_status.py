"""`dtrain status`: which nodes are there, which hosts get none until a person lifts it, and a summary of a training."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from dtrain_dagster.cli.facts import read_nodes, summary_lines
from dtrain_dagster.cli.jobs import print_nodes
from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.hosts import HostEvent, HostRecord
from dtrain_dagster.costs.plan import PLAN
from trainer.documents.presences import NodePresence
from trainer.exit_codes import LOST, UNFIT
from trainer.rundir import EVALUATION, RESULT, RunDir

Shell = Callable[..., Result]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs the command in a home of its own, whose cluster is a SLURM that nobody asks."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_CLUSTER", "slurm")
    return lambda *arguments: CliRunner().invoke(main, ["status", *arguments])


def test_nodes_are_shown_with_their_hosts_and_what_became_of_them(shell: Shell, tmp_path: Path) -> None:
    assert shell("--nodes").output == "no job runs\n"
    rundir, now = RunDir(str(tmp_path / "storage" / "jobs" / "one")), time.time()
    rundir.make()
    here = {"launch": 1, "last_seen_at": now, "host": "10.0.0.7"}
    for node in (
        NodePresence(node_id=0, started_at=now - 90, **here),
        NodePresence(node_id=1, started_at=now - 90, ended_at=now - 60, exit_codes=(LOST,), **here),
        NodePresence(
            node_id=1, incarnation=2, started_at=now - 50, ended_at=now - 48, exit_codes=(UNFIT, UNFIT),
            preflight="the disk is full", **here,
        ),
        NodePresence(node_id=1, incarnation=3, started_at=now - 40, **here | {"last_seen_at": now - 30}),
    ):  # fmt: skip
        rundir.write_node(node)
    assert [(row["node"], row["incarnation"], row["state"], row["note"]) for row in read_nodes(rundir, now)] == [
        (0, 1, "there", None), (1, 1, "exit code 75, lost its peers or its device", None),
        (1, 2, "exit code 76, failed its pre-flight", "failed its pre-flight: the disk is full"),
        (1, 3, "silent for 30 s", None),
    ]  # fmt: skip
    console = Console(width=200, file=io.StringIO())
    print_nodes(console, read_nodes(rundir, now))
    assert console.file.getvalue().count("10.0.0.7") == 4  # type: ignore[attr-defined]


def test_an_excluded_host_is_told_with_its_reason_and_lifted(shell: Shell, tmp_path: Path) -> None:
    record, now = HostRecord.of_cluster(tmp_path, "slurm.local"), time.time()
    record.add(HostEvent(host="gpu-2", at=now, kind="unfit", why="the disk is full"))
    told = json.loads(shell("--nodes", "--json").output)["excluded_hosts"]
    assert [(each["host"], each["why"]) for each in told] == [("gpu-2", "it failed its pre-flight: the disk is full")]
    assert "gpu-2" in shell("--nodes").output
    refused = shell("--lift", "gpu-1")
    assert (refused.exit_code, "excluded are gpu-2" in refused.output) == (2, True)
    assert shell("--lift", "gpu-2").output == "nodes may be placed on gpu-2 again\n"
    assert json.loads(shell("--nodes", "--json").output)["excluded_hosts"] == []


def test_data_for_training_only_have_a_note_in_place_of_figures(tmp_path: Path):
    """As `trainer.evaluation.judge.TaskJudge.report` writes it where there is neither a test nor a validation split."""
    rundir = RunDir(str(tmp_path / "mine"))
    rundir.write_json(RESULT, {"steps": 6, "world_size": 2, "train_seconds": 1.0})
    rundir.write_json(EVALUATION, {"model": {}, "baselines": {}, "notes": ["there is no test or validation split"]})
    assert summary_lines(rundir) == [
        ("job", "mine"),
        ("trained", "6 steps on 2 ranks"),
        ("took", "1 s of training"),
        ("note", "there is no test or validation split"),
    ]


def test_the_dollars_with_a_probe_are_the_total_of_the_bill(tmp_path: Path):
    """And not the sum of two figures that were rounded, which is another one in its last digit."""
    rundir = RunDir(str(tmp_path / "mine"))
    rundir.write_json(RESULT, {"steps": 6, "world_size": 2, "train_seconds": 1.0})
    rundir.write_json(EVALUATION, {"model": {}, "baselines": {}, "notes": []})
    rundir.write_json(PLAN, {"estimate": {"usd": {"expected": 0.3}}})
    bill = {"total_usd": 0.419649, "training_usd": 0.299621, "probe_usd": 0.120029, "metrics": {"total_cost_usd": 0.4}}
    rundir.write_json("reports/cost_breakdown.json", bill)
    assert "; with its probe $0.4196 (" in dict(summary_lines(rundir))["cost"]


def test_a_figure_stands_beside_that_of_each_baseline_that_has_it(tmp_path: Path):
    """Of tokens, which an older version has written."""
    rundir = RunDir(str(tmp_path / "old"))
    rundir.write_json(RESULT, {"steps": 6, "world_size": 2, "train_seconds": 1.0})
    baselines = {"bigram": {"perplexity": 11.27, "bits_per_byte": 3.494}, "unigram": {"perplexity": 22.0}}
    model = {"loss": 1.98, "perplexity": 7.239, "bits_per_byte": 2.856, "samples": 1096}
    rundir.write_json(EVALUATION, {"kind": "tokens", "model": model, "baselines": baselines, "notes": []})
    found = dict(summary_lines(rundir))
    assert found["test perplexity"] == "7.239 (bigram 11.27, unigram 22)"
    assert found["test bits_per_byte"] == "2.856 (bigram 3.494)"

"""What a job's page says besides curves: why it failed, its settings, result, costs, checkpoints and links."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from told_events import HOSTILE, START, event, hang, membership, told, write_run

from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.dashboard.failure import Failure, describe_failure
from dtrain_dagster.dashboard.job_board import CANNOT_READ, JobBoard, OpenJob
from dtrain_dagster.dashboard.job_facts import Places, links_of, result_in_words, settings_text
from dtrain_dagster.dashboard.server import _refuse
from dtrain_dagster.reports.performance import summarise_performance
from dtrain_dagster.settings.links import studio_url
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir

MESSAGE = (
    "rank 1 on node 1 failed first (exit code 1); the end of its log:\n"
    '  File "/app/model.py", line 3, in forward\n\n'
    "torch.cuda.OutOfMemoryError: out of memory, token=PLANTEDPLANTED\n"
)


def opened(jobs: Path, job_id: str) -> OpenJob:
    job = JobBoard(str(jobs), "dedicated").open(job_id, time.time())
    assert job is not None
    return job


# ---- the failure


def failure_of(*facts: Any) -> Failure:
    found = describe_failure(*facts)
    assert found is not None
    return found


def test_a_failure_begins_with_its_cause_and_exit_code() -> None:
    nodes = [
        NodePresence(node_id=0, launch=1, started_at=START, ended_at=START + 9, exit_codes=(143,)),
        NodePresence(node_id=1, launch=1, started_at=START, ended_at=START + 9, exit_codes=(1, 0)),
    ]
    found = failure_of("failed", {"message": MESSAGE, "exit_code": 1}, {}, nodes, {}, "There is a checkpoint: go")
    assert found.title == "failed: exit code 1"
    assert found.cause == "torch.cuda.OutOfMemoryError: out of memory, token=[secret]"
    assert found.reason == "rank 1 on node 1 failed first (exit code 1)"
    assert (len(found.lines), found.lines_of) == (2, "node 1")
    assert "PLANTED" not in json.dumps(found.lines)
    assert found.nodes == "node 0: exit code 143, stopped by SIGTERM; node 1: exit code 1, exit code 0"
    assert found.advice == "There is a checkpoint: go"


def test_a_failure_that_nobody_recorded_shows_the_end_of_a_log() -> None:
    nodes = [NodePresence(node_id=2, launch=1, started_at=START, ended_at=START + 9, exit_codes=(-9,))]
    found = failure_of("failed", {}, {}, nodes, {2: f"x\n{HOSTILE}\x1b[2J\n"}, "")
    assert found.reason == "No process was left to record how it ended"
    assert found.lines == ("x", f"{HOSTILE}\\x1b[2J"), "the page shows text, never HTML"
    assert found.nodes == "node 2: killed by SIGKILL"


def test_a_cancelled_job_explains_nothing_and_a_finished_one_has_no_failure() -> None:
    found = failure_of("cancelled", {"message": "cancelled", "exit_code": 143}, {}, [], {}, "go on so")
    assert (found.title, found.reason, found.lines, found.advice) == ("cancelled", "", (), "go on so")
    assert describe_failure("succeeded", {}, {}, [], {}, "") is None
    assert describe_failure("running", {}, {}, [], {}, "") is None
    budget = failure_of("failed", {"message": MESSAGE}, {"status": "budget", "error": "it was paid\nmore"}, [], {}, "")
    assert (budget.title, budget.cause) == ("stopped by its budget", "it was paid"), "before what a log lets guess"


@pytest.mark.parametrize("state", ["failed", "cancelled", "succeeded"])
def test_a_page_of_a_job_that_did_not_succeed_has_one_step_and_advises_no_longer_training(
    tmp_path: Path, state: str
) -> None:
    rundir = write_run(tmp_path, "ended", [*told(30), checkpoint(151)], state=state)
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": START})
    rundir.write_json("checkpoints/LATEST.json", {"path": "checkpoints/g0001-s000000151", "step": 151})
    job = opened(tmp_path, "ended")
    page, facts = job.snapshot(0, "", time.time()), job.facts(Places())
    step = next(item["value"] for item in page["headline"] if item["label"] == "step")
    assert "Only " in page["verdict"]["evidence"]
    assert ("a longer training" in page["verdict"]["evidence"]) is (state == "succeeded")
    if state != "succeeded":
        assert step == "151", "the step of the checkpoint from which it goes on: not each step is reported"
        assert "The checkpoint of step 151 is kept" in facts["failure"]["advice"]
        assert facts["failure"]["advice"].endswith("run `dtrain train --name ended` to resume from it")


# ---- settings and result


SAS = "https://a.blob.core.windows.net/c?sv=2024&sig=PLANTED%2Fsignature"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("checkpoint_failed", {"step": 5, "message": SAS, "gives_up": False}),
        ("error", {"message": SAS, "fatal": False}),
        ("error", {"message": SAS, "fatal": True}),
        ("resume", {"path": SAS, "step": 5, "changes": [SAS]}),
        ("communication_error", {"step": 5, "operation": SAS, "error": SAS}),
        ("membership", membership(2, START, [0, 1], [2], []) | {"reason": SAS}),
        ("hang", hang(START, SAS)),
    ],
)
def test_what_nodes_say_is_shown_without_secrets(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    found = event(
        kind, START + 50, **{key: fields[key] for key in fields.keys() - {"kind", "time", "rank", "generation"}}
    )
    rundir = write_run(tmp_path, "mine", [*told(3), found | {"generation": fields.get("generation", 1)}])
    (node, *_) = rundir.nodes()
    rundir.write_node(replace(node, host=SAS, leaves_because=SAS, preflight=SAS))
    shown = json.dumps(opened(tmp_path, "mine").snapshot(0, "", time.time()))
    assert "PLANTED" not in shown
    assert shown.count("sig=[secret]") > 3, "beside the three of the node there is the event's"


def test_no_refusal_has_a_secret() -> None:
    assert _refuse(f"the jobs cannot be listed: {SAS}", 500).body.endswith(b"sig=[secret]")


def test_settings_are_the_job_and_its_nodes_without_secrets(tmp_path: Path) -> None:
    job = {"dataset": {"uri": "https://robot:PLANTED2@example.org/d", "args": {"api_key": "PLANTED1"}}, "note": "a\x1b"}
    text = settings_text(job, {"engine": "slurm", "node_count": 4})
    assert "PLANTED" not in text
    assert '"node_count": 4' in text
    assert "\x1b" not in text


def test_the_result_is_the_verdict_and_its_worth_in_words() -> None:
    evaluation = {
        "model": {"nll": -1.9},
        "baselines": {"ridge": {"nll": -2.0, "model_gain_nll": -0.1, "model_gain_t": -3.0}},
        "gate": {"passed": False, "reasons": ["it is worse than ridge"]},
        "notes": ["a note"],
    }
    verdict, worth, note = result_in_words(evaluation, 2.0)
    assert verdict == "The gate was not passed: it is worse than ridge"
    assert worth.startswith("Worth its cost? Over ridge: no gain (−0.1000 nats")
    assert note == "a note"
    assert result_in_words({"model": {"loss": 2.0}, "baselines": {}}, None) == [], "no gate was asked"


# ---- links


def test_a_run_directory_cannot_lead_the_reader_elsewhere() -> None:
    studio = "https://ml.azure.com/runs/x?wsid=/subscriptions/1"
    assert studio_url(studio) == studio
    for strange in (
        "javascript:alert(1)", "https://ml.azure.com.evil.example/", "https://u:p@ml.azure.com/", "http://ml.azure.com/",
        "https://ml.azure.com:444/", "//ml.azure.com/", "https://[", None, 7,
    ):  # fmt: skip
        assert studio_url(strange) == "", strange
    places = Places(dagster_url="http://127.0.0.1:3000", mlflow_url="http://127.0.0.1:5000")
    hostile = {"dagster_run_id": "../../x?y=<script>"}
    assert links_of(places, hostile, {"tracking": {"tags": {}}}, {"mlflow_run_id": "../a"}, {"studio_url": "x"}) == []


def test_the_pages_of_other_programs_are_named_exactly() -> None:
    places = Places(dagster_url="http://127.0.0.1:3000", mlflow_url="http://127.0.0.1:5000")
    run = "b41d1ccc-7629-4b3c-86dc-27b31d506b42"
    job = {"tracking": {"tags": {"dagster_run_id": run}}}
    found = links_of(places, {}, job, {"mlflow_run_id": "4f8cc1451615405e9b796dd5823459c1"}, {})
    assert [link["url"] for link in found] == [
        f"http://127.0.0.1:3000/runs/{run}",
        "http://127.0.0.1:5000/#/runs/4f8cc1451615405e9b796dd5823459c1",
    ]


# ---- the page's account, and the verdict


def test_the_page_of_a_finished_job_and_its_report_have_one_verdict(tmp_path: Path) -> None:
    """The report judges the whole training; the latest steps, which a live page looks at, were another matter."""
    events = told(60, slow=1) + told(25, slow=2, first=60)
    rundir = write_run(tmp_path, "done", events, state="succeeded")
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": START})
    job = opened(tmp_path, "done")
    live = job.dashboard.verdict({})
    assert live is not None
    assert live["title"].startswith("slow input on rank 2")
    snapshot = job.snapshot(0, "", time.time())
    usage = [*CostTracker("", [], "dedicated").nodes]
    report = summarise_performance(list(rundir.events()), 3, usage)
    assert report.diagnosis.node_id == 1
    assert snapshot["verdict"]["title"].startswith(report.diagnosis.where)
    assert snapshot["verdict"]["evidence"].startswith(report.diagnosis.evidence)
    assert snapshot["is_whole"]


def test_the_ledger_of_the_page_sums_to_the_headlines_cost(tmp_path: Path) -> None:
    rundir = write_run(tmp_path, "done", told(20), state="succeeded")
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": START})
    job = opened(tmp_path, "done")
    account = job.account(time.time())
    assert sum(row["share"] for row in account.rows) == pytest.approx(1.0)
    cost = next(item["value"] for item in job.snapshot(0, "", time.time())["headline"] if item["label"] == "cost")
    assert account.total.startswith(cost)
    unpriced = opened_without_price(tmp_path)
    assert (unpriced.rows, unpriced.basis) == ((), "no price is known for its nodes")


def opened_without_price(jobs: Path) -> Any:
    write_run(jobs, "unpriced", told(20), state="succeeded")
    return opened(jobs, "unpriced").account(time.time())


def test_facts_of_a_damaged_file_take_only_their_own_part_away(tmp_path: Path) -> None:
    rundir = write_run(tmp_path, "done", told(3), state="failed")
    rundir.storage.write("evaluation.json", b'{"model": {"loss": 1')
    rundir.write_json("checkpoints/LATEST.json", {"path": "checkpoints/g0001-s000000005", "step": 5, "generation": 1})
    facts = opened(tmp_path, "done").facts(Places())
    assert facts["result"] is None
    assert len(facts["damaged"]) == 1
    assert facts["damaged"][0].startswith("the result cannot be read:")
    assert facts["failure"]["title"] == "failed"
    assert "The checkpoint of step 5 is kept" in facts["failure"]["advice"]


def test_what_cannot_be_read_for_a_moment_or_comes_after_the_end_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = write_run(tmp_path, "mine", told(3), state="succeeded")
    monkeypatch.setattr("dtrain_dagster.dashboard.job_board.refresh_seconds", lambda storage: 0.01)
    places, board = Places(mlflow_url="https://mlflow.example"), JobBoard(str(tmp_path), "dedicated")

    def facts() -> dict[str, Any]:
        time.sleep(0.12)
        job = board.open("mine", time.time())
        assert job is not None
        return job.facts(places)

    rundir.storage.write("tracking.json", b"{")
    before = facts()
    assert (before["links"], len(before["damaged"])) == ([], 1)
    rundir.write_json("tracking.json", {"mlflow_run_id": "0123456789abcdef"})
    after = facts()
    assert ([link["label"] for link in after["links"]], after["damaged"]) == (["MLflow run"], [])


def test_a_strange_plan_takes_only_the_costs_away(tmp_path: Path) -> None:
    rundir = write_run(tmp_path, "done", told(20), state="succeeded")
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": START})
    rundir.write_json("plan.json", {"tier": "dedicated", "probes": [7]})
    job = opened(tmp_path, "done")
    with contextlib.suppress(*CANNOT_READ):
        job.account(time.time())
    assert job.snapshot(0, "", time.time())["verdict"]["title"].startswith("slow input on rank 1")


def checkpoint(step: int) -> dict[str, Any]:
    file = {"bytes": 7, "sha256": "0" * 64}
    return {"step": step, "generation": 1, "fingerprint": "f", "writer": "w", "files": {"state.pt": file}}


def test_an_end_of_an_earlier_launch_explains_nothing(tmp_path: Path) -> None:
    rundir: RunDir = write_run(tmp_path, "again", told(3), state="failed")
    rundir.write_json("status.json", {"state": "failed", "message": MESSAGE, "launch": 1, "exit_code": 1})
    rundir.write_json("launch.json", {"launch": 2, "submitted_at": START})
    facts = opened(tmp_path, "again").facts(Places())
    assert (facts["failure"]["title"], facts["failure"]["cause"]) == ("failed", "")

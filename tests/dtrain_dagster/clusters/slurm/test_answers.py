"""What lines of a real SLURM 22.05 mean."""

from __future__ import annotations

import pytest

from dtrain_dagster.clusters.slurm.answers import (
    exit_code_of,
    limit_seconds,
    read_failure,
    read_job,
    read_rows,
)
from dtrain_dagster.clusters.slurm.commands import COLUMNS, end, list_all, remote, script, submit
from dtrain_dagster.clusters.supervision.engine import EngineError, EngineUnreachableError
from dtrain_dagster.settings.slurm import SlurmSettings

LAUNCH = {"token": "0123456789abcdef" * 3, "launch": 2}
NAME = "dtrain-89abcdef0123456789abcdef-l2-n1-s3"


def line(**changes: str) -> str:
    values = {
        "JobID": "7", "Name": NAME, "State": "RUNNING", "exit_code": "0", "Reason": "None", "NodeList": "n2",
        "SubmitTime": "1795521094", "StartTime": "1795521095", "EndTime": "1795521395", "TimeLimit": "5:00",
    } | changes  # fmt: skip
    return "".join(values[name].ljust(width) for name, width in COLUMNS.items())


def job(**changes: str):
    (row,) = read_rows(line(**changes) + "\n")
    found = read_job(row)
    assert found is not None
    return found


def test_a_running_node_has_its_machine_and_its_limit():
    found = job()
    assert (found.id, found.node_id, found.incarnation, found.state, found.host) == ("7", 1, 3, "running", "n2")
    assert (found.submitted_at, found.started_at, found.ended_at) == (1795521094.0, 1795521095.0, None)
    assert found.ends_at == 1795521395.0
    assert job(TimeLimit="UNLIMITED", EndTime="N/A").ends_at is None
    assert job(State="COMPLETING").state == "running", "processes of it may be there"
    assert job(State="COMPLETING").ends_at is None, "it needs no successor"


def test_a_waiting_node_says_why_and_what_helps():
    found = job(State="PENDING", Reason="PartitionConfig", NodeList="", StartTime="N/A", EndTime="N/A")
    assert found.state == "pending"
    assert "lower DTRAIN_NODE_CPUS" in found.reason
    assert found.reason.startswith("PartitionConfig: ")
    assert found.started_at is None, "the expected start is none"
    told = job(State="PENDING", Reason="Resources", StartTime="1795521600", EndTime="N/A", NodeList="")
    assert told.reason.endswith("expected to start at 2026-11-24 12:00 UTC")
    assert told.started_at is None
    rare = "Nodes required for job are DOWN, DRAINED or reserved for jobs"
    long = job(State="PENDING", Reason=rare, NodeList="", StartTime="N/A")
    assert long.reason == rare
    assert "wait, or ask for less" in job(State="PENDING", Reason="AssocGrpCPUMinutesLimit").reason


@pytest.mark.parametrize(
    ("state", "raw", "code", "lost", "planned"),
    [
        ("COMPLETED", "0", 0, False, False), ("FAILED", "768", 3, False, False), ("FAILED", "9", -9, False, False),
        ("PREEMPTED", "15", -15, True, False), ("NODE_FAIL", "0", 0, True, False), ("TIMEOUT", "0", 0, True, True),
        ("CANCELLED", "15", -15, True, False), ("OUT_OF_MEMORY", "125", -9, False, False),
    ],
)  # fmt: skip
def test_ends_are_told_apart(state: str, raw: str, code: int, lost: bool, planned: bool):
    found = job(State=state, exit_code=raw, EndTime="1795521200")
    assert (found.state, found.exit_code, found.lost, found.is_planned) == ("ended", code, lost, planned)
    assert found.ended_at == 1795521200.0
    assert state in found.reason or state in ("COMPLETED", "FAILED")


@pytest.mark.parametrize(
    ("state", "cause"),
    [("COMPLETED", ""), ("FAILED", ""), ("PREEMPTED", "taken"), ("CANCELLED", "taken"), ("TIMEOUT", "taken"),
     ("NODE_FAIL", "machine"), ("BOOT_FAIL", "machine"), ("OUT_OF_MEMORY", "program")],
)  # fmt: skip
def test_an_end_is_the_doing_of_the_machine_of_others_or_of_the_program(state: str, cause: str):
    assert job(State=state, EndTime="1795521200").cause == cause


def test_an_end_in_order_shortly_before_the_limit_is_the_limits():
    assert job(State="FAILED", exit_code=str(143 << 8), EndTime="1795521340").is_planned
    assert not job(State="FAILED", exit_code=str(143 << 8), EndTime="1795521300").is_planned


def test_jobs_of_others_are_none_of_ours():
    (row,) = read_rows(line(Name="somebody-else"))
    assert read_job(row) is None
    assert read_rows("\n") == []


def test_limits_and_codes():
    assert limit_seconds("2-03:00:00") == 2 * 86400 + 3 * 3600
    assert limit_seconds("5:00") == 300.0
    assert limit_seconds("UNLIMITED") is None
    assert exit_code_of("FAILED", "N/A") is None


POLICY = (
    "sbatch: error: {} sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
    "limit, user's size and/or time limits)"
)
FAILED = "sbatch: error: Batch job submission failed: {}"


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        (FAILED.format("Invalid partition name specified"), EngineError, "; correct DTRAIN_SLURM_PARTITION"),
        ("sbatch: error: Invalid generic resource (gres) specification", EngineError, "correct DTRAIN_NODE_GPUS"),
        (
            FAILED.format("Invalid account or account/partition combination specified"),
            EngineError,
            "; correct --account in DTRAIN_SLURM_OPTIONS",
        ),
        (
            "squeue: error: slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            EngineUnreachableError,
            "cannot submit now",
        ),
        (POLICY.format("QOSMaxSubmitJobPerUserLimit"), EngineUnreachableError, "the queue is full"),
        (POLICY.format("AssocGrpSubmitJobsLimit"), EngineUnreachableError, "the queue is full"),
        (POLICY.format(""), EngineUnreachableError, "the queue is full"),
        (  # it would wait for ever
            POLICY.format("QOSMaxWallDurationPerJobLimit"),
            EngineError,
            "; lower time_limit_minutes in DTRAIN_SLURM_OPTIONS",
        ),
        (POLICY.format("QOSMaxNodePerJobLimit"), EngineError, "--qos in DTRAIN_SLURM_OPTIONS"),
    ],
)
def test_what_a_command_says_is_told_with_the_setting_or_waited_for(
    said: str, kind: type[Exception], remedy: str
) -> None:
    failure = read_failure("submit", said)
    assert isinstance(failure, kind)
    assert remedy in str(failure)


def test_a_node_is_one_job_that_nothing_requeues_and_whose_shell_becomes_the_agent():
    options = SlurmSettings(partition="gpu", gpus=2, memory_gib=0.5, time_limit_minutes=30, setup="module load x")
    command = submit(options, LAUNCH, 1, 3, "/home/a b/logs/x.out")
    assert {f"--job-name={NAME}", "--no-requeue", "--nodes=1", "--gres=gpu:2", "--mem=512M", "--time=30"} <= set(
        command
    )
    assert "--export=PATH,HOME,USER,LANG" in command, "no more of the submitter's environment"
    text = script(options, ["/usr/bin/python3", "-m", "trainer.node", "/home/a b"])
    assert text == "#!/bin/sh\nmodule load x\nexec /usr/bin/python3 -m trainer.node '/home/a b'\n"


def test_machines_are_excluded_beside_those_that_a_person_excludes():
    options = SlurmSettings(extra=("--account=x", "--exclude=a,b"))
    command = submit(options, LAUNCH, 1, 3, "out", ["c", "d"])
    assert [word for word in command if word.startswith(("--exclude", "--account"))] == [
        "--exclude=a,b,c,d", "--account=x",
    ]  # fmt: skip
    assert not [word for word in submit(SlurmSettings(), LAUNCH, 1, 3, "out") if word.startswith("--exclude")]


def test_ends_reach_the_agent_first():
    assert end(["7"], force=False) == [
        ["scancel", "--state=PENDING", "7"],
        ["scancel", "--batch", "--signal=TERM", "--state=RUNNING", "7"],
    ]
    assert end(["7"], force=True)[0] == ["scancel", "--signal=KILL", "--full", "7"]


def test_a_login_node_gets_one_line_and_asks_nobody_anything():
    command = remote("login", "/tmp/x/%C", list_all("a b"))
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-2] == "login"
    assert command[-1].startswith("sh -c ")
    assert " sh env SLURM_TIME_FORMAT=%s squeue --me" in command[-1]
    assert command[-1].endswith("'--name=a b'")


def test_lines_that_name_clusters_are_no_jobs():
    assert [row["JobID"] for row in read_rows(f"CLUSTER: one\n{line()}\n\n")] == ["7"]

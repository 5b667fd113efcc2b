from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.waiting import until
from trainer.config import DatasetRef, JobConfig
from trainer.documents.presences import NodePresence, heartbeat_seconds, stale_seconds
from trainer.observability import node_presence as presences
from trainer.observability.node_presence import PresenceRecorder, record_presence, write_last_presence
from trainer.rundir import RunDir
from trainer.runtime.launch import LAUNCH_VARIABLE, Launch
from trainer.storage.open import open_storage

TOLD = Launch(number=3, records_presence=True).variables()
ASKED = {**TOLD, "RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "1"}
NODE = {**ASKED, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}

ENDED = """
import os, signal, sys, time
from trainer.config import DatasetRef, JobConfig
from trainer.observability.node_presence import record_presence
from trainer.rundir import RunDir
job = JobConfig(job_id="test", run_dir=sys.argv[1], dataset=DatasetRef(uri="x"))
with record_presence(job, {"DTRAIN_LAUNCH": '{"records_presence": true}'}) as leaving:
    while not RunDir(job.run_dir).nodes():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return JobConfig(job_id="test", run_dir=str(tmp_path), dataset=DatasetRef(uri="x"))


def nodes(job: JobConfig) -> list[NodePresence]:
    return RunDir(job.run_dir).nodes()


def test_each_stay_of_a_node_has_a_record_of_its_own(job: JobConfig) -> None:
    for code in (75, 0):
        with record_presence(job, NODE) as leaving:
            leaving.code = code
    first, second = nodes(job)
    for node in (first, second):
        assert (node.node_id, node.launch) == (1, 3)
        assert node.ended_at is not None
        assert node.started_at < node.ended_at
        assert node.last_seen_at is not None
    assert (first.incarnation, first.exit_codes) == (1, (75,))
    assert (second.incarnation, second.exit_codes) == (2, (0,))


def test_a_node_that_is_there_says_so_again_and_again(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presences, "heartbeat_seconds", lambda storage: 0.01)
    watch = PresenceRecorder(RunDir(job.run_dir), 0, 1, started_at=5.0)
    seen: set[float | None] = set()
    while len(seen) < 4:
        seen |= {node.last_seen_at for node in nodes(job)}
    [now] = nodes(job)
    assert (now.started_at, now.ended_at, now.exit_codes) == (5.0, None, ())
    watch.close(7)
    [node] = nodes(job)
    assert node.ended_at is not None
    assert node.exit_codes == (7,)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**NODE, **Launch(number=3).variables()},
        {**NODE, "LOCAL_RANK": "1"},
        {**NODE, "RANK": "nonsense"},
        {**NODE, LAUNCH_VARIABLE: "3"},
    ],
    ids=["by itself", "not asked", "another of the node", "what the trainer refuses", "a launch of another version"],
)
def test_only_who_is_asked_and_first_on_its_node_writes(job: JobConfig, environment: dict[str, str]) -> None:
    with record_presence(job, environment):
        pass
    assert nodes(job) == []


def test_an_error_that_nobody_expected_is_an_end_too(job: JobConfig) -> None:
    with pytest.raises(ZeroDivisionError), record_presence(job, NODE):
        raise ZeroDivisionError
    assert nodes(job)[0].exit_codes == (1,)


def test_one_that_ends_at_once_says_so_before(job: JobConfig) -> None:
    write_last_presence(3)  # nobody keeps a record in this process yet
    with record_presence(job, NODE):
        write_last_presence(3)
        [node] = nodes(job)
        assert node.ended_at is not None
        assert node.exit_codes == (3,)
    assert nodes(job) == [node]


def test_one_that_is_asked_to_go_before_it_trains_leaves_a_last_word(job: JobConfig) -> None:
    run = subprocess.run([sys.executable, "-c", ENDED, job.run_dir], timeout=60)
    assert run.returncode == 143
    [node] = nodes(job)
    assert node.exit_codes == (143,)
    assert node.ended_at is not None


def test_storage_that_fails_holds_up_nobody(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presences, "LAST_WORD_SECONDS", 0.1)
    folder = Path(job.run_dir) / "nodes"
    folder.write_text("in the way of the folder")
    with record_presence(job, NODE) as leaving:
        leaving.code = 0
    assert folder.read_text() == "in the way of the folder"
    until(lambda: "presence" not in {thread.name for thread in threading.enumerate()}, threading.enumerate, 10)


def test_a_sign_of_life_may_be_missed_without_alarm(tmp_path: Path) -> None:
    for storage in (open_storage(tmp_path), open_storage("memory://x")):
        assert stale_seconds(storage) >= 5 * heartbeat_seconds(storage)

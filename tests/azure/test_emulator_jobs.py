"""The emulator's jobs: real processes, asked for by the real SDK, that end, fail, are cancelled, lose their nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.azure.emulator import Emulator

pytestmark = pytest.mark.slow
TERMINAL = ("Completed", "Failed", "Canceled")
SAY = """
import json, os, signal, sys, time
print(json.dumps({name: os.environ.get(name) for name in os.environ}), flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(0)))
for step in range(int(sys.argv[1])):
    print("step", step, flush=True)
    time.sleep(0.05)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def client(client: Any) -> Any:
    """With a cluster of three nodes."""
    from azure.ai.ml.entities import AmlCompute

    gpu = AmlCompute(name="gpu", size="Standard_NC6s_v3", max_instances=3, idle_time_before_scale_down=600)
    client.compute.begin_create_or_update(gpu).result()
    return client


@pytest.fixture(autouse=True)
def _no_faults_left(emulator: Emulator) -> Iterator[None]:
    yield
    emulator.control("clear")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "say.py").write_text(SAY)
    (folder / "inside").mkdir()
    (folder / "inside" / "file.txt").write_text("here")
    return folder


@pytest.fixture
def submit(client: Any, code: Path) -> Callable[..., Any]:
    def submit(
        name: str,
        steps: int = 3,
        nodes: int = 1,
        exit_code: int = 0,
        per_node: int = 1,
        limits: Any = None,
        **more: Any,
    ) -> Any:
        from azure.ai.ml import PyTorchDistribution, command
        from azure.ai.ml.entities import Environment

        job = command(
            name=name,
            code=str(code),
            command=more.pop("command", f"python say.py {steps} {exit_code}"),
            environment=Environment(name="image", version="1", image="registry.example/dtrain:1"),
            compute="gpu",
            instance_count=nodes,
            distribution=PyTorchDistribution(process_count_per_instance=per_node),
            experiment_name="trials",
            **more,
        )
        job.limits = limits
        return client.jobs.create_or_update(job)

    return submit


def wait(condition: Callable[[], Any]) -> Any:
    """What it gives, once it is true; the test's own time limit is the deadline."""
    while not (found := condition()):
        time.sleep(0.05)
    return found


def ended(emulator: Emulator, name: str) -> str:
    job = emulator.control("state")["jobs"][name]
    return str(job["status"]) if job["status"] in TERMINAL else ""


def log(emulator: Emulator, name: str, rank: int = 0) -> str:
    file = emulator.folder / "nodes" / name / "user_logs" / f"std_log_process_{rank:02d}.txt"
    return file.read_text() if file.exists() else ""


def processes(emulator: Emulator, name: str) -> list[psutil.Process]:
    """The job's guards and all below them."""
    guards = [psutil.Process(pid) for pid in emulator.control("state")["jobs"][name]["guards"]]
    return [*guards, *(child for guard in guards for child in guard.children(recursive=True))]


def test_a_job_runs_its_processes_as_azure_does(
    emulator: Emulator, client: Any, submit: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("two-by-two", nodes=2, per_node=2, environment_variables={"DTRAIN_LAUNCH": "1"}, tags={"run": "r1"})
    client.jobs.stream("two-by-two")
    # Not its text: azure-ai-ml 1.35.2 signs the log's address with the SAS of the datastore as if that were the key.
    assert "Streaming user_logs/std_log_process_00.txt" in capsys.readouterr().out
    job = client.jobs.get("two-by-two")
    assert (job.status, job.tags["run"], job.experiment_name) == ("Completed", "r1", "trials")
    assert job.properties["StartTimeUtc"] <= job.properties["EndTimeUtc"]
    assert "two-by-two" in job.studio_url
    client.jobs.download("two-by-two", download_path=tmp_path)
    logs = sorted((tmp_path / "artifacts" / "user_logs").iterdir())
    assert [file.name for file in logs] == [f"std_log_process_{rank:02d}.txt" for rank in range(4)]
    told = [json.loads(file.read_text().splitlines()[0]) for file in logs]
    for rank, environment in enumerate(told):
        expected = {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2),
            "MASTER_ADDR": "127.0.0.1", "AZUREML_NODE_COUNT": "2", "AZUREML_RUN_ID": "two-by-two", "DTRAIN_LAUNCH": "1",
        }  # fmt: skip
        assert {name: environment[name] for name in expected} == expected
        assert environment["MASTER_PORT"] == told[0]["MASTER_PORT"]
        assert "AZURE_STORAGE_ACCOUNT_URL" not in environment, "the service does not set it"
        assert "IDENTITY_ENDPOINT" not in environment, "that is the orchestrator's"
    bought = emulator.control("bought")
    assert bought["jobs"]["two-by-two"]["node_minutes"] > 0
    assert len(bought["stays"]) == 2


def test_submitted_twice_it_runs_once(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    from azure.ai.ml.exceptions import JobException
    from azure.core.exceptions import HttpResponseError

    submit("once", steps=20)
    submit("once", steps=20)
    with pytest.raises(HttpResponseError, match="already exists"):
        submit("once", steps=21)
    assert wait(lambda: ended(emulator, "once")) == "Completed"
    submit("once", steps=20)
    assert client.jobs.get("once").status == "Completed", "what has ended does not begin again"
    assert emulator.control("bought")["jobs"]["once"]["launches"] == 1
    with pytest.raises(JobException, match="Unsupported job type"):  # somebody has a job that the library cannot read
        list(client.jobs.list())
    assert list(emulator.control("state")["jobs"]).count("once") == 1


def test_an_answer_that_is_lost_does_not_buy_twice(emulator: Emulator, submit: Callable[..., Any]) -> None:
    emulator.control("fault", fault="drop", operation="job.put", moment="after")
    submit("lost-answer")
    assert wait(lambda: ended(emulator, "lost-answer")) == "Completed"
    assert emulator.control("bought")["jobs"]["lost-answer"]["launches"] == 1


def test_code_is_uploaded_once_and_changed_code_anew(
    emulator: Emulator, client: Any, submit: Callable[..., Any], code: Path
) -> None:
    submit("first-code")
    before = len(emulator.control("requests", operation="codes.upload"))
    submit("same-code")
    assert len(emulator.control("requests", operation="codes.upload")) == before
    (code / "inside" / "file.txt").write_text("there")
    submit("new-code", command="cat inside/file.txt")
    assert len(emulator.control("requests", operation="codes.upload")) == before + 1
    for name in ("first-code", "same-code", "new-code"):
        assert wait(partial(ended, emulator, name)) == "Completed"
    assert log(emulator, "new-code") == "there"


def test_a_cancelled_job_is_asked_to_end(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    submit("cancelled", steps=100_000, nodes=2)
    wait(lambda: "step 1" in log(emulator, "cancelled", 0) and "step 1" in log(emulator, "cancelled", 1))
    alive = processes(emulator, "cancelled")
    assert len(alive) >= 4
    client.jobs.begin_cancel("cancelled").wait()
    assert wait(lambda: ended(emulator, "cancelled")) == "Canceled"
    assert all("asked to end" in log(emulator, "cancelled", rank) for rank in range(2))
    psutil.wait_procs(alive)
    assert client.jobs.get("cancelled").status == "Canceled"
    assert all(node.runId is None for node in client.compute.list_nodes("gpu"))


def test_whoever_does_not_listen_is_killed(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    """Nor does leaving the process group help."""
    emulator.control("timing", grace_seconds=0.5)
    submit("deaf", command="trap '' TERM; setsid sleep 1000 & echo ready; while true; do sleep 0.1; done")
    wait(lambda: "ready" in log(emulator, "deaf"))
    alive = wait(lambda: found if len(found := processes(emulator, "deaf")) >= 3 else None)
    client.jobs.begin_cancel("deaf")
    assert wait(lambda: ended(emulator, "deaf")) == "Canceled"
    psutil.wait_procs(alive)
    emulator.control("timing", grace_seconds=10.0)


def test_a_failure_says_where_to_look(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    from azure.ai.ml.exceptions import JobException

    submit("fails", exit_code=3, nodes=2)
    assert wait(lambda: ended(emulator, "fails")) == "Failed"
    with pytest.raises(JobException, match=r"status code 3.*std_log_process_0"):
        client.jobs.stream("fails")


def test_the_service_may_fail_a_preempted_job(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    emulator.control("fault", fault="preempt", job="preempted", node=1, log="step 2", policy="fail")
    submit("preempted", steps=100_000, nodes=2)
    assert wait(lambda: ended(emulator, "preempted")) == "Failed"
    assert "asked to end" in log(emulator, "preempted", 1), "low priority has a warning"
    error = emulator.control("state")["jobs"]["preempted"]["error"]
    assert error["code"] == "UserError"
    assert "PreemptionError: Nodes of this job got pre-empted" in error["message"]


def test_a_lost_node_comes_back_with_its_rank(emulator: Emulator, submit: Callable[..., Any]) -> None:
    emulator.control("fault", fault="lose", job="survives", node=1, log="step 2", policy="survive")
    submit("survives", steps=60, nodes=2)
    assert wait(lambda: ended(emulator, "survives")) == "Completed"
    written = log(emulator, "survives", 1)
    assert written.count("step 0\n") == 2, "it began anew on another machine"
    assert "asked to end" not in written, "a node that is lost hears nothing"
    assert log(emulator, "survives", 0).count("step 0\n") == 1, "the others went on"
    mine = [stay for stay in emulator.control("bought")["stays"] if any(job[0] == "survives" for job in stay["jobs"])]
    assert len(mine) == 3
    assert sum(stay["end"] is not None for stay in mine) >= 1, "what is lost is paid for no longer"


def test_the_service_may_start_a_preempted_job_again(emulator: Emulator, submit: Callable[..., Any]) -> None:
    emulator.control("fault", fault="preempt", job="restarted", node=1, log="step 2", policy="restart")
    submit("restarted", steps=8, nodes=2)
    assert wait(lambda: ended(emulator, "restarted")) == "Completed"
    assert emulator.control("bought")["jobs"]["restarted"]["launches"] == 2
    assert log(emulator, "restarted", 1).count("step 0\n") == 2


def test_without_capacity_a_job_is_queued_until_there_is_some(
    emulator: Emulator, client: Any, submit: Callable[..., Any]
) -> None:
    emulator.control("clock", advance_seconds=3600)  # the nodes of the tests before are released
    emulator.control("fault", fault="capacity", until=3600)
    submit("waits", nodes=2)
    emulator.control("clock", advance_seconds=600)
    assert client.jobs.get("waits").status == "Queued"
    assert emulator.control("bought")["alive_nodes"] == 0
    emulator.control("clock", advance_seconds=3600)
    assert wait(lambda: ended(emulator, "waits")) == "Completed"


def test_more_nodes_than_the_cluster_has_is_an_error(emulator: Emulator, submit: Callable[..., Any]) -> None:
    submit("too-many", nodes=4)
    assert wait(lambda: ended(emulator, "too-many")) == "Failed"
    assert "3 at most" in emulator.control("state")["jobs"]["too-many"]["error"]["message"]


def test_odd_states_are_shown_and_pass(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    emulator.control("fault", fault="status", job="odd", status="NotResponding", seconds=100)
    submit("odd", steps=40)
    wait(lambda: client.jobs.get("odd").status == "NotResponding")
    emulator.control("clock", advance_seconds=100)
    assert wait(lambda: ended(emulator, "odd")) == "Completed"


def test_a_job_can_be_held_in_the_queue_for_ever(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    emulator.control("fault", fault="queue", job="held")
    submit("held")
    submit("passes")
    assert wait(lambda: ended(emulator, "passes")) == "Completed", "it holds up nobody else"
    emulator.control("clock", advance_seconds=86400)
    assert client.jobs.get("held").status == "Queued"
    client.jobs.begin_cancel("held").wait()
    assert wait(lambda: ended(emulator, "held")) == "Canceled"


def test_a_job_has_no_more_time_than_its_limit(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    from azure.ai.ml.entities import CommandJobLimits

    job = submit("limited", steps=100_000, limits=CommandJobLimits(timeout=600))
    assert job.limits.timeout == 600
    wait(lambda: "step 1" in log(emulator, "limited"))
    emulator.control("clock", advance_seconds=500)
    assert client.jobs.get("limited").status == "Running"
    emulator.control("clock", advance_seconds=200)
    assert wait(lambda: ended(emulator, "limited")) == "Canceled"


def test_tags_change_while_it_runs(emulator: Emulator, client: Any, submit: Callable[..., Any]) -> None:
    job = submit("tagged", tags={"run": "r1"})
    job.tags["note"] = "kept"
    client.jobs.create_or_update(job)
    assert {"run": "r1", "note": "kept"}.items() <= client.jobs.get("tagged").tags.items()
    assert wait(lambda: ended(emulator, "tagged")) == "Completed"

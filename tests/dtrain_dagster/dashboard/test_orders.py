"""Orders from a job's page: whose are taken, which can be given, and what exactly is run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests
from told_events import told, write_run

from dtrain_dagster.dashboard import orders
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.log_pages import LogFiles
from dtrain_dagster.dashboard.orders import (
    OrderDesk,
    OrderRefusedError,
    allowed_orders,
    judge_order,
    order_command,
)
from dtrain_dagster.dashboard.server import build_app, is_own_user
from dtrain_dagster.jobs.orders import ScriptOrder, environment_anywhere, keep_script
from harness.waiting import until
from tests.abuse.websites import served
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig


def test_orders_are_taken_from_the_user_here() -> None:
    assert judge_order("127.0.0.1", True) == judge_order("localhost", True) == ""
    assert judge_order("127.0.0.1", False), "another user of this machine"
    assert judge_order("dashboard.example.org", True), "behind a proxy, which asks for no password perhaps"


def test_what_can_be_ordered_follows_from_the_state() -> None:
    def possible(state: str, here: bool = True, trouble: str = "") -> set[str]:
        return {order for order, reason in allowed_orders(state, here, trouble).items() if not reason}

    assert possible("running") == possible("queued") == {"cancel"}
    assert possible("failed") == possible("cancelled") == {"resume"}
    assert possible("succeeded") == possible("damaged") == set()
    assert possible("failed", here=False) == possible("failed", trouble="its script is gone") == set()


def test_a_resumed_job_gets_the_nodes_that_were_ordered_whatever_its_run_directory_says(tmp_path: Path) -> None:
    keep(tmp_path, "mine", ranks=6)
    path = tmp_path / "orders" / "mine.json"
    expected = ["train", "--config", str(path), "--name", "mine", "--nodes", "3", "--procs-per-node", "2", "--detach"]
    assert order_command("resume", "mine", tmp_path, {"processes_per_node": 2, "node_count": 900}) == expected
    for strange in (0, -1, 4, 7, "2", None, 10**9):
        command = order_command("resume", "mine", tmp_path, {"processes_per_node": strange})
        assert command[5:9] == ["--nodes", "6", "--procs-per-node", "1"], strange
    with pytest.raises(OrderRefusedError, match="cannot be read"):
        order_command("resume", "unknown", tmp_path, {})


@pytest.mark.parametrize("job_id", ["--help", "a b", "../x", ""])
def test_a_name_that_is_none_is_no_argument_of_a_command(job_id: str) -> None:
    with pytest.raises(OrderRefusedError):
        order_command("cancel", job_id, Path("/nowhere"), {})
    with pytest.raises(OrderRefusedError, match="no order"):
        order_command("rm", "mine", Path("/nowhere"), {})


def keep(home: Path, job_id: str, ranks: int = 1) -> None:
    (home / "orders").mkdir(exist_ok=True)
    job = JobConfig(
        job_id=job_id, run_dir="/x", dataset=DatasetRef(uri="nowhere"),
        training=DistributedTrainingConfig(world_size=ranks),
    )  # fmt: skip
    (home / "orders" / f"{job_id}.json").write_text(job.to_json())


def test_who_is_not_on_this_machine_is_not_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system does not tell users, and whatever name the request gives."""
    monkeypatch.setattr("sys.platform", "darwin")
    assert is_own_user(("127.0.0.1", 5000), ("127.0.0.1", 8060))
    for stranger in (("10.0.0.7", 5000), ("testclient", 5000), None):
        assert not is_own_user(stranger, ("127.0.0.1", 8060)), stranger


# ---- over a real socket


@contextmanager
def serving(
    jobs: Path, host: str = "127.0.0.1", names: tuple[str, ...] = (), logs: LogFiles | None = None, orders: bool = True
) -> Iterator[str]:
    desk = OrderDesk(jobs.parent) if orders else None
    with served(build_app(JobBoard(str(jobs), "dedicated"), names, logs=logs, desk=desk), host=host) as port:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def post(url: str, job_id: str, order: str, **headers: str) -> requests.Response:
    return requests.post(f"{url}/jobs/{job_id}/orders", json={"order": order}, headers=headers, timeout=10)


def test_no_other_site_gives_an_order(tmp_path: Path) -> None:
    write_run(tmp_path / "jobs", "mine", told(2), state="failed")
    with serving(tmp_path / "jobs", names=("mine.example",)) as url:
        assert post(url, "mine", "resume", Origin="http://evil.example").status_code == 403
        assert post(url, "mine", "resume", Host="mine.example").status_code == 403
        form = requests.post(f"{url}/jobs/mine/orders", data={"order": "resume"}, timeout=10)
        assert form.status_code == 415, "a form of a website cannot send JSON"
        assert requests.get(f"{url}/jobs/mine/orders", timeout=10).status_code == 405
        refused = post(url, "mine", "resume")
        assert (refused.status_code, "not ordered from this home" in refused.text) == (409, True)
        assert post(url, "nobody", "cancel").status_code == 404
        assert requests.get(f"{url}/jobs/mine/orders.json", timeout=10).json()["last"] is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_this_machine_gives_orders_over_either_loopback(tmp_path: Path, host: str) -> None:
    """An order that a job of this state takes from nobody: who asks was let through."""
    write_run(tmp_path / "jobs", "mine", told(2), state="succeeded")
    with serving(tmp_path / "jobs", host) as url:
        refused = post(url, "mine", "cancel")
    assert (refused.status_code, "it is not running" in refused.text) == (409, True), refused.text


def test_a_dashboard_that_reads_only_has_no_buttons(tmp_path: Path) -> None:
    write_run(tmp_path / "jobs", "mine", told(2))
    with serving(tmp_path / "jobs", orders=False) as url:
        assert post(url, "mine", "cancel").status_code == 404
        assert '"orders": false' in requests.get(f"{url}/jobs/mine", timeout=10).text
        assert requests.get(f"{url}/jobs/mine/logs.json", timeout=10).status_code == 404


@pytest.mark.slow
def test_an_order_is_the_command_that_a_shell_would_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that the cluster does not know: the command refuses it, and the page tells in which words. A file of the
    folder is no module of it."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("click", "dagster"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    write_run(tmp_path / "jobs", "mine", told(2))
    with serving(tmp_path / "jobs") as url:
        given = post(url, "mine", "cancel")
        assert (given.status_code, given.json()["command"]) == (202, "dtrain cancel mine")
        again = post(url, "mine", "cancel")
        assert (again.status_code, "under way" in again.text) == (409, True)
        deadline = time.monotonic() + 120
        while (last := requests.get(f"{url}/jobs/mine/orders.json", timeout=10).json()["last"])["code"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert (last["order"], last["code"]) == ("cancel", 2)
    assert "mine" in last["said"]
    assert "cancel from the dashboard" in next((tmp_path / "audit").iterdir()).read_text()


def test_orders_that_have_ended_hold_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_DTRAIN", "print('done')")
    monkeypatch.setattr(orders, "MOST_ENDED", 3)
    desk, before = OrderDesk(tmp_path), psutil.Process().num_fds()
    for number in range(5):
        name = f"job-{number}"
        desk.give(write_run(tmp_path / "jobs", name, told(2)), name, "running", "cancel")
        until(lambda name=name: desk.describe(name, "running")["last"]["code"] == 0)
        assert desk.describe(name, "running")["last"]["said"] == "done"
    assert psutil.Process().num_fds() == before
    assert [desk.describe(f"job-{number}", "running")["last"] is None for number in range(5)] == [True, True] + [
        False
    ] * 3


def keep_script_job(home: Path, folder: Path) -> ScriptOrder:
    (home / "orders").mkdir(exist_ok=True)
    job = JobConfig(job_id="mine", run_dir="/x", dataset=DatasetRef(uri="script:points.py"))
    assert job.is_of_script
    (home / "orders" / "mine.json").write_text(job.to_json())
    return ScriptOrder(
        script=str(folder / "points.py"), folder=str(folder), arguments=("3", "--x y"),
        overrides=("training.epochs=2",), nodes=3, processes_per_node=2,
    )  # fmt: skip


def test_a_scripts_job_is_resumed_as_it_was_ordered_or_the_button_says_why_not(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    order, desk = keep_script_job(tmp_path, folder), OrderDesk(tmp_path)

    def trouble() -> str:
        return desk.describe("mine", "failed")["allowed"]["resume"]

    assert "run `dtrain train --script` again with the same --name" in trouble()
    with pytest.raises(OrderRefusedError, match="does not know how it was started"):
        order_command("resume", "mine", tmp_path, {})
    keep_script(tmp_path, "mine", order)
    assert trouble() == f"its script was started in {folder}, which is no longer there: put the folder back"
    folder.mkdir()
    assert trouble() == f"its script {folder}/points.py is no longer there: put it back"
    (folder / "points.py").touch()
    assert trouble() == ""
    found = order_command("resume", "mine", tmp_path, {"command": ["rm"], "node_count": 900})
    assert found == ["train", "--name", "mine", "--detach"], "the command knows the rest"
    assert [path.name for path in (tmp_path / "orders").glob("*.json")] == ["mine.json"], "it is no order of a job"
    (tmp_path / "orders/scripts/mine.json").write_text('{"script": 7}')
    assert "does not know how it was started" in trouble()


def test_an_order_finds_its_folders_wherever_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = environment_anywhere({"PYTHONPATH": f"code{os.pathsep}/lib", "HOME": "/root"}, Path("home"))
    assert found == {
        "PYTHONPATH": f"{tmp_path}/code{os.pathsep}/lib",
        "HOME": "/root",
        "DTRAIN_HOME": f"{tmp_path}/home",
    }


def test_hostile_lines_and_paths_of_logs_stay_text(tmp_path: Path) -> None:
    rundir = write_run(tmp_path / "jobs", "mine", told(2))
    rundir.storage.write("logs/node-0.log", b"</script><script>alert(1)</script>\npassword=PLANTEDPLANTED\n")
    logs = LogFiles(lambda job_id: Path(rundir.storage.local_path("logs")))
    with serving(tmp_path / "jobs", logs=logs) as url:
        answer = requests.get(f"{url}/jobs/mine/logs.json", timeout=10)
        assert requests.get(f"{url}/jobs/..%2fmine/logs.json", timeout=10).status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["lines"] == [[0, "</script><script>alert(1)</script>"], [0, "password=[secret]"]]

"""What is killed at any moment works when it is done again, and is not there twice; nobody is signalled by mistake."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtrain_dagster.__main__ import main as home_commands
from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.base import JobSpec, JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import new_token, signal_supervisor, sweep
from dtrain_dagster.settings.home import make_home
from dtrain_dagster.support.building import LEFT_SECONDS, building_in
from harness import small_job
from harness.waiting import until
from tests.abuse.killed import in_fork
from trainer.engine.run_job import run_job
from trainer.errors import DamagedError
from trainer.node.processes import MARK
from trainer.observability import mlflow_sqlite
from trainer.rundir import RunDir

ROOT = Path(__file__).parents[2]


def test_a_submission_that_was_killed_is_done_again(tmp_path: Path):
    """Its supervisor lives on when the submitter is killed."""

    def submit_once(folder: Path) -> None:
        manager = LocalClusterManager(folder)
        manager.provision_cluster(1, "Standard_NC6s_v3")
        command = ("sh", "-c", f"echo once >> '{folder}/ran'")
        manager.submit_job(
            JobSpec(job_id="one", command=command, node_count=1, processes_per_node=1, run_dir=f"{manager.folder}/one")
        )

    _, steps = in_fork(lambda: submit_once(tmp_path / "whole"), tmp_path)
    for kill_at in (steps // 3, 2 * steps // 3, steps - 1):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        in_fork(lambda folder=folder: submit_once(folder), tmp_path, kill_at)
        submit_once(folder)
        manager = LocalClusterManager(folder)
        until(lambda manager=manager: manager.job_status("one").state.is_final, "the end of the job")
        assert manager.job_status("one").state is JobState.SUCCEEDED
        assert (folder / "ran").read_text().count("once") >= 1
        assert os.listdir(manager.folder) == ["one"]


def test_a_start_that_has_nothing_to_save_sweeps_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    rundir = RunDir(small_job.train(tmp_path, small_job.write_dataset(tmp_path / "dataset"), "one", steps=3))
    for name in ("g0001-s000000002/state.pt.0123abcd.tmp", "LATEST.json.0123abcd.tmp"):
        rundir.storage.write(f"checkpoints/{name}", b"half")
        os.utime(rundir.storage.local_path(f"checkpoints/{name}"), (0, 0))
    assert run_job(rundir.read_job()) == 0
    left = os.listdir(rundir.storage.local_path("checkpoints"))
    assert sorted(left) == ["BEST.json", "BEST.json.lock", "LATEST.json", "LATEST.json.lock", "g0001-s000000003"]


def test_mlflows_tables_are_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mlflow_sqlite, "_make", lambda path: path.write_text("tables"))
    uri, path = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "mlflow.db"
    _, steps = in_fork(lambda: mlflow_sqlite.make_tables(uri), tmp_path)
    for kill_at in range(1, steps):
        path.unlink(missing_ok=True)
        in_fork(lambda: mlflow_sqlite.make_tables(uri), tmp_path, kill_at)
        assert not path.exists() or path.read_text() == "tables"
        mlflow_sqlite.make_tables(uri)
        assert path.read_text() == "tables"
    path.unlink()
    mlflow_sqlite.make_tables(uri)
    assert sorted(os.listdir(tmp_path)) == ["mlflow.db", "mlflow.db.lock"], "what was left is swept"
    path.write_text("my thesis, in a file with an odd name")
    mlflow_sqlite.make_tables(uri)
    assert path.read_text().startswith("my thesis")


def stranger(mark: str | None = None) -> subprocess.Popen[bytes]:
    """Somebody else's process."""
    environment = {**os.environ, **({MARK: mark} if mark else {})}
    started = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    environ = Path(f"/proc/{started.pid}/environ")
    until(environ.read_bytes, lambda: f"{environ} is empty")  # for a moment after exec, when Popen has returned
    return started


@pytest.fixture
def manager(tmp_path: Path) -> LocalClusterManager:
    return LocalClusterManager(tmp_path / "home")


def submit(manager: LocalClusterManager, job_id: str) -> RunDir:
    run_dir = str(manager.folder / job_id)
    manager.submit_job(
        JobSpec(job_id=job_id, run_dir=run_dir, command=("sleep", "600"), node_count=1, processes_per_node=1)
    )
    return RunDir(run_dir)


def test_cancel_ends_the_job_and_not_whom_a_forged_status_names(manager: LocalClusterManager):
    """What a job writes as its supervisor's process is a hint, and no more."""
    rundir, victim = submit(manager, "one"), stranger()
    try:
        status = rundir.read_json("status.json")
        for pid in (victim.pid, -1, 0, 1, "1", None, 2**40, True):
            rundir.write_json("status.json", status | {"pid": pid})
            with suppress(DamagedError):  # a number that no process can have
                signal_supervisor(rundir, signal.SIGWINCH)  # of which nobody takes notice
        rundir.write_json("status.json", status | {"pid": victim.pid})
        manager.cancel_job("one")
        assert manager.job_status("one").state is JobState.CANCELLED
        assert victim.poll() is None
    finally:
        victim.kill()


def test_a_forged_launch_kills_nothing_of_another_job(tmp_path: Path):
    """A token that is cut to one digit is the beginning of many processes' marks."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    mark, token = new_token(other), new_token(mine)
    victim, own = stranger(mark), stranger(token)
    try:
        for forged in (mark, mark[:1], "", " ", None, 7, mark[:16], ["a"], token[:16] + mark[16:40]):
            sweep({"token": forged}, mine)
        assert victim.poll() is None
        assert own.poll() is None
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(own.wait, 60)  # a child that nobody waits for would still be there
            sweep({"token": token}, mine)
            assert ended.result() == -signal.SIGKILL
        assert victim.poll() is None
    finally:
        victim.kill()
        own.kill()


def test_what_a_killed_builder_left_is_swept_and_what_is_being_built_is_not(tmp_path: Path):
    code = f"""
import time
from pathlib import Path
from dtrain_dagster.support.building import building_in
with building_in(Path({str(tmp_path)!r})) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    folders = []
    for process in started:
        assert process.stdout is not None
        folders.append(Path(process.stdout.readline().strip()))
    started[0].kill()
    started[0].wait()
    try:
        for folder in folders:
            os.utime(folder, (time.time() - 2 * LEFT_SECONDS,) * 2)
        with building_in(tmp_path):
            assert not folders[0].exists()
            assert folders[1].exists()
    finally:
        started[1].kill()
        started[1].wait()


COMMANDS = [
    ["setup"], ["doctor"], ["launch", "--nodes", "1", "--", "true"], ["clean", "--yes"],
    ["cancel", "one"], ["jobs"], ["logs", "one"], ["cost", "one"], ["status"],
]  # fmt: skip


def said_of(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and standard error of a command, which must end without a traceback."""
    done = CliRunner().invoke(home_commands if command[0] in home_commands.commands else main, command, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exc_info)
    assert "Traceback" not in done.stderr, command
    assert done.exit_code in (0, 2), (command, done.stderr)
    return done.exit_code, done.stderr


def fill(path: Path) -> None:
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount")
@pytest.mark.parametrize("trouble", ["read-only", pytest.param("full", marks=pytest.mark.long)])
def test_a_home_that_cannot_be_written_is_one_sentence(tmp_path: Path, trouble: str):
    """One sentence and exit code 2, no traceback."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        home = make_home(disk / "home")
        environment = os.environ | {"DTRAIN_HOME": str(home), "DAGSTER_HOME": str(home / "dagster")}
        made = ["launch", "--nodes", "1", "--name", "one", "--", "true"]
        assert said_of(made, environment)[0] == 0
        if trouble == "read-only":
            again = ["mount", "-o", "remount,ro", disk]  # the job's supervisor has files open for a moment
            until(lambda: subprocess.run(again, capture_output=True).returncode == 0, "the disk stays busy", pause=0.1)
        else:
            fill(disk / "ballast")
        for command in COMMANDS:
            if trouble == "full" and command[0] == "clean":
                continue  # which makes room
            code, said = said_of(command, environment)
            assert code == 0 or len(said.strip().splitlines()) == 1, said
            if command[0] == "launch":
                assert code == 2
                assert "Read-only" in said or "No space" in said
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_home_that_cannot_be_made_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for command in COMMANDS:
        home = tmp_path / "file" / "home"
        _, said = said_of(command, os.environ | {"DTRAIN_HOME": str(home)})
        assert said.count("Error:") <= 1

"""The command line: ``python -m trainer`` and ``torchrun … -m trainer``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import Job, free_port

from trainer.__main__ import main
from trainer.config import parse_job

NewJob = Callable[..., Job]


def test_a_dry_run_prints_the_whole_job_and_trains_nothing(new_job: NewJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = new_job()
    path = job.write()
    assert main(["--config", str(path), "--dry-run", "--set", "training.epochs=9"]) == 0
    printed = parse_job(capsys.readouterr().out)
    assert (printed.training.epochs, printed.training.learning_rate) == (9, 2e-3)
    assert [entry.name for entry in job.run_dir.iterdir()] == ["job.json"]


def test_a_name_without_a_folder_is_one_in_this_folder(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(new_job().write().parent)
    assert main(["--config", "job.json", "--dry-run"]) == 0
    assert main(["--config", "/job.json", "--dry-run"]) == 2, "the root folder is another one"
    assert "--config /job.json: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "there is no such file"),
        (b"\xff\xfe", [], "cannot be read"),
        (b"{", [], "is not JSON"),
        (b"{}", [], "job_id is missing"),
        (b"{}", ["--set", "job_id"], "write it as dotted.key=value"),
    ],
)
def test_a_job_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, arguments: list[str], message: str
) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["--config", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_and_an_unknown_address_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path)]) == 2
    assert main(["--config", "nowhere://bucket/job.json"]) == 2
    assert "cannot be read" in (said := capsys.readouterr().err)
    assert "Protocol not known: nowhere" in said


def test_help_tells_the_options_the_exit_codes_and_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for part in (
        "--config",
        "--set KEY=VALUE",
        "--dry-run",
        "torchrun --nproc-per-node 2",
        "143  stopped by SIGTERM",
        "75  lost its peers",
    ):
        assert part in told


@pytest.mark.slow
def test_torchrun_trains_with_overrides(new_job: NewJob) -> None:
    job = new_job()
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [torchrun, "--nproc-per-node", "2", *master, "-m", "trainer", "--config", str(job.write())]
    overrides = ["--set", "training.max_steps=3", "--set", "loss.factory=gaussian"]
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    run = subprocess.run(
        [*command, *overrides], env={**environment, **job.environment}, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    result = job.result()
    assert (result["status"], result["steps"], result["world_size"]) == ("succeeded", 3, 2)
    assert json.loads((job.run_dir / "model/model.json").read_text())["loss"]["factory"] == "gaussian"
    assert {item["node_id"] for item in job.events("node")} == {0}, "both ranks are on one node"


@pytest.mark.parametrize("address", ["nosuchprotocol://x/y", "/proc/nothing", "/dev/null/run"])
def test_a_run_directory_that_cannot_be_written_is_refused(
    new_job: NewJob, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    arguments = ["--config", str(new_job().write()), "--set", f"run_dir={address}"]
    assert main(arguments) == 2
    assert address in capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == 0, "nothing is opened to check a configuration"


@pytest.mark.slow
def test_a_wrong_dataset_and_a_port_in_use_exit_with_2(new_job: NewJob) -> None:
    wrong, crowded = new_job("wrong"), new_job("crowded")
    assert wrong.run_here("--set", "dataset.dataset_id=other") == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "trainer", "--config", str(crowded.write())]
        world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run = subprocess.run(command, env={**os.environ, **world}, capture_output=True, text=True, timeout=100)
    assert run.returncode == 2
    assert f"MASTER_PORT={port} is in use" in run.stderr
    assert f"MASTER_PORT={port} is in use" in crowded.result()["error"]
    assert "dataset.dataset_id = 'other'" in wrong.result()["error"]
    assert not wrong.losses()

"""The command line: ``python -m trainer`` and ``torchrun … -m trainer``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.worlds import Job, run_torchrun
from trainer import exit_codes
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
        "143  stopped by",
        "75  lost",
    ):
        assert part in told


@pytest.mark.slow
def test_torchrun_trains_with_overrides(new_job: NewJob) -> None:
    job = new_job()
    overrides = ("--set", "training.max_steps=3", "--set", "loss.factory=gaussian")
    code, said = run_torchrun(job, ("-m", "trainer"), *overrides)
    assert code == 0, said
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


def test_a_wrong_dataset_exits_with_2(new_job: NewJob) -> None:
    wrong = new_job()
    assert wrong.run_here("--set", "dataset.dataset_id=other") == 2
    assert "dataset.dataset_id = 'other'" in wrong.result()["error"]
    assert not wrong.losses()


def test_the_numbers_of_exit_codes_stay() -> None:
    """They are a contract with clusters and launchers."""
    named = {name: value for name, value in vars(exit_codes).items() if isinstance(value, int)}
    assert named == {"DONE": 0, "FAILED": 1, "UNUSABLE": 2, "LOST": 75, "UNFIT": 76, "BUDGET": 77, "EVICTED": 143}


def test_each_exit_code_has_its_words_and_its_line_of_help() -> None:
    assert len(set(exit_codes.MEANINGS.values())) == len(exit_codes.MEANINGS) == 7
    lines = exit_codes.describe_exit_codes().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(exit_codes.MEANINGS)

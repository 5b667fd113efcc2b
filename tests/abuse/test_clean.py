"""`make clean` removes what dtrain wrote, and nothing else: odd paths, with canaries beside the home and inside it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dtrain_dagster.__main__ import main
from dtrain_dagster.settings.home import MARKER, HomeError, hold_home, make_home, plan_removal, remove
from dtrain_dagster.support.job_lock import acquire
from dtrain_dagster.support.secrets import SecretError
from dtrain_dagster.web.stored_secrets import refuse_secret_on_command_line
from tests.abuse.planted_secrets import CARRIERS, secret_of

ROOT = Path(__file__).parents[2]
ODD_HOME = "-rf a;touch executed;$(touch executed)`touch executed`'|\"#\\ {ab,cd} h* & ~"
BESIDE = ("-rf", "a", "ab", "cd", "home0", "~")
"""Folders beside the home that a shell would reach if it cut or expanded its name."""


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A marked home with a job in it."""
    home = make_home(tmp_path / "home")
    (home / "storage" / "jobs" / "train-1").mkdir(parents=True)
    (home / "storage" / "jobs" / "train-1" / "job.json").write_text("{}")
    (home / "mlflow.db").write_text("")
    return home


def in_process(home: Path, *arguments: str) -> Result:
    """What the command says and does in this process, as long as it starts no other one."""
    found = {"DTRAIN_HOME": str(home), "DAGSTER_HOME": str(home / "dagster")}
    done = CliRunner().invoke(main, arguments, env=found)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def copy_of_the_makefile(folder: Path) -> Path:
    """Return a folder in which this repository's Makefile runs, with the packages of the Python that runs this."""
    folder.mkdir(parents=True)
    for path in (*(ROOT / name for name in ("Makefile", "pyproject.toml", "dagster.yaml")), *ROOT.glob("*.lock")):
        shutil.copy(path, folder / path.name)
        os.utime(folder / path.name, (0, 0))  # older than what is installed: nothing is installed again
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries.parent / ".ready").touch()
    for name in ("dtrain", "python"):
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (binaries / name).chmod(0o755)
    return folder


def test_make_clean_takes_the_home_and_leaves_its_neighbours(tmp_path: Path):
    repository, parent = copy_of_the_makefile(tmp_path / "repository"), tmp_path / "homes"
    alive = [parent / name / "canary" for name in BESIDE]
    for path in alive:
        path.parent.mkdir(parents=True)
        path.write_text("alive")
    environment = {key: value for key, value in os.environ.items() if key != "DAGSTER_HOME"}
    home = parent / ODD_HOME
    assert in_process(home, "setup").exit_code == 0
    (home / "storage" / "jobs").mkdir(parents=True)
    (home / "thesis.tex").write_text("mine")
    own = {"DTRAIN_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["make", "clean"], cwd=repository, env=environment | own, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert {*os.listdir(home)} - {"work.lock"} == {MARKER, "thesis.tex"}
    assert all(path.exists() for path in alive)
    assert not list(tmp_path.rglob("executed"))


def test_a_repository_whose_path_has_a_blank_is_refused_in_words(tmp_path: Path):
    repository = copy_of_the_makefile(tmp_path / "my thesis")
    (tmp_path / "my").write_text("chapter one")
    (repository / "thesis").write_text("chapter two")
    done = subprocess.run(["make", "clean"], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2
    assert "has a blank" in done.stderr
    assert (tmp_path / "my").read_text() == "chapter one"
    assert (repository / "thesis").read_text() == "chapter two"


def test_what_dtrain_did_not_write_stays(filled: Path):
    (filled / "thesis.tex").write_text("mine")
    plan = plan_removal(filled, [ROOT])
    assert plan.others == ("thesis.tex",)
    remove(plan)
    assert sorted(os.listdir(filled)) == [MARKER, "thesis.tex"]


def test_links_are_removed_and_never_followed(filled: Path, tmp_path: Path):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "one.jpg").write_text("mine")
    (filled / "cache").symlink_to(photos)
    (filled / "storage" / "datasets").symlink_to(photos)
    remove(plan_removal(filled, [ROOT]))
    assert not filled.exists()
    assert (photos / "one.jpg").read_text() == "mine"


def linked(home: Path) -> Path:
    (home.parent / "link").symlink_to(home)
    return home.parent / "link"


def unmarked(home: Path, by_a_link: bool = False) -> Path:
    (home / MARKER).rename(home.parent / "elsewhere")
    if by_a_link:
        (home / MARKER).symlink_to(home.parent / "elsewhere")
    return home


@pytest.mark.parametrize(
    "aim",
    [
        pytest.param(lambda home: Path("/"), id="at the root"),
        pytest.param(lambda home: ROOT.parent, id="above the repository"),
        pytest.param(lambda home: home / MARKER, id="a file"),
        pytest.param(unmarked, id="unmarked"),
        pytest.param(partial(unmarked, by_a_link=True), id="marked by a link"),
        pytest.param(linked, id="linked"),
    ],
)
def test_folders_that_are_no_home_are_refused(filled: Path, aim: Callable[[Path], Path]):
    with pytest.raises(HomeError):
        plan_removal(aim(filled), [ROOT, Path.home()])
    assert (filled / "mlflow.db").exists()


def test_a_marked_folder_above_something_that_must_stay_is_refused(filled: Path):
    inside = filled / "storage" / "repository"
    inside.mkdir()
    for protected in (filled, inside):
        with pytest.raises(HomeError, match="not removed"):
            plan_removal(filled, [protected])


def test_a_home_with_a_running_job_is_refused_by_its_name(filled: Path):
    lock = acquire(filled / "storage" / "jobs" / "train-1")
    assert lock is not None
    with pytest.raises(HomeError, match="train-1"):
        plan_removal(filled, [ROOT])
    os.close(lock)
    assert plan_removal(filled, [ROOT]).ours


def test_a_job_that_starts_while_clean_asks_is_kept(filled: Path, monkeypatch: pytest.MonkeyPatch):
    job, locks = filled / "storage" / "jobs" / "train-1", []

    def confirm(*_: object, **__: object) -> bool:
        locks.append(acquire(job))
        return True

    monkeypatch.setattr(click, "confirm", confirm)
    done = in_process(filled, "clean")
    os.close(locks[0])
    assert (done.exit_code, "train-1" in done.output) == (2, True)
    assert (job / "job.json").is_file()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount")
def test_what_is_mounted_inside_is_refused(filled: Path, tmp_path: Path):
    place, photos = "storage/é \\ \u4f60", tmp_path / "photos"
    photos.mkdir()
    (photos / "one.jpg").write_text("mine")
    (filled / place).mkdir()
    if subprocess.run(["mount", "--bind", photos, filled / place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(HomeError, match="is mounted"):
            plan_removal(filled, [ROOT])
    finally:
        subprocess.run(["umount", filled / place], check=True)
    assert (photos / "one.jpg").exists()


def test_a_folder_with_something_else_in_it_is_used_but_not_marked(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("mine")
    make_home(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_home_from_before_there_were_marks_is_marked_by_the_next_setup(filled: Path):
    (filled / MARKER).unlink()
    assert in_process(filled, "clean").exit_code != 0, "nobody can be asked"
    unknown = in_process(filled, "clean", "--yes")
    assert unknown.exit_code == 2
    assert "python -m dtrain_dagster setup" in unknown.output
    assert in_process(filled, "setup").exit_code == 0
    assert in_process(filled, "clean", "--yes").exit_code == 0
    assert not filled.exists()


def test_settings_of_dagster_are_written_once(filled: Path):
    target = filled / "dagster" / "dagster.yaml"
    assert in_process(filled, "setup").exit_code == 0
    assert "run_monitoring" in target.read_text()
    target.write_text("nux: 0\n")
    assert in_process(filled, "setup").exit_code == 0
    assert target.read_text() == "nux: 0\n"


def test_a_second_make_run_on_one_home_is_refused_in_words(filled: Path):
    with hold_home(filled, "`dagster asset materialize`"):
        for arguments in (("work", "touch", str(filled / "ran")), ("clean", "--yes")):
            second = in_process(filled, *arguments)
            assert second.exit_code == 2
            assert "`dagster asset materialize`" in second.output
            assert "Traceback" not in second.output
    assert not (filled / "ran").exists()


def test_the_command_holds_the_home_even_if_who_started_it_is_killed(filled: Path):
    started = subprocess.Popen(
        [sys.executable, "-m", "dtrain_dagster", "work", "sh", "-c", "echo $$; exec sleep 60"],
        env=os.environ | {"DTRAIN_HOME": str(filled)}, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout is not None
    child = int(started.stdout.readline())
    started.kill()
    started.wait()
    try:
        assert in_process(filled, "clean", "--yes").exit_code == 2
        assert (filled / "storage").exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_work_hands_no_secret_on_but_the_exit_code_of_its_command(filled: Path, tmp_path: Path):
    """Dagster would have stored the secret before anything of ours sees it."""
    secret = secret_of(random.Random(9))
    config = {"ops": {"stock_prices": {"config": {"source": CARRIERS["sas"].format(secret)}}}}
    document, ran = json.dumps(config), tmp_path / "ran"
    (tmp_path / "own.yaml").write_text(f"# https://robot:b@example.org is stored nowhere\n{document}\n")
    (tmp_path / "fine.yaml").write_text(document.replace(config["ops"]["stock_prices"]["config"]["source"], "env:NAME"))
    own, fine, every = (str(tmp_path / name) for name in ("own.yaml", "fine.yaml", "*.yaml"))
    given: list[tuple[str, ...]] = [
        ("--config-json", document), (f"--config-json={document}",), ("--config", own), (f"--config={own}",),
        ("-c", own), (f"-c{own}",), ("-c", every),
    ]  # fmt: skip
    for arguments in given:
        with pytest.raises(SecretError, match=r"ops\.stock_prices\.config\.source carries .*env:NAME") as said:
            refuse_secret_on_command_line(("dagster", *arguments))
        assert secret not in str(said.value)
    touch = ("work", "sh", "-c", f"touch {ran}; exit 7", "dagster", "--config")
    told = in_process(filled, *touch, own)
    assert (told.exit_code, ran.exists()) == (2, False)
    assert "ops.stock_prices.config.source carries" in told.output
    assert secret not in told.output
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert in_process(filled, *touch, fine, "--config-json", "{}", "--select", "a,b").exit_code == 7
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ran.exists()

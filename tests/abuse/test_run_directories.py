"""A run directory may hold anything: nodes write it, and so do broken disks and strangers. One bad job is a row.

Everything that reads run directories is in `tests.abuse.run_directory_readers`, every kind of damage in
`tests.abuse.run_directories`; here they meet.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.follow import watch_training
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.screen import Screen
from dtrain_dagster.cli.tune import candidates_table
from dtrain_dagster.cli.tune import summary as tune_summary
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.jobs.progress import choose_job, known_jobs
from dtrain_dagster.jobs.view import news
from dtrain_dagster.registry.endpoint import EndpointCheck, Finding
from dtrain_dagster.registry.endpoints import _print_check
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.job_lock import acquire
from tests.abuse.run_directories import (
    ANY,
    DAMAGED,
    ESCAPES,
    JSON,
    MARK,
    Stage,
    each_change,
    job_of,
    write_cluster_files,
)
from tests.abuse.run_directory_readers import OBEYED
from trainer.documents import schemas
from trainer.documents.reader import is_event
from trainer.elastic.generation import Candidate, Generation
from trainer.errors import DamagedError
from trainer.rundir import JOB, RESULT, STATUS, RunDir, event

ODD_HOME = "-rf 'a\"b[1]*#ü::x\\y;$HOME"
"""Most of the signs that mean something to a shell, SQL, a glob or an address."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A home, of an odd name, with a job that really ran."""
    stage = Stage(tmp_path_factory.mktemp("homes") / ODD_HOME)
    stage.train()
    stage.copy()
    stage.read()
    return stage


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., RunDir]:
    """Makes run directories as a cluster and a trainer leave them, of jobs that never ran."""

    def write(job_id: str, state: str = "succeeded", words: str = "") -> RunDir:
        rundir = RunDir(str(tmp_path / "storage" / "jobs" / job_id))
        rundir.write_job(job_of(Path(rundir.uri), tmp_path))
        write_cluster_files(rundir, state, words)
        rundir.write_json(RESULT, {"status": state, "launch": 1, "steps": 5, "error": words})
        rundir.append_events(1, 0, 1, [event("error", 0, 1, message=words or "-", fatal=False)])
        return rundir

    return write


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*ANY, *JSON])
def test_every_kind_of_damage_to_how_a_job_stands_is_a_row(stage: Stage, name: str):
    path = stage.copy() / STATUS
    (ANY | JSON)[name](path)
    stage.read()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "damages",
    [
        {"job.json": "400 MB", "events": "twice", "nodes": "huge", "membership": "pipe", "logs/node-0.log": "device"},
        {"job.json": "twice", "events": "400 MB", "nodes": "pipe", "membership": "NaN", "logs/node-0.log": "folder"},
        {"job.json": "escapes", "events": "half a character", "nodes": "device", "logs/node-0.log": "400 MB"},
    ],
    ids=str,
)
def test_the_worst_of_them_to_what_else_is_read(stage: Stage, damages: dict[str, str]):
    copy = stage.copy()
    for file, name in damages.items():
        place = copy / file
        path = sorted(path for path in place.iterdir() if path.is_file())[0] if place.is_dir() else place
        (ANY | JSON)[name](path)
    (copy / "logs" / "node-1.log").write_text(f"{ESCAPES}\n{ESCAPES}")
    stage.read()


FORMS = {
    "nodes/": schemas.PRESENCE, "membership/g000001.json": schemas.record_of(Generation),
    "membership/": schemas.record_of(Candidate),
    "manifest.json": schemas.MANIFEST,
}  # fmt: skip
"""The forms of documents that are not of one name, by a part of it."""
READ = ("*.json", "nodes/*", "membership/*.json", "membership/*/*", "checkpoints/*.json", "checkpoints/*/manifest.json",
        "model/*.json", "reports/*", "events/*")  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(6))
def test_every_reader_survives_other_values_that_forms_let_through(stage: Stage, seed: int):
    """What a form refuses is damaged and named, which others tests look at. Of what it lets through, a few changes by
    chance: in half of the files, a key less, a key more, or another type."""
    chance, copy, made = random.Random(seed), stage.copy(), []
    for path in sorted({path for pattern in READ for path in copy.glob(pattern)}):
        if chance.random() < 0.5:
            continue
        name, text = path.relative_to(copy).as_posix(), path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        number = chance.randrange(len(lines))
        changes = list(each_change(json.loads(lines[number])))
        chance.shuffle(changes)
        where, changed = next((item for item in changes if is_let_through(name, *item)), ("", None))
        if where:
            made.append(f"{name}: {where}")
            path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]))
    try:
        stage.read()
    except Exception as error:
        raise AssertionError("\n".join(made)) from error


def is_let_through(name: str, where: str, document: Any) -> bool:
    if name.startswith("events/"):
        return is_event(document)
    if name == "launch.json" and "engine" in where:
        return False  # the list of that cluster has it then
    form = schemas.DOCUMENTS.get(name) or next((form for part, form in FORMS.items() if part in name), None)
    return form is None or not form(document)


def test_a_nodes_file_with_other_keys_ends_no_list(written: Callable[..., RunDir], tmp_path: Path):
    manager, uri = LocalClusterManager(tmp_path), Settings(home=tmp_path).jobs_uri
    rundir = written(f"train-{MARK}-22222222")
    name = "nodes/l0001-n000-s001.json"
    document = json.loads(rundir.storage.read(name))
    for where, changed in each_change(document):
        rundir.storage.write(name, json.dumps(changed).encode())
        [job] = known_jobs(manager, uri, MARK)
        assert not job.damage or name in job.damage, where
        assert job.damage == "" or "has one more" not in where, "a later version may add a field"
        assert [row.state for row in JobBoard(uri, "dedicated").jobs()] in (["succeeded"], ["damaged"]), where
    for missing in ("node_id", "launch", "started_at", "ended_at", "exit_codes"):
        rundir.storage.write(name, json.dumps({key: document[key] for key in document if key != missing}).encode())
        with pytest.raises(DamagedError, match=rf"l0001-n000-s001\.json is damaged: it .*'{missing}'"):
            rundir.nodes()


@pytest.mark.timeout(120)
def test_strangers_and_links_out_of_the_folder_are_left_alone(stage: Stage):
    for folder in ("events", "nodes", "logs"):
        stage.link_folder(folder)
        stage.read()
    for name in (STATUS, RESULT):
        path = stage.copy() / name
        path.unlink()
        path.symlink_to(stage.home / "outside.json")
        stage.read()
    stage.add_strangers()
    stage.read()


def test_a_damaged_job_is_not_chosen_and_another_is_started(written: Callable[..., RunDir], tmp_path: Path):
    manager, uri = LocalClusterManager(tmp_path), Settings(home=tmp_path).jobs_uri
    own, other = f"train-{MARK}-22222222", f"train-{MARK}-11111111"
    written(own, "failed").storage.write(STATUS, b'{"state": "runn')
    written(other).storage.write(STATUS, b"")
    choice = choose_job(MARK, "22222222-aaaa", known_jobs(manager, uri, MARK))
    assert (choice.action, choice.job_id) == ("start", f"{own}-2")
    assert f"{own}/status.json is damaged: it is not JSON" in choice.reason
    assert other in choice.reason
    written(f"{own}-2", "failed")
    choice = choose_job(MARK, "22222222-aaaa", known_jobs(manager, uri, MARK))
    assert (choice.action, choice.job_id) == ("restart", f"{own}-2"), "a retry finds the one that took its place"
    shutil.rmtree(tmp_path / "storage" / "jobs" / f"{own}-2")
    for file in (JOB, PLAN, "claim.json", "owner.json", "budget.json"):
        shutil.rmtree(tmp_path / "storage" / "jobs" / own)
        written(own).storage.write(file, b"[")
        assert choose_job(MARK, "22222222-aaaa", known_jobs(manager, uri, MARK)).action == "start", file


def test_a_damaged_job_that_runs_keeps_its_cluster_and_its_mark(written: Callable[..., RunDir], tmp_path: Path):
    manager = LocalClusterManager(tmp_path)
    rundir = written("runs", "running")
    for name in ("runs", "dead"):
        manager.active.enter(name)
    manager.active.complete()
    written("dead", "running").storage.write(STATUS, b"[]")
    rundir.storage.write(STATUS, b"[]")
    lock = acquire(Path(rundir.uri))  # as its supervisor does
    assert lock is not None
    try:
        assert [(job.job_id, job.state, bool(job.damage)) for job in manager.active_jobs()] == [
            ("runs", "running", True)
        ]
        assert manager.active.marks() == ["runs"]
        assert manager.monitor_health().healthy is True
    finally:
        os.close(lock)


def test_what_a_damaged_job_has_cost_is_not_known(written: Callable[..., RunDir], tmp_path: Path):
    environment = {"DTRAIN_HOME": str(tmp_path)}
    known = CliRunner().invoke(main, ["cost", "good"], env=environment)
    assert known.exit_code, "there is no such job"
    written("good")
    known = CliRunner().invoke(main, ["cost", "good"], env=environment)
    assert (known.exit_code, "the bill" in known.output) == (0, True), known.output
    for file, data in {
        "nodes/l0001-n000-s001.json": b'{"node_id": 0, "launch": 1, "started_at": NaN, "exit_codes": []}',
        "events/g0001-r00000-000002.jsonl": b"{}\n",
    }.items():
        rundir = written("bad")
        rundir.storage.write(file, data)
        refused = CliRunner().invoke(main, ["cost", "bad"], env=environment)
        assert (refused.exit_code, "damaged" in refused.output, "$" in refused.output) == (2, True, False)
        with pytest.raises((DamagedError, ClusterError)):
            list(rundir.events(strict=True)) and rundir.nodes()
        shutil.rmtree(rundir.uri)


@pytest.mark.parametrize(
    "words",
    [
        ["jobs"], ["doctor"], ["status", "hostile"], ["logs", "hostile"], ["logs", "--follow", "hostile"],
        ["logs", "--tail", "9", "hostile"], ["status", "--follow", "hostile"], ["cost", "hostile"],
        ["status", "hostile", "--html", "a.html"], ["cancel", "hostile"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_command_passes_on_what_a_terminal_obeys(
    written: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    monkeypatch.chdir(tmp_path)
    rundir = written("hostile", "failed", ESCAPES)
    rundir.append_events(1, 0, 2, [event("phase", 0, 1, name=ESCAPES), event("hang", 0, 1, step=1, where=ESCAPES)])
    rundir.write_json(PLAN, {"tier": "dedicated", "price_words": ESCAPES})
    rundir.storage.write("logs/node-0.log", f"{ESCAPES}\nlast {ESCAPES}".encode("utf-8", "surrogatepass"))
    (tmp_path / "storage" / "jobs" / f"x{ESCAPES.replace('/', '')}").mkdir()
    (tmp_path / "storage" / "jobs" / f"x{ESCAPES.replace('/', '')}" / STATUS).write_text("{")
    done = CliRunner().invoke(main, words, env={"DTRAIN_HOME": str(tmp_path)})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert OBEYED.search(done.output) is None, repr(done.output)
    if words[0] == "logs" or "--follow" in words:
        assert "\\x1b]0;taken over\\x07" in done.output, "it is shown"


def test_on_a_terminal_only_our_own_colours_are_obeyed(written: Callable[..., RunDir], tmp_path: Path):
    rundir = written("hostile", "failed", ESCAPES)
    shown = Screen(force_terminal=True, width=200, file=io.StringIO())
    watch_training(shown, LocalClusterManager(tmp_path), rundir, "hostile")
    shown.print(f"[bold]{ESCAPES}[/bold]", style="link https://example.org")
    row = {"group": ESCAPES, "change": {ESCAPES: ESCAPES}, "verdict": ESCAPES}
    shown.print(candidates_table([row]))
    printed = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]0;" not in printed
    assert "\x1b[31mred" not in printed
    assert "\u202e" not in printed
    assert "[bold]" in printed, "markup is text"


def test_sentences_for_logs_and_messages_are_one_line(tmp_path: Path):
    (sentence,) = news([event("error", 0, 1, message=f"a\nb{ESCAPES}", fatal=False)])
    assert sentence.startswith("a\\nb\\x1b]0;")
    assert OBEYED.search(sentence) is None
    evidence = {"complete": False, "candidates": [], "baseline": {"samples_per_second": None}}
    found = {"training": {"x": ESCAPES}, "evidence": evidence | {"chosen": {"samples_per_second": None}, "gain": None}}
    assert tune_summary(found, tmp_path)


def test_a_damaged_error_names_the_file_what_is_wrong_and_the_remedy(written: Callable[..., RunDir]):
    rundir = written("bad")
    rundir.storage.write(STATUS, json.dumps({"state": "asleep", "message": ESCAPES}).encode())
    with pytest.raises(
        DamagedError, match=r"/bad/status\.json is damaged: .*'state' is not one of .*; restore it"
    ) as told:
        rundir.read_json(STATUS)
    assert isinstance(told.value, ValueError)
    (Path(rundir.uri) / STATUS).unlink()
    (Path(rundir.uri) / STATUS).symlink_to(Path(rundir.uri) / f"{DAMAGED}\x1b[2J")
    with pytest.raises(DamagedError, match="a symbolic link is in its place"):
        rundir.read_json(STATUS)


def test_what_an_endpoint_says_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]):
    _print_check(
        EndpointCheck(url="http://x", findings=(Finding(name="answers", passed=True, message=f"it says {ESCAPES}"),))
    )
    said = capsys.readouterr().out
    assert "it says" in said
    assert OBEYED.search(said) is None, repr(said)

"""What the jobs of a home have spent and may still spend: from run directories and promises."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.costs.ceilings import CeilingError, Spending, month_of, write_ceiling
from dtrain_dagster.costs.money import usd
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.spending import SpendingBook, Wanted, jobs_noted_since, note_attached, note_start, open_book
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, LIMIT, STATUS, RunDir
from trainer.storage.base import Storage

SKU = "Standard_NC6s_v3"
HOURLY = price_of(SKU).usd_per_hour("dedicated")
NOW = 1_795_000_000.0
"""A moment in the middle of a month."""
Job = Callable[..., RunDir]


@pytest.fixture
def book(tmp_path: Path) -> SpendingBook:
    write_ceiling(tmp_path, Decimal(100))
    return SpendingBook(tmp_path, f"{tmp_path}/storage/jobs")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    def make(
        name: str, began: float, seconds: float | None, nodes: int = 1, state: str = "running", **more: Any
    ) -> RunDir:
        """A job of an engine; ``seconds``: None where its nodes are there still."""
        rundir = RunDir(f"{tmp_path}/storage/jobs/{name}")
        launch = {"job_id": name, "launch": 1, "node_count": nodes, "engine": "slurm", "sku": SKU, **more}
        rundir.write_json(LAUNCH, launch)
        ended = None if seconds is None else began + seconds
        for node in range(nodes):
            seen = NOW if ended is None else ended
            rundir.write_node(
                NodePresence(node_id=node, launch=1, incarnation=1, started_at=began, last_seen_at=seen, ended_at=ended)
            )
        rundir.write_json(STATUS, {"state": state, "message": "", "started_at": began, "ended_at": ended, "pid": 1})
        return rundir

    return make


def look(book: SpendingBook, wanted: Wanted | None = None) -> dict[str, Spending]:
    stand = book.judge(wanted, NOW)
    return {item.name: item for item in stand.spending} if stand else {}


def test_what_was_paid_counts_in_the_month_in_which_it_was(book: SpendingBook, job: Job):
    _, first = month_of(NOW)
    job("over", first - 7200.0, 3 * 3600.0, nodes=2, state="succeeded")
    note_start(book.home, "over")
    found = look(book)["over"]
    assert usd(found.month_units) == pytest.approx(2 * HOURLY), "of three hours on two nodes one was in this month"
    assert found.promised_units == 0


def test_a_job_that_has_ended_is_read_once_and_again_when_it_is_continued(book: SpendingBook, job: Job):
    rundir = job("over", NOW - 7200.0, 3600.0, state="failed")
    note_start(book.home, "over")
    before = look(book)["over"]
    rundir.storage.delete(LAUNCH)
    assert look(book)["over"] == before, "nothing of it is read again"
    assert jobs_noted_since(book.home, 0.0) == ["over"], "who has begun it is still told of it"
    assert jobs_noted_since(book.home, time.time() + 60) == []
    job("over", NOW - 7200.0, 7000.0, state="failed")
    note_start(book.home, "over")
    assert usd(look(book)["over"].month_units) == pytest.approx(HOURLY * 7000 / 3600)


def test_a_job_that_is_continued_is_read_again_though_its_launch_fails(book: SpendingBook, job: Job):
    job("over", NOW - 7200.0, 3600.0, state="succeeded")
    before = look(book)

    def begin() -> None:
        with book.promised(Wanted(name="over", usd=HOURLY + 1)):
            assert usd(look(book)["over"].promised_units) == pytest.approx(1), "it is begun"
            raise RuntimeError("no nodes for its next launch")

    with pytest.raises(RuntimeError):
        begin()
    assert look(book)["over"].promised_units == 0
    assert look(book)["over"].month_units == before["over"].month_units


def test_a_running_job_counts_with_what_is_left_of_its_estimate(book: SpendingBook, job: Job):
    with book.promised(Wanted(name="runs", usd=10.0, usd_per_hour=2 * HOURLY)):
        job("runs", NOW - 1800.0, None, nodes=2)
    found = look(book)["runs"]
    assert usd(found.month_units) == pytest.approx(HOURLY)
    assert usd(found.promised_units) == pytest.approx(10 - HOURLY)


def test_a_hard_budget_counts_before_an_estimate_and_an_hour_where_there_is_neither(book: SpendingBook, job: Job):
    rundir = job("runs", NOW - 1800.0, None, nodes=2)
    assert usd(look(book)["runs"].promised_units) == pytest.approx(2 * HOURLY), "an hour of its nodes"
    rundir.write_json(LIMIT, {"max_node_seconds": 3600.0 + 360.0})
    assert usd(look(book)["runs"].promised_units) == pytest.approx(HOURLY / 10)


def test_the_promise_of_a_start_that_fails_is_taken_back(book: SpendingBook):
    seen = []

    def start() -> None:
        with book.promised(Wanted(name="new", usd=10.0, usd_per_hour=1.0)):
            seen.append(usd(look(book)["new"].promised_units))
            raise RuntimeError("no nodes")

    with pytest.raises(RuntimeError):
        start()
    assert seen == [10.0]
    assert "new" not in look(book)


def test_a_promise_of_a_process_that_is_gone_counts_no_more(book: SpendingBook):
    with book.promised(Wanted(name="new", usd=10.0, usd_per_hour=1.0)), open_book(book.home) as promises:
        held = promises["new"]
        assert held.is_held
        promises["new"] = replace(held, holder=1.0)
    assert look(book)["new"].promised_units == 0


def test_a_fleet_covers_its_jobs(book: SpendingBook, job: Job):
    fleet = Wanted(name="night", usd=50.0, usd_per_hour=3 * HOURLY, is_group=True)
    with book.promised(fleet):
        job("night-a", NOW - 3600.0, None)
        note_start(book.home, "night-a", part_of="night")
        note_attached(book.home, "night-a")
        found = look(book)
        assert usd(found["all of night"].promised_units) == pytest.approx(50 - HOURLY)
        assert usd(found["night-a"].month_units) == pytest.approx(HOURLY)
        assert found["night-a"].promised_units == 0
    assert look(book)["all of night"].promised_units, "its job goes on without it"
    job("night-a", NOW - 3600.0, 3600.0, state="succeeded")
    assert look(book)["all of night"].promised_units == 0


def test_what_a_job_and_a_fleet_have_cost_before_is_not_promised_again(book: SpendingBook, job: Job):
    job("over", NOW - 7200.0, 3600.0, state="failed")
    note_start(book.home, "over", part_of="night")
    for is_group, name in ((False, "over"), (True, "night")):
        wanted = Wanted(name, usd=10.0, usd_per_hour=1.0, is_group=is_group)
        stand = book.judge(wanted, NOW)
        assert stand
        assert usd(stand.wanted) == pytest.approx(10 - HOURLY)


def test_a_job_without_a_known_price_is_named_and_one_that_cannot_be_read_refuses(book: SpendingBook, job: Job):
    job("odd", NOW - 3600.0, None, sku="Standard_ND99_v9")
    assert "Standard_ND99_v9" in look(book)["odd"].unknown
    rundir = job("torn", NOW - 3600.0, None)
    rundir.storage.write(LAUNCH, b"{")
    with pytest.raises(CeilingError, match=r"what job torn has cost cannot be read.*lift the ceiling: dtrain cost"):
        look(book)
    write_ceiling(book.home, None)
    assert look(book) == {}, "without ceilings nothing is read"


def test_a_file_beside_the_jobs_is_no_job_and_a_folder_that_cannot_be_listed_refuses(
    book: SpendingBook, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job("over", NOW - 7200.0, 3600.0, state="succeeded")
    (tmp_path / "storage" / "jobs" / "notes.txt").write_text("of a person")
    assert usd(look(book)["over"].month_units) == pytest.approx(HOURLY)
    monkeypatch.setattr(Storage, "list", broken)
    with pytest.raises(CeilingError, match="cannot be listed"):
        book.judge(None, NOW)


def broken(self: Storage, folder: str = "") -> list[str]:
    """A storage that fails for the jobs, and works for promises."""
    if self.uri.endswith("/jobs"):
        raise OSError("stale file handle")
    return sorted(self.names(folder))


@pytest.mark.parametrize("text", ["{", '{"torn": {"units": -1}}', "[]"])
def test_a_book_that_cannot_be_read_refuses_and_is_named(book: SpendingBook, text: str):
    note_start(book.home, "a")
    (book.home / "spending" / "book.json").write_text(text)
    for ask in (lambda: look(book), lambda: note_start(book.home, "b")):
        with pytest.raises(CeilingError, match=r"book\.json: .*, so nothing is started; remove the file"):
            ask()
    note_attached(book.home, "a")  # it starts nothing
    assert jobs_noted_since(book.home, 0.0) == [], "who was interrupted is told what is known"


def test_without_ceilings_a_book_that_cannot_be_read_is_set_aside_and_stops_nobody(
    book: SpendingBook, caplog: pytest.LogCaptureFixture
):
    write_ceiling(book.home, None)
    folder = book.home / "spending"
    folder.mkdir()
    (folder / "book.json").write_text("{")
    with book.promised(Wanted(name="a", usd=1.0, usd_per_hour=1.0)):
        assert (folder / "book.damaged.json").read_text() == "{"
        assert jobs_noted_since(book.home, 0.0) == ["a"], "another is begun"
    (folder / "book.json").write_text("[]")
    note_start(book.home, "b")
    assert (folder / "book.damaged.json").read_text() == "[]"
    assert caplog.text.count("set aside as book.damaged.json") == 2


def _try_to_start(home: Path, name: str, barrier: Any, answers: Any) -> None:
    book = SpendingBook(home, f"{home}/storage/jobs")
    barrier.wait()
    try:
        with book.promised(Wanted(name=name, usd=60.0, usd_per_hour=1.0)):
            answers.put((name, "started"))
            barrier.wait()
    except CeilingError as error:
        answers.put((name, str(error)))
        barrier.wait()


def test_of_two_starts_at_the_same_moment_only_one_fits(book: SpendingBook):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_try_to_start, args=(book.home, name, barrier, answers)) for name in ("one", "two")
    ]
    for process in processes:
        process.start()
    said = dict(answers.get(timeout=30) for _ in processes)
    for process in processes:
        process.join(30)
    assert sorted(text == "started" for text in said.values()) == [False, True]
    [refused] = [text for text in said.values() if text != "started"]
    assert "$60.00 promised to running jobs, and this start adds $60.00" in refused


def test_files_are_this_users_alone(book: SpendingBook):
    note_start(book.home, "a")
    assert os.stat(book.home / "spending").st_mode & 0o077 == 0

from __future__ import annotations

import tracemalloc
import uuid
from pathlib import Path

import pytest

from trainer import rundir as layout
from trainer.config import DatasetRef, JobConfig
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir, SeenFiles, event, event_file, flush_seconds


@pytest.fixture(params=["local", "memory"])
def rundir(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    return RunDir(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_a_job_is_read_as_it_was_written(rundir: RunDir) -> None:
    job = JobConfig(job_id="j", run_dir=rundir.uri, dataset=DatasetRef(uri="/data"))
    rundir.write_job(job)
    assert rundir.read_job() == job


def test_events_come_in_order_of_time_and_each_once(rundir: RunDir) -> None:
    later, sooner = event("step", 1, 1, step=2), event("step", 0, 1, step=1)
    sooner["time"] = later["time"] - 1
    rundir.append_events(1, 1, 1, [later])
    rundir.append_events(1, 0, 1, [sooner])
    seen = SeenFiles()
    assert rundir.follow(seen) == [sooner, later]
    assert rundir.follow(seen) == []
    rundir.append_events(2, 0, 1, [event("end", 0, 2, status="succeeded")])
    assert [item["kind"] for item in rundir.follow(seen)] == ["end"]
    assert [item["step"] for item in rundir.events("step")] == [1, 2]


def test_files_that_were_read_are_known_in_whatever_order_they_came() -> None:
    names = [event_file(1, rank, number) for rank in (0, 1) for number in range(1, 20)]
    seen, late = SeenFiles(), names.pop(5)
    assert seen.others([*names, "notes.txt"]) == names
    for name in reversed(names):
        seen.add([name])
    assert seen.others([late, *names, event_file(2, 0, 1)]) == [late, event_file(2, 0, 1)]
    seen.add([late])
    assert seen.others([late, *names]) == []


def test_a_live_reader_of_remote_storage_asks_for_the_next_file_and_lists_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rundir, lists, now = RunDir(f"memory://{uuid.uuid4().hex}"), list[str](), [0.0]
    names = rundir.storage.names
    rundir.storage.names = lambda folder="": (lists.append(folder), names(folder))[1]  # type: ignore[method-assign]
    monkeypatch.setattr(layout.time, "monotonic", lambda: now[0])
    seen = SeenFiles()

    def look(is_live: bool = True) -> list[int]:
        return [item["step"] for item in rundir.follow(seen, is_live)]

    rundir.append_events(1, 0, 1, [event("step", 0, 1, step=1)])
    assert look() == [1]
    for number in (2, 3):
        rundir.append_events(1, 0, number, [event("step", 0, 1, step=number)])
    rundir.append_events(1, 1, 1, [event("step", 1, 1, step=9)])
    assert (look(), len(lists)) == ([2, 3], 1)
    rundir.append_events(2, 0, 1, [event("step", 0, 2, step=4)])
    assert (look(), look(), len(lists)) == ([4], [], 1), "of a new generation, too"
    now[0] += layout.LIST_SECONDS + 1
    assert (look(), len(lists)) == ([9], 2), "what other ranks say comes now and then"
    rundir.append_events(1, 1, 2, [event("step", 1, 1, step=10)])
    assert (look(), look(is_live=False), len(lists)) == ([], [10], 3), "and all of it at the end"


@pytest.mark.parametrize(
    ("rank", "is_local", "before", "most"),
    [(0, True, 43_200, 3_300), (0, False, 17_280, 1_400), (1, False, 17_280, 800)],
)
def test_a_day_of_reports_is_hundreds_of_files(rank: int, is_local: bool, before: int, most: int) -> None:
    """``before``: a file for each sample of a node, two seconds apart, or for each five seconds on remote storage."""
    age, files, least = 0.0, 0, 1.0 if is_local else 5.0
    while age < 86_400:
        age += max(least, flush_seconds(age, rank, is_local))
        files += 1
    assert files < most < before / 10
    assert flush_seconds(300.0, rank, is_local) <= 3.0, "early, what happens is seen at once"


def test_to_know_what_was_read_takes_no_memory_that_grows() -> None:
    seen = SeenFiles()
    tracemalloc.start()
    seen.add(event_file(1, 0, number) for number in range(1, 5001))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 50_000, "5000 names take ten times as much"
    assert seen.others([event_file(1, 0, 5000), event_file(1, 0, 5001)]) == [event_file(1, 0, 5001)]


def test_a_damaged_line_takes_no_other_away(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    events = [event("step", 0, 1, step=number) for number in range(3)]
    for number, told in enumerate(events):
        rundir.append_events(1, 0, number, [told])
    for number, damage in enumerate(
        (b'{"kind": "step", "ti', b"[]", b'{"kind": "step"}', b'\xff{"kind": 3, "time": 1}')
    ):
        rundir.storage.write(f"events/g0001-r00001-{number:06d}.jsonl", damage)
    rundir.storage.write("events/g0001-r00001-000009.jsonl", b"")
    seen = SeenFiles()
    assert rundir.follow(seen) == events
    assert rundir.follow(seen) == []
    assert [record.getMessage().split(": ")[1][:7] for record in caplog.records] == ["4 line("]
    rundir.storage.write("events/g0001-r00000-000003.jsonl", b"{")
    assert rundir.last_step_reported() == 2


def test_a_number_is_used_once(rundir: RunDir) -> None:
    rundir.append_events(1, 0, 1, [event("step", 0, 1, step=1)])
    with pytest.raises(FileExistsError):
        rundir.append_events(1, 0, 1, [event("end", 0, 1)])
    assert [item["kind"] for item in rundir.events()] == ["step"]


def test_the_last_generation_is_that_of_the_events(rundir: RunDir) -> None:
    assert rundir.last_generation() == 0
    for generation in (1, 12, 3):
        rundir.append_events(generation, 0, 1, [event("end", 0, generation)])
    assert rundir.last_generation() == 12


def test_what_is_not_there_is_none_and_a_nan_is_refused(rundir: RunDir) -> None:
    assert rundir.read_json("result.json") is None
    with pytest.raises(ValueError, match="JSON compliant"):
        rundir.write_json("result.json", {"loss": float("nan")})
    assert rundir.read_json("result.json") is None


def test_the_latest_checkpoint_is_what_its_pointer_says(rundir: RunDir) -> None:
    name = "checkpoints/LATEST.json"
    assert rundir.latest_checkpoint() is None
    rundir.write_json(name, {"path": None, "step": None, "generation": 2})  # nothing but a fence yet
    assert rundir.latest_checkpoint() is None
    rundir.write_json(name, {"path": "checkpoints/g2-s40", "step": 40, "generation": 2})
    assert rundir.latest_checkpoint() == ("checkpoints/g2-s40", 40)
    for damage in (b"{", b"[]", b"[1]", b'{"path": "x"}'):
        rundir.storage.write(name, damage)
        assert rundir.latest_checkpoint() is None


def test_presences_of_nodes_come_back_with_their_seconds(rundir: RunDir) -> None:
    here = NodePresence(node_id=0, launch=1, started_at=100.0)
    gone = NodePresence(node_id=1, launch=1, started_at=100.0, ended_at=130.0, exit_codes=(0, -9))
    rundir.write_node(here)
    rundir.write_node(gone)
    assert rundir.nodes() == [here, gone]
    old = {"node_id": 2, "generation": 1, "started_at": 5.0, "ended_at": 6.0, "last_seen_at": 6.0, "exit_codes": [0]}
    rundir.write_json("nodes/g0001-n002.json", old)  # as it was written before nodes could be replaced
    assert (rundir.nodes()[0].launch, rundir.nodes()[0].incarnation, rundir.nodes()[0].seconds(9.0)) == (1, 1, 1.0)
    assert (here.seconds(now=150.0), gone.seconds(now=150.0)) == (50.0, 30.0)


def test_a_look_at_a_long_job_takes_no_more_memory_than_at_a_short_one(tmp_path: Path) -> None:
    """Rank 0 and everything that follows a job look every few seconds, and each rank writes a file a second."""
    peaks = []
    for count in (500, 5000):
        rundir = RunDir(str(tmp_path / str(count)))
        folder = rundir.storage.local_path("events")
        folder.mkdir(parents=True)
        for number in range(1, count + 1):
            (folder / event_file(1, 0, number)).touch()
        seen = SeenFiles()
        assert list(rundir.looks(seen)) == [[]]
        tracemalloc.start()
        try:
            assert rundir.follow(seen) == []
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 4096, peaks

"""Logs as a job's page shows them: the end first, what is new since, what contains a text; secrets and control
characters never."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain_dagster.dashboard import log_pages
from dtrain_dagster.dashboard.log_pages import (
    MOST_CHARACTERS,
    MOST_LINES,
    ClusterLogs,
    LogFiles,
    in_order_of_time,
    parse_cursor,
    write_cursor,
)
from trainer.errors import DamagedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job" / "logs"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def logs(folder: Path) -> LogFiles:
    return LogFiles(lambda job_id: folder)


def texts(page: log_pages.LogPage) -> list[str]:
    return [line for _, line in page.lines]


def test_a_reader_gets_the_end_and_then_what_is_new(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("".join(f"line {number}\n" for number in range(MOST_LINES + 5)))
    first = logs.page("job", None, "")
    assert (texts(first)[0], texts(first)[-1], first.is_cut) == ("line 5", f"line {MOST_LINES + 4}", True)
    with open(folder / "node-0.log", "a") as file:
        file.write("new\nhalf a li")
    second = logs.page("job", None, first.cursor)
    assert texts(second) == ["new"], "a line that is not finished is not shown"
    with open(folder / "node-0.log", "a") as file:
        file.write("ne\n")
    assert texts(logs.page("job", None, second.cursor)) == ["half a line"]


def test_a_log_that_was_written_anew_is_read_anew(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("a long line of an earlier launch\n")
    cursor = logs.page("job", None, "").cursor
    (folder / "node-0.log").write_text("short\n")
    assert texts(logs.page("job", None, cursor)) == ["short"]


def test_a_node_that_comes_later_is_shown_from_its_beginning(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("a\n")
    cursor = logs.page("job", None, "").cursor
    (folder / "node-1.log").write_text("b\n")
    later = logs.page("job", None, cursor)
    assert (later.lines, later.nodes) == (((1, "b"),), (0, 1))


def test_a_line_stays_a_line_of_bounded_length(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_bytes(b"\x1b[2J\xe2\x80\xae<script>alert(1)</script>\xff\n" + b"x" * 100_000 + b"\n")
    first, second = texts(logs.page("job", None, ""))
    assert first.startswith("\\x1b[2J\\u202e<script>")
    assert len(second) <= MOST_CHARACTERS + 1


def test_a_log_that_leads_elsewhere_is_not_read(folder: Path, logs: LogFiles, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("of somebody else\n")
    os.symlink(tmp_path / "private", folder / "node-0.log")
    with pytest.raises(DamagedError):
        logs.page("job", None, "")


def test_lines_of_several_nodes_are_in_order_of_time() -> None:
    lines = [
        (0, "--- launch 1, 2026-01-01 10:00:00 ---"),
        (0, "2026-01-01 10:00:02,500 a"),
        (0, "  its traceback"),
        (1, "2026/01/01 10:00:01 b"),
        (1, "2026-01-01 10:00:02,600 c"),
    ]
    assert [line.strip()[-1] for _, line in in_order_of_time(lines)] == ["-", "b", "a", "k", "c"]


@pytest.mark.parametrize("text", ["", "x", "1:2:3", "0:-1", "0:99999999999999999999", "9" * 200_000])
def test_a_cursor_of_a_stranger_means_nothing_bad(text: str) -> None:
    assert all(offset < 10**15 for offset in parse_cursor(text).values())
    assert parse_cursor(write_cursor({0: 5, 12: 0})) == {0: 5, 12: 0}


def test_a_cluster_is_asked_once_for_all_browsers() -> None:
    asked = []

    def ask(job_id: str) -> str:
        asked.append(job_id)
        return "=== node-0.log ===\none\n=== node-3.log ===\ntwo\nbearer abcdefghijkl\n"

    logs = ClusterLogs(ask)
    for _ in range(3):
        page = logs.page("job", None, "")
    assert page.lines == ((0, "one"), (3, "two"), (3, "bearer [secret]"))
    assert (page.nodes, page.cursor, asked) == ((0, 3), "", ["job"])
    assert logs.page("job", 0, "").lines == ((0, "one"),)


def test_who_follows_is_told_that_lines_were_left_out(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("first\n")
    cursor = logs.page("job", None, "").cursor
    with open(folder / "node-0.log", "a") as file:
        file.writelines(f"line {number}\n" for number in range(MOST_LINES + 1))
    page = logs.page("job", None, cursor)
    assert (len(page.lines), texts(page)[0], page.is_cut) == (MOST_LINES, "line 1", True)
    assert not logs.page("job", None, page.cursor).is_cut


def test_no_secret_is_shown(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("password=PLANTEDPLANTED and AccountKey=PLANTED2PLANTED2==;x\n")
    (line,) = texts(logs.page("job", None, ""))
    assert "PLANTED" not in line
    assert line.startswith("password=[secret]")

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


def test_a_reader_gets_the_last_lines_of_every_node(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("".join(f"line {number}\n" for number in range(MOST_LINES + 5)))
    page = logs.page("job", None)
    assert (texts(page)[0], texts(page)[-1], page.is_cut) == ("line 5", f"line {MOST_LINES + 4}", True)
    (folder / "node-0.log").write_text("short\nhalf a li")
    (folder / "node-1.log").write_text("b\n")
    page = logs.page("job", None)
    assert (page.lines, page.nodes, page.is_cut) == (((0, "short"), (1, "b")), (0, 1), False)
    assert logs.page("job", 1).lines == ((1, "b"),)


def test_a_line_stays_a_line_of_bounded_length(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_bytes(b"\x1b[2J\xe2\x80\xae<script>alert(1)</script>\xff\n" + b"x" * 100_000 + b"\n")
    first, second = texts(logs.page("job", None))
    assert first.startswith("\\x1b[2J\\u202e<script>")
    assert len(second) <= MOST_CHARACTERS + 1


def test_a_log_that_leads_elsewhere_is_not_read(folder: Path, logs: LogFiles, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("of somebody else\n")
    os.symlink(tmp_path / "private", folder / "node-0.log")
    with pytest.raises(DamagedError):
        logs.page("job", None)


def test_lines_of_several_nodes_are_in_order_of_time() -> None:
    lines = [
        (0, "--- launch 1, 2026-01-01 10:00:00 ---"),
        (0, "2026-01-01 10:00:02,500 a"),
        (0, "  its traceback"),
        (1, "2026/01/01 10:00:01 b"),
        (1, "2026-01-01 10:00:02,600 c"),
    ]
    assert [line.strip()[-1] for _, line in in_order_of_time(lines)] == ["-", "b", "a", "k", "c"]


def test_a_cluster_is_asked_once_for_all_browsers() -> None:
    asked = []

    def ask(job_id: str) -> str:
        asked.append(job_id)
        return "=== node-0.log ===\none\n=== node-3.log ===\ntwo\nbearer abcdefghijkl\n"

    logs = ClusterLogs(ask)
    for _ in range(3):
        page = logs.page("job", None)
    assert page.lines == ((0, "one"), (3, "two"), (3, "bearer [secret]"))
    assert (page.nodes, asked) == ((0, 3), ["job"])
    assert logs.page("job", 0).lines == ((0, "one"),)


def test_no_secret_is_shown(folder: Path, logs: LogFiles) -> None:
    (folder / "node-0.log").write_text("password=PLANTEDPLANTED and AccountKey=PLANTED2PLANTED2==;x\n")
    (line,) = texts(logs.page("job", None))
    assert "PLANTED" not in line
    assert line.startswith("password=[secret]")

"""At 80 columns nothing that matters is cut off: names, states and dollars are whole, and what is left out is named."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text
from told_home import JOBS, LONG, write_home

from dtrain_dagster.cli.cost import _print_table
from dtrain_dagster.cli.follow import fleet_table, headline
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.screen import Screen, fitted_table, print_fitted
from dtrain_dagster.costs.prices import price_table
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.view import FleetWatch

TITLES = ("NAME", "COST", "STEP", "NODES")
ROWS = [["a-name", "$0.1", "100", "3"], ["another", "$12.3", "7", "12"]]


def shown(width: int, titles: Sequence[str] = TITLES, rows: Sequence[Sequence[str | Text]] = ROWS) -> str:
    console = Console(width=width, file=io.StringIO())
    print_fitted(console, titles, rows, right=("NODES", "STEP"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_last_column_goes_first_and_is_named():
    assert "leave out" not in shown(27)
    assert fitted_table(TITLES, ROWS, 25)[1] == ["NODES"]
    assert fitted_table(TITLES, ROWS, 16)[1] == ["STEP", "NODES"]
    assert "16 columns leave out STEP, NODES" in " ".join(shown(16).split())
    assert fitted_table(("A", "B", "LOW\nPRIORITY"), [["x" * 9, "", "1"]], 14)[1] == ["LOW PRIORITY"]


def test_a_column_that_always_stays_goes_over_several_lines():
    said = shown(20, ("JOB", "COST"), [["x" * 50, "$1.00"]])
    assert said.count("x") == 50
    assert "$1.00" in said
    assert max(map(len, said.splitlines())) <= 20
    assert "a\\x1b[2Jb" in shown(60, ("JOB", "COST"), [["a\x1b[2Jb", "$1.00"]]), "and is measured as it is shown"


def in_terminal(home: Path, *words: str, columns: int = 80) -> str:
    """Return what a command writes to a terminal of that width."""
    screen = Screen(width=columns, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtrain_dagster.cli.jobs.console", lambda: screen)
        done = CliRunner().invoke(main, words, env={"DTRAIN_HOME": str(home)})
    assert done.exit_code == 0, done.output
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_of_80_columns_shows_whole_names_states_and_dollars(tmp_path: Path):
    write_home(tmp_path)
    said = in_terminal(tmp_path, "jobs")
    assert "…" not in said
    assert max(len(line) for line in said.splitlines()) <= 80
    for name, state in JOBS.items():
        assert re.search(rf"^{re.escape(name)} +{state} .*\$9\.\d\d", said, re.MULTILINE), said
    assert "80 columns leave out " in said
    wide = in_terminal(tmp_path, "jobs", columns=120)
    assert "leave out" not in wide
    assert "STEP" in wide
    status = in_terminal(tmp_path, "status", LONG)
    assert re.search(r"^failed · step 774/10000 · epoch 1 · loss 2\.\d{4}; it has no", status, re.MULTILINE), status


def test_prices_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    console = Console(width=80)
    monkeypatch.setattr("dtrain_dagster.cli.cost.console", lambda: console)
    rows = list(price_table("eastus").values())
    _print_table(rows)
    said = capsys.readouterr().out
    assert "…" not in said
    for row in rows:
        [line] = [line for line in said.splitlines() if line.startswith(f"{row.sku} ")]
        for figure in row.figures.values():
            assert f"{figure.usd_per_hour:.4g} [" in line


def test_a_fleet_is_whole_at_80_columns(tmp_path: Path):
    write_home(tmp_path / "home")
    view = FleetWatch(FleetRecords(tmp_path / "home", "weekend")).view()
    console = Console(width=80, file=io.StringIO())
    console.print(fleet_table(view, console.width), highlight=False)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    for job in view.jobs:
        assert re.search(rf"^{job.job_id} +waiting", said, re.MULTILINE), said
    assert headline(view).startswith("fleet weekend: 0 of 2 jobs over")

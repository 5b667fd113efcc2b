"""Figures for people."""

from __future__ import annotations

import subprocess
import sys

from dtrain_dagster.support.formatting import dollars, format_duration


def test_figures_have_as_many_digits_as_tell_something():
    amounts = (0.0, 0.00421, 1.234, -0.5, 1234.4)
    assert [dollars(usd) for usd in amounts] == ["$0.00", "$0.0042", "$1.23", "$-0.5000", "$1,234"]
    assert [format_duration(seconds) for seconds in (42, 185, 7800)] == ["42 s", "3 min 05 s", "2 h 10 min"]


def test_the_dashboard_runs_where_dagster_is_not_loaded():
    code = "import sys, dtrain_dagster.dashboard.server; sys.exit('dagster' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What `tests/outcome.py` makes of a run: failures, what fails beside others only, teardowns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BESIDE_OTHERS = """
import os
import pytest

ALONE = "PYTEST_XDIST_WORKER" not in os.environ

def test_good(): pass
def test_beside_others(): assert ALONE, "failed beside others"
@pytest.mark.skip(reason="no such thing here")
def test_skipped(): pass
"""
BROKEN = BESIDE_OTHERS + "def test_broken(): assert 1 == 2\n"
TEARDOWN = """
import os
import pytest

@pytest.fixture(scope="module")
def shared():
    seen = []
    yield seen
    assert not seen or "PYTEST_XDIST_WORKER" not in os.environ and {forgiven}

def test_spoils(shared): shared.append(1)
def test_ends_it(shared): pass
"""


COSTLY = """
import os
import subprocess
import sys
import time
import pytest

SPIN = "import time\\nwhile time.process_time() < 0.3: pass"

def spin(): subprocess.run([sys.executable, "-c", SPIN], check=True)
def test_cheap(): pass
def test_costly(): spin()
def test_costly_beside_others():
    if "PYTEST_XDIST_WORKER" in os.environ:
        spin()
@pytest.mark.slow
def test_slow(): spin()
"""


def run(folder: Path, source: str, *options: str, conftest: str = "") -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was printed, and the JSON file of a run of these tests by a worker of xdist."""
    (folder / "test_these.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.outcome"]\n' + conftest)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "--results", "results.json", *options]
    root = Path(__file__).parents[1]
    # Every other plugin that happens to be installed would be imported by three processes a run.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, json.loads((folder / "results.json").read_text())


def test_what_passes_alone_is_flaky_and_told(tmp_path: Path) -> None:
    status, said, results = run(tmp_path, BESIDE_OTHERS, "--repeat-alone")
    assert status == 1  # flaky is red
    assert {kind: results[kind] for kind in ("passed", "skipped", "flaky", "failed", "error")} == {
        "passed": 1, "skipped": 1, "flaky": 1, "failed": 0, "error": 0,
    }  # fmt: skip
    assert "FLAKY test_these.py::test_beside_others" in said
    assert "AssertionError: failed beside others" in said
    assert "1 flaky" in said.splitlines()[-1]
    [(test, [told])] = results["flaky_tests"].items()
    assert (test, "failed beside others" in told) == ("test_these.py::test_beside_others", True)
    assert results["tests"]["test_these.py::test_good"][0] == "passed"
    assert list(results["slowest_files"]) == ["test_these.py"]
    assert results["skipped_for"] == {"no such thing here": 1}
    assert "skipped 1: no such thing here" in said


@pytest.mark.long
def test_without_the_option_nothing_is_repeated(tmp_path: Path) -> None:
    status, _, results = run(tmp_path, BESIDE_OTHERS)
    assert (status, results["failed"], results["flaky"]) == (1, 1, 0)


def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    status, said, results = run(tmp_path, BROKEN, "--repeat-alone")
    assert (status, results["failed"], results["flaky"]) == (1, 1, 1)
    assert "FAILED test_these.py::test_broken" in said
    assert "FAILED test_these.py::test_beside_others" not in said.rpartition("short test summary")[2]


@pytest.mark.long
def test_a_teardown_is_repeated_with_its_whole_file(tmp_path: Path) -> None:
    """The last test of a file alone would never fail in what another one has done to their fixture."""
    status, _, results = run(tmp_path, TEARDOWN.format(forgiven=False), "--repeat-alone", "--dist", "loadfile")
    assert (status, results["error"], results["flaky"]) == (1, 1, 0)
    status, _, results = run(tmp_path, TEARDOWN.format(forgiven=True), "--repeat-alone", "--dist", "loadfile")
    assert (status, results["error"], results["flaky"]) == (1, 0, 1)


@pytest.mark.long
def test_a_quarantined_test_may_be_flaky(tmp_path: Path) -> None:
    test = "test_these.py::test_beside_others"
    quarantine = f'import tests.outcome\ntests.outcome.QUARANTINED["{test}"] = ("shares a port", "2026-11-28")\n'
    status, said, _ = run(tmp_path, BESIDE_OTHERS, "--repeat-alone", conftest=quarantine)
    assert status == 0
    assert f"FLAKY {test} (shares a port, since 2026-11-28)" in said


def test_an_unmarked_test_that_costs_too_much_fails_the_run(tmp_path: Path) -> None:
    status, said, results = run(tmp_path, COSTLY, "--cpu-budget", "0.06", "--repeat-alone")
    assert (status, results["passed"]) == (1, 4)
    assert list(results["over_budget"]) == ["test_these.py::test_costly"]
    assert "OVER BUDGET test_these.py::test_costly" in said

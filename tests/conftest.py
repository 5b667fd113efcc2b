"""For all tests: no time limits inside them (machines are shared and noisy), and no settings from outside."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Test files, and the libraries that pytest rewrites as it does them, are kept with their assertions rewritten for the
# next process that needs them: that takes longer than to import them. Only what tests start obeys an image that forbids
# bytecode.
forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
from hypothesis import settings  # noqa: E402

sys.dont_write_bytecode = forbidden

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.outcome and harness, whoever starts pytest
pytest_plugins = ["tests.outcome"]

# A shell that starts pytest in the background has it ignore Ctrl-C, and so would every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests share a machine's cores, as workers and as worlds of processes: threads of torch that wait for each other would
# spin away most of them. Set before anything imports it, and inherited by all that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same few examples each time: a test of a change fails by the change. `make test-all` looks for new ones.
settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True, database=None)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("quick")

BROWSER = (
    "tests/e2e/test_whole_graph.py",
    "tests/e2e/test_dagster.py",
    "tests/e2e/test_pages.py",
)
"""They start Chromium, or share the `dtrain ui` of one that does. One worker takes them all: two that render at once
would wait for each other's cores."""
AZURE = "tests/azure/"
"""One worker takes them all: each would start an emulated workspace and an account, and load Azure's packages."""


def group(path: str) -> str:
    """What one worker takes as a whole: a file, or several that share what is costly to start."""
    return "browser" if path in BROWSER else AZURE if path.startswith(AZURE) else path


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` sets DTRAIN_HOME and DAGSTER_HOME; tests have homes of their own."""
    for name in list(os.environ):
        if name.startswith(("DTRAIN_", "DAGSTER_")) and name != "DTRAIN_SCREENSHOTS":
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first, so that no worker is left alone with one in the end: the browser's, then by what their
    tests took when durations were stored. ``--fast`` leaves out what is costly."""
    from tests.outcome import COSTLY, stored_durations  # not above: pytest rewrites its assertions first

    stored = stored_durations()
    if config.option.fast:
        cheap, costly = [], []
        for item in items:
            is_costly = item.nodeid in stored or any(map(item.get_closest_marker, COSTLY))
            (costly if is_costly else cheap).append(item)
        config.hook.pytest_deselected(items=costly)
        items[:] = cheap
    seconds = Counter[str]()
    for test, (taken, _) in stored.items():
        seconds[group(test.split("::")[0])] += taken

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        path = item.nodeid.split("::")[0]
        return path not in BROWSER, -seconds[group(path)], group(path)

    items.sort(key=place)


OF_ALL = re.compile(r"^pytestmark = (\[[^]]*|.*)", re.MULTILINE)
"""The marks that all tests of a file have."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file is not even imported where all of its tests have a mark that is not asked for (``-m "not long"``), or one
    of a costly test with ``--fast``."""
    asked = config.option.markexpr
    unwanted = set() if " or " in asked else {f"mark.{mark}" for mark in re.findall(r"\bnot (\w+)", asked)}
    unwanted |= {"mark.slow", "mark.long", "BROWSER_TEST"} if config.option.fast else set()
    if not unwanted or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    marks = OF_ALL.search(collection_path.read_text())
    return True if marks and unwanted & set(re.findall(r"\b(?:mark\.)?\w+", marks[1])) else None


WAIT = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In a clone that has run no test yet, the other workers wait for the first one, which then removes the file."""
    if WAIT not in node.config.stash:
        is_fresh = not any(Path(__file__).parent.rglob("test_*-pytest-*.pyc"))
        node.config.stash[WAIT] = tempfile.mkstemp(prefix="dtrain-collecting-")[1] if is_fresh else ""
    node.workerinput["wait"] = node.config.stash[WAIT]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collecting makes millions of objects that live to the end: Python's garbage collector would look through them
    again and again. To rewrite the assertions of all files takes as long again, so one worker does it for all."""
    worker: dict[str, str] = getattr(session.config, "workerinput", {})
    wait, is_first = worker.get("wait"), worker.get("workerid") == "gw0"
    if wait and not is_first:
        patience = time.monotonic() + 120
        while os.path.exists(wait) and time.monotonic() < patience:
            time.sleep(0.1)
    forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = forbidden
        if wait and is_first:
            os.unlink(wait)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, where several files may be one `group`."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid.split("::", 1)[0])

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None

"""What is awaited from a Ray whose disk is full ends with an error; all else passes as it is."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain_dagster.data import disk_watch
from dtrain_dagster.data.disk_watch import is_too_full, says_full, watched


def refuse() -> OSError:
    return OSError("no room")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_watch, "STALLED_SECONDS", 0.1)


def test_items_and_errors_pass() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise ValueError("of its own")

    assert list(watched(iter(range(5)), lambda: True, refuse)) == [0, 1, 2, 3, 4]
    found = watched(broken(), lambda: True, refuse)
    assert [next(found), next(found), next(found)] == [0, 1, 2]
    with pytest.raises(ValueError, match="of its own"):
        next(found)


def test_who_waits_for_ever_is_told_where_the_disk_is_full_and_only_there() -> None:
    go_on, looks = threading.Event(), list[bool]()

    def stuck() -> Iterator[int]:
        yield 1
        go_on.wait(60)
        yield 2

    def is_full() -> bool:
        looks.append(True)
        if len(looks) == 2:
            go_on.set()
        return False

    assert list(watched(stuck(), is_full, refuse)) == [1, 2]
    assert len(looks) >= 2
    go_on.clear()
    found = watched(stuck(), lambda: True, refuse)
    assert next(found) == 1
    with pytest.raises(OSError, match="no room"):
        next(found)
    go_on.set()


def test_one_that_is_left_goes_no_further() -> None:
    made = list[int]()

    def count() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    found = watched(count(), lambda: False, refuse)
    assert next(found) == 0
    found.close()  # type: ignore[attr-defined]
    assert len(made) < 10


def test_the_logs_of_workers_that_spill_tell(tmp_path: Path) -> None:
    assert not says_full(tmp_path)
    (tmp_path / "worker-1.err").write_text("OSError: [Errno 28] No space left on device")
    assert not says_full(tmp_path), "a task's own error is its own"
    (tmp_path / "io_worker-1.err").write_text("x" * 200_000)
    assert not says_full(tmp_path)
    (tmp_path / "io_worker-2.err").write_text("x" * 200_000 + "OSError: [Errno 28] No space left on device\n")
    assert says_full(tmp_path)


@pytest.mark.parametrize(("used", "free", "is_full"), [(94, 6, False), (95, 5, True), (100, 0, True)])
def test_a_disk_that_ray_spills_nothing_to_is_full(
    used: int, free: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=120, used=used, free=free)  # 20 of it are root's
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else None)
    assert is_too_full(tmp_path) is is_full


def test_a_disk_that_is_not_there_is_not_full(tmp_path: Path) -> None:
    assert not is_too_full(tmp_path / "no")

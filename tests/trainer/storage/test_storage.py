from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.worlds import Forked, frozen
from trainer.config import ConfigError
from trainer.storage.base import Storage, TransferPool
from trainer.storage.open import open_storage

FULL_DISK = """
import resource, sys
from trainer.storage.base import Storage
from trainer.storage.open import open_storage
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # what a full disk does: the write itself fails
storage = open_storage(sys.argv[1])
for verb, name in ((storage.write, "kept"), (storage.create, "new")):
    try:
        verb(name, b"x" * 5000)
    except OSError as error:
        print(error.strerror)
"""

# Raises a number in a file by compare-and-swap; every lock is taken away from whoever has it for longer than a moment.
COUNT = """
import sys
from trainer.storage import base
from trainer.storage.base import Storage
from trainer.storage.open import open_storage
base.PATIENCE_SECONDS = float(sys.argv[2])
storage, done = open_storage(sys.argv[1]), 0
while done < 100:
    now = storage.read("number")
    done += storage.compare_and_swap("number", now, b"%d" % (int(now) + 1))
"""

# Freezes itself at its N-th rename: of the file into the lock's folder, or from there over the old one.
FREEZE = """
import os, signal, sys
from trainer.storage.base import Storage
from trainer.storage.open import open_storage
storage, renames = open_storage(sys.argv[1]), 0
def hook(event, arguments):
    global renames
    renames += event == "os.rename"
    if event == "os.rename" and renames == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(hook)
print(storage.compare_and_swap("pointer", b"old", b"late"), storage.read("pointer").decode())
"""


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield open_storage(tmp_path / "folder")
        return
    folder = open_storage(f"memory://{uuid.uuid4().hex}")
    yield folder
    folder.delete("")


def test_the_verbs_do_the_same_everywhere(storage: Storage) -> None:
    assert storage.list() == [] == storage.list("missing")
    assert not storage.exists("a/b")
    storage.write("a/b", b"one")
    storage.write("a/b", b"two")
    storage.create("a/c", b"three")
    assert (storage.read("a/b"), storage.read("a/c")) == (b"two", b"three")
    assert storage.list("a") == ["b", "c"]
    assert storage.list() == ["a"]
    storage.delete("a")
    storage.delete("a")
    assert not storage.exists("a/b")
    with pytest.raises(FileNotFoundError):
        storage.read("a/b")


def test_create_refuses_what_is_there_and_keeps_it(storage: Storage) -> None:
    storage.create("name", b"first")
    with pytest.raises(FileExistsError):
        storage.create("name", b"second")
    assert storage.read("name") == b"first"
    assert storage.list() == ["name"]


def test_a_write_that_fails_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("kept", b"old")
    with Forked(FULL_DISK, str(tmp_path)) as process:
        assert process.communicate().splitlines() == ["File too large"] * 2
    assert storage.read("kept") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_half_written_files_are_not_listed(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("whole", b"")
    (tmp_path / "half.1234.tmp").write_bytes(b"")
    assert storage.list() == ["whole"]


def test_only_a_local_folder_has_local_paths(tmp_path: Path) -> None:
    assert open_storage(tmp_path).local_path("a/b") == tmp_path / "a/b"
    assert open_storage(f"file://{tmp_path}").local_path("a") == tmp_path / "a"
    with pytest.raises(ValueError, match="not a folder of this machine"):
        open_storage("memory://x").local_path()


def test_an_address_that_nothing_can_open_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere://x'.*Protocol not known"):
        open_storage("nowhere://x")


def test_the_root_folder_is_not_the_working_folder() -> None:
    assert open_storage("/").path("a") == "/a"
    assert open_storage("/").path() == "/"


def test_swap_replaces_only_what_is_expected(storage: Storage) -> None:
    assert not storage.compare_and_swap("a/pointer", b"something", b"one")
    assert not storage.exists("a/pointer")
    assert storage.compare_and_swap("a/pointer", None, b"one")
    assert not storage.compare_and_swap("a/pointer", None, b"two")
    assert not storage.compare_and_swap("a/pointer", b"", b"two")
    assert storage.read("a/pointer") == b"one"
    assert storage.compare_and_swap("a/pointer", b"one", b"two")
    assert not storage.compare_and_swap("a/pointer", b"one", b"three")
    assert storage.read("a/pointer") == b"two"
    assert storage.list("a") == ["pointer"]


@pytest.mark.parametrize("patience", [10.0, 0.0], ids=["patient", "each takes the lock from the other"])
def test_no_swap_of_racing_processes_is_lost(tmp_path: Path, patience: float) -> None:
    open_storage(tmp_path).write("number", b"0")
    racers = [Forked(COUNT, str(tmp_path), str(patience)) for _ in range(3)]
    assert [racer.wait(120) for racer in racers] == [0, 0, 0]
    assert open_storage(tmp_path).read("number") == b"300"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("rename", [1, 2, 3, 4], ids=["takes", "fills", "replaces", "gives back"])
def test_one_that_is_frozen_while_it_swaps_holds_up_nobody_and_never_wins_late(tmp_path: Path, rename: int) -> None:
    storage = open_storage(tmp_path)
    storage.compare_and_swap("pointer", None, b"old")  # so that the lock exists
    with frozen(FREEZE, str(tmp_path), str(rename)) as thaw:
        before = b"late" if rename == 4 else b"old"
        assert storage.read("pointer") == before
        assert storage.compare_and_swap("pointer", before, b"new")
        assert storage.compare_and_swap("pointer", b"new", b"newer")
        assert thaw().split() == ["True" if rename == 4 else "False", "newer"]
    assert storage.compare_and_swap("pointer", b"newer", b"newest")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_lock_that_somebody_damaged_is_made_anew(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    assert storage.compare_and_swap("pointer", None, b"one")
    (tmp_path / "pointer.lock" / "free").rmdir()
    assert storage.compare_and_swap("pointer", b"one", b"two")
    (tmp_path / "pointer.lock" / "free").rmdir()
    (tmp_path / "pointer.lock").rmdir()
    assert storage.compare_and_swap("pointer", b"two", b"three")


def test_a_file_written_in_pieces_is_there_whole_or_not_at_all(storage: Storage) -> None:
    with storage.stream("a/b") as file:
        file.write(b"one")
        file.write(b"two")
    assert storage.read("a/b") == b"onetwo"
    assert storage.size("a/b") == 6
    with storage.open("a/b") as file:
        assert (file.read(4), file.read()) == (b"onet", b"wo")
    with pytest.raises(FileNotFoundError):
        storage.size("a/c")
    if storage.is_local:
        with pytest.raises(ZeroDivisionError), storage.stream("a/b") as file:
            file.writelines(b"x" * (1 // number) for number in (1, 0))
        assert storage.read("a/b") == b"onetwo"
        assert storage.list("a") == ["b"]


def test_jobs_are_done_side_by_side_and_all_before_the_end() -> None:
    both = threading.Barrier(2)
    done: list[int] = []
    with TransferPool(2) as pool:
        pool.put(both.wait)  # each waits for the other
        pool.put(both.wait)
        for number in range(20):
            pool.put(lambda number=number: done.append(number))
    assert sorted(done) == list(range(20))


def test_nothing_happens_without_jobs() -> None:
    before = threading.active_count()
    with TransferPool(4):
        assert threading.active_count() == before


@pytest.mark.parametrize("more", [0, 5])
def test_an_error_comes_out_and_what_follows_is_left(more: int) -> None:
    done: list[int] = []

    def fill(pool: TransferPool) -> None:
        pool.put(lambda: 1 // 0)
        for number in range(more):
            pool.put(lambda number=number: done.append(number))

    with pytest.raises(ZeroDivisionError), TransferPool(1) as pool:
        fill(pool)
    assert len(done) < 3  # those that were put before it was known


def test_where_the_block_fails_what_waits_is_left_and_its_error_counts() -> None:
    started, go_on, done = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        started.set()
        go_on.wait()

    def leave() -> None:
        with TransferPool(1) as pool:
            pool.put(first)
            started.wait()
            pool.put(lambda: done.append(1))
            threading.Timer(0.05, go_on.set).start()
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        leave()
    assert done == []

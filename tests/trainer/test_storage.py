from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.config import ConfigError
from trainer.storage import Storage

FULL_DISK = """
import resource, sys
from trainer.storage import Storage
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # what a full disk does: the write itself fails
storage = Storage(sys.argv[1])
for verb, name in ((storage.write, "kept"), (storage.create, "new")):
    try:
        verb(name, b"x" * 5000)
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield Storage(tmp_path / "folder")
        return
    folder = Storage(f"memory://{uuid.uuid4().hex}")
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
    storage = Storage(tmp_path)
    storage.write("kept", b"old")
    run = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["File too large"] * 2
    assert storage.read("kept") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_half_written_files_are_not_listed(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.write("whole", b"")
    (tmp_path / "half.1234.tmp").write_bytes(b"")
    assert storage.list() == ["whole"]


def test_only_a_local_folder_has_local_paths(tmp_path: Path) -> None:
    assert Storage(tmp_path).local_path("a/b") == tmp_path / "a/b"
    assert Storage(f"file://{tmp_path}").local_path("a") == tmp_path / "a"
    with pytest.raises(ValueError, match="not a folder of this machine"):
        Storage("memory://x").local_path()


def test_an_address_that_nothing_can_open_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere://x'.*Protocol not known"):
        Storage("nowhere://x")


def test_the_root_folder_is_not_the_working_folder() -> None:
    assert Storage("/").path("a") == "/a"
    assert Storage("/").path() == "/"

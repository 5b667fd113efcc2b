"""`Storage` on Blob, against a real Azurite: the verbs, races of processes, and what a bad network does to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from azure.storage.blob import BlobServiceClient

from harness.azure.azurite import Azurite
from harness.azure.blob_proxy import BlobProxy, Fault
from trainer.config import ConfigError
from trainer.runtime import retry
from trainer.storage import azure_account, azure_blob
from trainer.storage.base import Storage, StorageAccessError
from trainer.storage.open import open_storage

Container = Callable[[], str]

# Raises a number by compare-and-swap, and takes part in a race for a file that can be created once.
COUNT = """
import sys
from trainer.storage.base import Storage
from trainer.storage.open import open_storage
storage, done = open_storage(sys.argv[1]), 0
try:
    storage.create("first", sys.argv[2].encode())
    print("first")
except FileExistsError:
    pass
while done < 8:
    now = storage.read("number")
    done += storage.compare_and_swap("number", now, b"%d" % (int(now) + 1))
"""


@pytest.fixture
def storage(container: Container) -> Storage:
    return open_storage(f"{container()}/jobs/one")


@pytest.fixture
def proxy(azurite: Azurite, container: Container, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobProxy]:
    """In front of the account, for every address that is opened from here on."""
    with BlobProxy(azurite.url) as between:
        for name, value in between.environment.items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    monkeypatch.setattr(
        azure_account, "RETRIES", replace(azure_account.RETRIES, first_pause_seconds=0.01, longest_pause_seconds=0.01)
    )


def test_the_verbs_do_what_they_do_in_a_folder(storage: Storage) -> None:
    assert storage.list() == [] == storage.list("missing")
    assert not storage.exists("a/b")
    assert not storage.exists("")
    storage.write("a/b", b"one")
    storage.write("a/b", b"two")
    storage.create("a/c", b"three")
    storage.write("a/d/e", b"")
    storage.write("ab", b"not in a")
    assert (storage.read("a/b"), storage.read("a/c"), storage.read("a/d/e")) == (b"two", b"three", b"")
    assert storage.list("a") == ["b", "c", "d"]
    assert storage.list() == ["a", "ab"]
    assert (storage.size("a/c"), storage.size("a/d/e")) == (5, 0)
    assert storage.exists("a")
    assert storage.exists("")
    storage.write("a/half.tmp", b"")
    assert storage.list("a") == ["b", "c", "d"]
    storage.delete("a")
    storage.delete("a")
    assert not storage.exists("a/b")
    assert not storage.exists("a")
    assert storage.list() == ["ab"]
    for verb in (storage.read, storage.open, storage.size):
        with pytest.raises(FileNotFoundError) as caught:
            verb("a/b")
        assert caught.value.filename == f"{storage.uri}/a/b"
    storage.delete("")
    assert storage.list() == []


def test_swap_replaces_only_what_is_expected(storage: Storage) -> None:
    assert not storage.compare_and_swap("a/pointer", b"something", b"one")
    assert not storage.exists("a/pointer")
    assert storage.compare_and_swap("a/pointer", None, b"one")
    assert not storage.compare_and_swap("a/pointer", None, b"two")
    assert not storage.compare_and_swap("a/pointer", b"", b"two")
    for number in range(30):  # more often than the blob keeps marks of
        assert storage.compare_and_swap("a/pointer", b"one" if not number else b"%d" % number, b"%d" % (number + 1))
    storage.write("a/pointer", b"by another way")
    assert storage.compare_and_swap("a/pointer", b"by another way", b"back")
    assert storage.read("a/pointer") == b"back"


def test_large_files_go_and_come_in_blocks(
    storage: Storage, tmp_path: Path, proxy: BlobProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_blob, "BLOCK_BYTES", 100_000)
    storage = open_storage(storage.uri)
    data = os.urandom(1_050_000)
    storage.write("whole", data)
    with storage.stream("pieces") as file:
        for start in range(0, len(data), 33_333):
            file.write(memoryview(data)[start : start + 33_333])
    assert proxy.sent("PUT", "/whole?comp=block&") == proxy.sent("PUT", "/pieces?comp=block&") == 11
    for name in ("whole", "pieces"):
        assert storage.read(name) == data
        assert storage.size(name) == len(data)
        storage.fetch(name, tmp_path / name)
        assert (tmp_path / name).read_bytes() == data
        with storage.open(name) as file:
            assert file.read(10) == data[:10]
            file.seek(0)
            assert file.read() == data
    storage.create("once", data)
    with pytest.raises(FileExistsError):
        storage.create("once", data)


def test_a_stream_that_fails_leaves_what_was_there(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure_blob, "BLOCK_BYTES", 10)
    storage.write("kept", b"old")
    for name in ("kept", "new"):
        with pytest.raises(ZeroDivisionError), storage.stream(name) as file:
            file.writelines(b"x" * (25 // number) for number in (1, 0))
    assert storage.read("kept") == b"old"
    assert storage.list() == ["kept"]
    with storage.stream("empty"):
        pass
    assert storage.read("empty") == b""


@pytest.mark.slow
def test_of_racing_processes_one_creates_and_no_swap_is_lost(storage: Storage) -> None:
    storage.write("number", b"0")
    commands = [[sys.executable, "-c", COUNT, storage.uri, str(number)] for number in range(2)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [racer.communicate(timeout=120)[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert storage.read("number") == b"16"
    [winner] = [number for number, words in enumerate(said) if words == ["first"]]
    assert storage.read("first") == str(winner).encode()


@pytest.mark.parametrize("kind", ["lost answer", "busy afterwards", "cut answer"])
def test_an_answer_that_is_lost_is_not_taken_for_somebody_elses_work(
    container: Container, proxy: BlobProxy, hasty: None, kind: str
) -> None:
    storage = open_storage(f"{container()}/run")
    proxy.faults = [Fault(kind, "PUT", "/once")]
    storage.create("once", b"mine")
    assert storage.read("once") == b"mine"
    with pytest.raises(FileExistsError):
        storage.create("once", b"another's")
    proxy.faults = [Fault(kind, "PUT", "/pointer", times=2)]
    assert storage.compare_and_swap("pointer", None, b"one")
    proxy.faults = [Fault(kind, "PUT", "/pointer", times=2)]
    assert storage.compare_and_swap("pointer", b"one", b"two")
    assert not storage.compare_and_swap("pointer", b"one", b"three")
    assert storage.read("pointer") == b"two"
    assert proxy.injected == [kind] * 5


def test_a_lost_answer_after_which_another_went_on_was_a_success(
    container: Container, proxy: BlobProxy, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our write and our second attempt somebody replaces what we wrote: we did replace it, and it is theirs
    now. The same for a file that is created once and was then seen by others."""
    storage = open_storage(f"{container()}/run")
    storage.write("pointer", b"old")
    proxy.faults = [Fault("lost answer", "PUT", "/pointer")]

    def others_go_on(seconds: float) -> None:
        with BlobProxy(azurite.url) as another, monkeypatch.context() as patch:
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", another.environment["AZURE_STORAGE_CONNECTION_STRING"])
            assert open_storage(storage.uri).compare_and_swap("pointer", b"ours", b"theirs")

    monkeypatch.setattr(retry, "sleep", others_go_on)
    assert storage.compare_and_swap("pointer", b"old", b"ours")
    assert storage.read("pointer") == b"theirs"


def test_nothing_is_lost_or_done_twice_on_a_bad_network(
    container: Container, proxy: BlobProxy, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_blob, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(azure_account, "RETRIES", replace(azure_account.RETRIES, max_attempts=13))
    storage = open_storage(f"{container()}/run")
    data = os.urandom(150_000)
    proxy.misbehave(seed=1, share=0.25)
    storage.write("number", b"0")
    errors: list[BaseException] = []

    def work(writer: int) -> None:
        try:
            for number in range(4):
                storage.create(f"once/{writer}-{number}", b"%d" % writer)
                done = False
                while not done:
                    now = storage.read("number")
                    done = storage.compare_and_swap("number", now, b"%d" % (int(now) + 1))
            with storage.stream(f"large/{writer}") as file:
                file.write(data)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert storage.read("number") == b"12"
    assert storage.list("once") == [f"{writer}-{number}" for writer in range(3) for number in range(4)]
    assert [storage.read(f"large/{writer}") for writer in range(3)] == [data] * 3
    storage.delete("once")
    assert storage.list("once") == []
    assert {"drop", "lost answer", "cut answer", "busy", "busy afterwards", "slow"} <= set(proxy.injected)


def test_an_account_that_says_when_to_come_back_is_heeded(
    container: Container, proxy: BlobProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"{container()}/run")
    slept: list[float] = []
    monkeypatch.setattr(retry, "sleep", slept.append)
    proxy.faults = [Fault("busy", status=429, retry_after=7), Fault("busy", status=503), Fault("busy", status=500)]
    storage.write("a", b"one")
    assert slept[0] == 7
    assert len(slept) == 3
    assert slept[1] < slept[0]
    assert storage.read("a") == b"one"


def test_storage_that_stays_away_is_an_error_of_the_system(
    container: Container, proxy: BlobProxy, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"{container()}/run")
    proxy.faults = [Fault("busy", times=1000)]
    with pytest.raises(OSError, match=r"write az://.*/run/a failed") as caught:
        storage.write("a", b"one")
    assert not isinstance(caught.value, (ConfigError, FileNotFoundError))
    assert len(proxy.requests) == 7
    proxy.faults = [Fault("drop", times=1000)]
    with pytest.raises(OSError, match=r"list az://.*/run failed"):
        storage.list()


def test_content_that_was_changed_is_refused(azurite: Azurite, storage: Storage) -> None:
    storage.write("name", b"content")
    container, _, path = storage.path("name").partition("/")
    with BlobServiceClient.from_connection_string(azurite.connection_string) as service:
        blob = service.get_blob_client(container, path)
        metadata = blob.get_blob_properties().metadata
        blob.upload_blob(b"c0ntent", overwrite=True, metadata=metadata)
    with pytest.raises(OSError, match="damaged: its sha256"):
        storage.read("name")


def test_errors_of_access_name_the_setting_and_the_remedy(
    azurite: Azurite, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = container()
    with pytest.raises(StorageAccessError, match=r"AZURE_STORAGE_CONNECTION_STRING.*no such container: create it"):
        open_storage("az://not-there/run").write("a", b"")
    with pytest.raises(StorageAccessError, match="no such container"):
        open_storage("az://not-there/run").list()
    bad = azurite.connection_string.replace("AccountKey=E", "AccountKey=F")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", bad)
    for verb in ("read", "exists", "list"):
        with pytest.raises(StorageAccessError, match="check the key in AZURE_STORAGE_CONNECTION_STRING") as caught:
            getattr(open_storage(good), verb)("a")
        assert isinstance(caught.value, OSError)
        assert "by8vdM02" not in str(caught.value), "no key in a message"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=secret")
    with pytest.raises(ConfigError, match="is not the connection string of a storage account") as refused:
        open_storage(good)
    assert "secret" not in str(refused.value)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    with pytest.raises(ConfigError, match=r"set AZURE_STORAGE_ACCOUNT_URL .* or AZURE_STORAGE_CONNECTION_STRING"):
        open_storage(good)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_URL", "http://account.example")
    with pytest.raises(ConfigError, match="must begin with https://"):
        open_storage(good)


@pytest.mark.parametrize("address", ["az://", "az://a", "az://Upper/x", "az://two--hyphens/x", "az:///x"])
def test_an_address_that_is_none_is_refused(container: Container, address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address in Blob Storage"):
        open_storage(address)


def test_nothing_but_blob_needs_the_azure_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trainer.storage.azure_blob", None)  # as where its imports fail
    with pytest.raises(ConfigError, match=r"needs the Azure packages: pip install 'dtrain\[azure\]'"):
        open_storage("az://container/path")
    sources = {path.name: path.read_text() for path in Path(retry.__file__).parents[1].rglob("*.py")}
    needing = {name for name, text in sources.items() if re.search(r"^(from|import) azure\b", text, re.MULTILINE)}
    assert needing == {"azure_account.py", "azure_blob.py"}

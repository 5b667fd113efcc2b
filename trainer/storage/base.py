"""`Storage`: the few verbs that everything on disk or in Blob goes through, for folders and fsspec addresses.

Writing is all or nothing: a reader sees the old content or the new, never half of it. On a local file system that is a
temporary file, fsync and rename; object stores have it by nature. Which class an address needs is known to
`trainer.storage.open` only, through which storage is opened; nothing of one kind of object store belongs here.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from trainer.errors import ConfigError, DamagedError
from trainer.storage.regular_files import open_regular, read_regular, too_large

SIDE_BY_SIDE = 8
"""Small remote files that are read at once."""
PATIENCE_SECONDS = 1.0
"""A process that holds the lock of a file for this long is dead or frozen: it needs it for a few renames."""
TIMEOUT_SECONDS = 30.0
_FREE = "free"
_memory_lock = threading.Lock()


class StorageError(OSError):
    """An error of remote storage that stayed after several attempts. Starting again may help."""


class StorageAccessError(ConfigError, OSError):
    """An error of storage that denies access. The message names the setting and the remedy. It is an OSError too: a
    right may be revoked and granted again at any time, so code that outlasts failing storage outlasts this."""


class Storage:
    """A folder, addressed by relative POSIX paths (``checkpoints/LATEST.json``). Any number of threads may use it.
    Methods raise OSError if storage fails. Raise `ConfigError` for an address that no installed file system knows.

    `trainer.storage.open.open_storage` makes one for an address of any kind.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        import fsspec  # here, for it looks for file systems in all installed packages, which takes time
        from fsspec.implementations.local import LocalFileSystem

        self.uri = str(uri).rstrip("/") or "/"
        self.fs: Any
        try:
            if "://" in self.uri:
                self.fs, root = fsspec.url_to_fs(self.uri)
            else:  # a path is taken as it is: "::" in it would be read as an address inside another
                self.fs, root = LocalFileSystem(), os.path.abspath(os.path.expanduser(self.uri))
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
            raise ConfigError(f"{self.uri!r} is neither a folder nor an address that can be opened: {error}") from error
        self.root: str = str(root).rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str = "") -> str:
        """Return the address of ``name`` as the file system knows it (without the protocol)."""
        return f"{self.root}/{name}" if name else self.root or "/"

    def local_path(self, name: str = "") -> Path:
        """Return the path of ``name`` on this machine. Raise ValueError for a remote folder."""
        if not self.is_local:
            raise ValueError(f"{self.uri} is not a folder of this machine")
        return Path(self.path(name))

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raise FileNotFoundError if it is missing."""
        return self.fs.cat_file(self.path(name))

    def read_bounded(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a file that others may have written.

        Raise FileNotFoundError if it is missing. Raise `DamagedError`, without holding anything in memory, if it has
        more than ``most_bytes`` or is no regular file of this folder: a link is not followed, a pipe not waited for.
        """
        if self.is_local:
            return read_regular(self.path(), name, most_bytes)
        if (size := self.size(name)) > most_bytes:
            raise too_large(f"{self.uri}/{name}", size, most_bytes)
        return self.read(name)

    def read_each(self, names: Sequence[str], most_bytes: int) -> Sequence[bytes | DamagedError]:
        """Return, in this order, the content of each file or the `DamagedError` of `read_bounded`."""
        read = partial(self._read_or_damage, most_bytes=most_bytes)
        if self.is_local or len(names) < 2:
            return [read(name) for name in names]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:  # small files: it is the way there that takes time
            return list(pool.map(read, names))

    def _read_or_damage(self, name: str, most_bytes: int) -> bytes | DamagedError:
        try:
            return self.read_bounded(name, most_bytes)
        except DamagedError as error:
            return error

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read in pieces. Raise FileNotFoundError if it is missing, `DamagedError` if it is no regular
        file."""
        if self.is_local:
            file: Any = open_regular(self.path(), name)
            return io.BufferedReader(file)
        return self.fs.open(self.path(name), "rb")

    def fetch(self, name: str, path: str | os.PathLike[str]) -> None:
        """Copy a file to a path of this machine. Raise FileNotFoundError if it is missing. After a failure the content
        at ``path`` is undefined."""
        self.fs.get_file(self.path(name), str(path))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raise FileNotFoundError if it is missing."""
        path = self.path(name)
        self.fs.invalidate_cache(path)
        return int(self.fs.size(path))

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file, all or nothing."""
        if not self.is_local:
            self.fs.pipe_file(self.path(name), data)
            return
        with self.stream(name) as file:
            file.write(data)

    @contextmanager
    def stream(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to write in pieces. A local write is all or nothing; a failed remote one may leave a part."""
        path = self.path(name)
        if not self.is_local:
            with self.fs.open(path, "wb") as file:
                yield file
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def create(self, name: str, data: bytes) -> str | None:
        """Write a file that must not exist yet, and return the version id that storage gave it, or None.

        Raise FileExistsError if the file exists; one of two racing writers wins.
        """
        path = self.path(name)
        if not self.is_local:
            self.fs.pipe_file(path, data, mode="create")
            return None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            _write_through(temporary, data)
            os.link(temporary, path)  # unlike rename, a hard link refuses to replace
        finally:
            Path(temporary).unlink(missing_ok=True)
        return None

    def compare_and_swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        """Replace a file only if its content is ``expected`` (None: if it is missing); return whether it was replaced.

        Of several writers, in any process, that expect the same content one succeeds, and none waits for a frozen one.
        Raise `ConfigError` for a file system that cannot do this.
        """
        self.require_compare_and_swap()
        path = self.path(name)
        if self.is_local:
            return _swap_file(path, expected, data)
        with _memory_lock:
            if (self.fs.cat_file(path) if self.fs.exists(path) else None) != expected:
                return False
            self.fs.pipe_file(path, data)
            return True

    def require_compare_and_swap(self) -> None:
        """Raise `ConfigError`, which names the file system, if `compare_and_swap` does not work on it."""
        from fsspec.implementations.memory import MemoryFileSystem

        if not self.is_local and not isinstance(self.fs, MemoryFileSystem):
            raise ConfigError(
                f"{self.uri}: the file system {type(self.fs).__name__} has no compare-and-swap here, which checkpoints "
                "need; use a folder that all nodes can reach"
            )

    def exists(self, name: str) -> bool:
        """Return whether there is a file or a folder of this name."""
        return bool(self.fs.exists(self.path(name)))

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names directly in ``folder``, without half-written files and locks; empty if missing."""
        return sorted(self.names(folder))

    def names(self, folder: str = "") -> Iterator[str]:
        """Yield what `list` returns, in no order. Of a folder of this machine only one name is held at a time, however
        many there are: a job that runs for days looks every second into folders that grow with it."""
        path = self.path(folder)
        if self.is_local and os.path.isdir(path):
            with suppress(FileNotFoundError), os.scandir(path) as entries:
                yield from (entry.name for entry in entries if not is_litter(entry.name))
            return
        self.fs.invalidate_cache(path)
        try:
            found = self.fs.ls(path, detail=False)
        except FileNotFoundError:
            return
        names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in found)
        yield from (name for name in names if not is_litter(name))

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it is missing."""
        try:
            self.fs.rm(self.path(name), recursive=True)
        except FileNotFoundError:
            return

    def sweep(self, folder: str, older_than_seconds: float) -> None:
        """Remove half-written files in ``folder`` that are older than this; do nothing on remote storage."""
        if not self.is_local:
            return
        for path in Path(self.path(folder)).glob("*.tmp"):
            if time.time() - path.stat().st_mtime > older_than_seconds:
                self.delete(f"{folder}/{path.name}")


class TransferPool:
    """A few threads that transfer the parts of one file in parallel. Leaving its context waits for all jobs, or raises
    an error of one."""

    def __init__(self, count: int) -> None:
        self._count, self._pool = count, ThreadPoolExecutor(count, "transfer")
        self._running: set[Future[object]] = set()

    def put(self, job: Callable[[], object]) -> None:
        """Begin a job; wait while every thread is busy and another job waits already. Raise the error of an earlier
        job, if there was one."""
        while len(self._running) > self._count:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for each in done:
                each.result()
        self._running.add(self._pool.submit(job))

    def __enter__(self) -> TransferPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for each in self._running:
                each.result()


def is_litter(name: str) -> bool:
    """Return whether a name is that of a half-written file or a lock, which no listing shows."""
    return name.endswith((".tmp", ".lock"))


def _swap_file(path: str, expected: bytes | None, data: bytes) -> bool:
    """Compare-and-swap of a file on a local or network file system, by renames alone; see `Storage.compare_and_swap`.
    Raise OSError if the file system refuses, and TimeoutError if the lock could not be taken within 30 s.

    A lock that its holder must give back (flock) would be kept for ever by a process that is frozen while it has it,
    and a process that broke it would be overwritten by the frozen one once that wakes. Here the lock is a folder whose
    *name* says which process has it: ``LATEST.json.lock/free``, or ``LATEST.json.lock/<id of its holder>``. Taking it,
    giving it back and taking it from a silent holder are renames of that folder, of which only one can succeed. The new
    content lies in the folder and is moved from there over the old one: a process that has lost the folder can replace
    nothing any more, however late it wakes.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            _write_through(temporary, data)  # the slow part, before the lock is taken
            holding = _take_lock(f"{path}.lock", deadline)
            try:
                if _read_or_none(path) != expected:
                    return False
                content = f"{holding}/{os.path.basename(holding)}"
                os.rename(temporary, content)
                os.replace(content, path)
                return True
            finally:
                _give_back_lock(holding)
        except FileNotFoundError:  # another process took the lock or deleted the folder: start again
            if time.monotonic() > deadline:
                raise
        finally:
            Path(temporary).unlink(missing_ok=True)


def _write_through(path: str, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_or_none(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


def _take_lock(lock: str, deadline: float) -> str:
    """Take the folder in ``lock`` and return its new path."""
    mine = f"{lock}/{uuid.uuid4().hex}"
    seen, since = "", time.monotonic()
    while True:
        owner = _owner_of(lock)
        if owner is not None and owner != seen:
            seen, since = owner, time.monotonic()
        if owner == _FREE or (owner is not None and time.monotonic() - since > PATIENCE_SECONDS):
            try:
                os.rename(f"{lock}/{owner}", mine)
            except FileNotFoundError:
                continue
            for left in os.listdir(mine):  # of the one that had it: it must not get it over the file any more
                with suppress(FileNotFoundError):  # unless it just has
                    os.unlink(f"{mine}/{left}")
            return mine
        if time.monotonic() > deadline:
            raise TimeoutError(f"{lock} could not be acquired within {TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.002)


def _give_back_lock(holding: str) -> None:
    with suppress(FileNotFoundError):  # somebody took it from us
        os.rename(holding, f"{os.path.dirname(holding)}/{_FREE}")


def _owner_of(lock: str) -> str | None:
    """Return the name of the folder in ``lock``, or None to look again. A missing lock is made."""
    try:
        names = os.listdir(lock)
    except FileNotFoundError:
        _make_lock(lock)
        return None
    if not names:  # half deleted by somebody
        with suppress(OSError):  # unless the listing had met a rename
            os.rmdir(lock)
    return names[0] if len(names) == 1 else None


def _make_lock(lock: str) -> None:
    """Make the lock with one free folder in it, at once: it must never be seen without, nor get a second one."""
    temporary = f"{lock}.{uuid.uuid4().hex[:8]}.tmp"
    os.makedirs(f"{temporary}/{_FREE}")
    try:
        os.rename(temporary, lock)
    except OSError:  # somebody was faster: a rename replaces no folder that has something in it
        shutil.rmtree(temporary)
        if not os.path.isdir(lock):
            raise

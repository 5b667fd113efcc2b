"""Azure Blob Storage behind the methods of `Storage`: ``az://container/path``.

Large files are transferred in blocks, several at once. Every request is tried again after transient failures. An
attempt whose answer was lost may have been carried out, and the next one would meet its result: so each conditional
write leaves a mark of its own in the blob's metadata, and a conflict counts only if that mark is missing. The metadata
also hold the sha256 of a blob that was written whole; reading it whole checks this.

Old versions are kept or not by the account's settings; `create` and `stream` return the version if there is one.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, BlobClient, BlobPrefix

from trainer.errors import ConfigError
from trainer.storage.azure_account import AccessVerdict, BlobError, attempt, service
from trainer.storage.base import Storage, TransferPool, is_litter
from trainer.storage.regular_files import too_large

BLOCK_BYTES = 8 << 20
"""The bytes of a transfer's part. A smaller file is transferred in one request."""
PARALLEL = 4
"""The number of blocks of one file that are transferred at once."""
_BATCH = 200
"""Blobs deleted in one request; the service takes 256."""
_MARKS = 20
"""The number of marks of conditional writes that a blob carries: a writer finds its own unless more came in between."""
_ADDRESS = re.compile(r"az://([a-z0-9](?:[a-z0-9]|-(?!-)){1,61}[a-z0-9])(?:/(.*))?$")
_SHA256, _WRITERS = "sha256", "writers"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a blob, and what is known of the whole."""

    data: bytes
    size: int
    etag: str
    metadata: dict[str, str]


class BlobStorage(Storage):
    """A folder of a container, as a `Storage`. No request is made before the first method call. Raise `ConfigError` for
    an invalid address, or if no account is named."""

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self.uri = str(uri).rstrip("/")
        match = _ADDRESS.match(self.uri)
        if not match:
            raise ConfigError(
                f"{self.uri!r} is not an address in Blob Storage: give az://<container>/<path>, with a container "
                "name of 3 to 63 lower-case letters, digits and single hyphens"
            )
        self.container, self._prefix = match[1], (match[2] or "").strip("/")
        self.root = f"{self.container}/{self._prefix}".rstrip("/")
        self.is_local = False
        self.parallel = PARALLEL
        self._client = service().get_container_client(self.container)

    def read(self, name: str) -> bytes:
        return self.read_bounded(name, sys.maxsize)

    def read_bounded(self, name: str, most_bytes: int) -> bytes:
        while True:
            first = self._part(name, 0, min(BLOCK_BYTES, most_bytes + 1))
            if first.size > most_bytes:
                raise too_large(self._at(name), first.size, most_bytes)
            pieces = {0: first.data}
            try:
                self._rest(name, first, pieces.__setitem__)
            except BlobError as error:
                if error.verdict is AccessVerdict.CONFLICT:  # replaced while it was read: from the start
                    continue
                raise
            data = first.data if len(pieces) == 1 else b"".join(pieces[offset] for offset in sorted(pieces))
            expected = first.metadata.get(_SHA256)
            if expected and hashlib.sha256(data).hexdigest() != expected:
                raise OSError(errno.EIO, "damaged: its sha256 is not the one that it was written with", self._at(name))
            return data

    def fetch(self, name: str, path: str | os.PathLike[str]) -> None:
        with open(path, "wb") as file:
            self._fetch(name, file)

    def open(self, name: str) -> IO[bytes]:
        """Return the blob as it is now, in a temporary file of this machine that is deleted when it is closed."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            self._fetch(name, file)
            file.seek(0)
            return file
        except BaseException:
            file.close()
            raise

    def size(self, name: str) -> int:
        return int(self._properties(name).size)

    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, {}, [])

    @contextmanager
    def stream(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to write in pieces, which are sent while the next ones come. All or nothing: if the block fails,
        nothing is written. Afterwards the file's ``version_id`` is the one that the account gave, or None."""
        with TransferPool(self.parallel) as pool:
            writer = _BlockWriter(self, name, pool)
            yield writer  # type: ignore[misc]
            writer.send_rest()
        writer.version_id = self._commit(name, writer.blocks, {}, {})

    def create(self, name: str, data: bytes) -> str | None:
        mark = uuid.uuid4().hex[:12]
        try:
            return self._put(name, data, {"match_condition": MatchConditions.IfMissing}, [mark])
        except BlobError as error:
            if error.verdict is not AccessVerdict.CONFLICT:
                raise
        properties = self._properties(name)
        if mark in _marks(properties.metadata):  # it was us: that answer was lost
            return properties.version_id
        raise FileExistsError(errno.EEXIST, "it already exists", self._at(name))

    def compare_and_swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        mark = uuid.uuid4().hex[:12]
        while True:
            try:
                now = self._part(name, 0, BLOCK_BYTES)
            except FileNotFoundError:
                now = None
            marks = _marks(now.metadata) if now else []
            if mark in marks:  # done by an attempt whose answer was lost; others may have gone on from there
                return True
            if now is not None and now.size > len(now.data):
                raise ValueError(f"{self._at(name)} has {now.size} bytes: compare-and-swap is for small files")
            if (now.data if now else None) != expected:
                return False
            condition: dict[str, Any] = {"match_condition": MatchConditions.IfMissing}
            if now is not None:
                condition = {"etag": now.etag, "match_condition": MatchConditions.IfNotModified}
            try:
                self._put(name, data, condition, [*marks[1 - _MARKS :], mark])
                return True
            except BlobError as error:
                if error.verdict is not AccessVerdict.CONFLICT:
                    raise

    def require_compare_and_swap(self) -> None:
        """Do nothing: ETags provide compare-and-swap."""

    def exists(self, name: str) -> bool:
        key = self._key(name)
        if key:
            try:
                self._properties(name)
                return True
            except FileNotFoundError:
                pass
        return bool(self._names(f"{key}/" if key else "", at_most=1))

    def names(self, folder: str = "") -> Iterator[str]:
        key = self._key(folder)
        prefix = f"{key}/" if key else ""
        found = self._pages(
            folder,
            lambda: self._client.walk_blobs(name_starts_with=prefix, delimiter="/"),
            lambda item: item.name.rstrip("/") if isinstance(item, BlobPrefix) else item.name,
        )
        names = {name[len(prefix) :] for name in found}  # the service names them in pages
        yield from (name for name in names if name and not is_litter(name))

    def delete(self, name: str) -> None:
        key = self._key(name)
        names = [*self._names(f"{key}/" if key else ""), *([key] if key else [])]
        for start in range(0, len(names), _BATCH):
            self._delete(name, names[start : start + _BATCH])

    def sweep(self, folder: str, older_than_seconds: float) -> None:
        """Do nothing: the account forgets blocks that were never committed."""

    def path(self, name: str = "") -> str:
        return f"{self.root}/{name}" if name else self.root

    # The rest serves the methods above.

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")

    def _at(self, name: str) -> str:
        return f"{self.uri}/{name}" if name else self.uri

    def _blob(self, name: str) -> BlobClient:
        return self._client.get_blob_client(self._key(name))

    def _attempt(self, verb: str, name: str, action: Callable[[], Any]) -> Any:
        """Make a request with `attempt`. Raise FileNotFoundError if the blob is missing."""
        try:
            return attempt(f"{verb} {self._at(name)}", action)
        except BlobError as error:
            if error.verdict is AccessVerdict.MISSING:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._at(name)) from None
            raise

    def _properties(self, name: str) -> Any:
        return self._attempt("look at", name, self._blob(name).get_blob_properties)

    def _part(self, name: str, offset: int, length: int, etag: str | None = None) -> _Part:
        """Return a part of a blob, whole or not at all; of the version ``etag`` if it is given."""
        blob = self._blob(name)
        condition: dict[str, Any] = {}
        if etag:
            condition = {"etag": etag, "match_condition": MatchConditions.IfNotModified}

        def get() -> _Part:
            answer = blob.download_blob(offset=offset, length=length, **condition)
            data, properties = answer.readall(), answer.properties
            size = int(str(properties.content_range).rpartition("/")[2])  # the properties' own size is the part's
            if len(data) != min(length, size - offset):
                raise ConnectionError(f"{len(data)} bytes arrived instead of {min(length, size - offset)}")
            return _Part(data, size, properties.etag, properties.metadata or {})

        try:
            return self._attempt("read", name, get)
        except BlobError as error:
            if error.verdict is not AccessVerdict.BAD_RANGE or offset:
                raise
            properties = self._properties(name)  # it is empty
            return _Part(b"", 0, properties.etag, properties.metadata or {})

    def _rest(self, name: str, first: _Part, take: Callable[[int, bytes], object]) -> None:
        """Read what follows the first part, several parts at once, in any order."""
        with TransferPool(self.parallel) as pool:
            for start in range(len(first.data), first.size, BLOCK_BYTES):
                pool.put(partial(self._take, name, start, first.etag, take))

    def _take(self, name: str, offset: int, etag: str, take: Callable[[int, bytes], object]) -> None:
        take(offset, self._part(name, offset, BLOCK_BYTES, etag).data)

    def _fetch(self, name: str, file: IO[bytes]) -> None:
        while True:
            first = self._part(name, 0, BLOCK_BYTES)
            file.truncate(0)
            os.pwrite(file.fileno(), first.data, 0)
            try:
                return self._rest(name, first, lambda offset, data: _write_at(file.fileno(), data, offset))
            except BlobError as error:
                if error.verdict is not AccessVerdict.CONFLICT:
                    raise

    def _put(self, name: str, data: bytes, condition: dict[str, Any], marks: Sequence[str]) -> str | None:
        """Write a blob whole, under a condition; return the version that the account gave it."""
        metadata = {_SHA256: hashlib.sha256(data).hexdigest()}
        if marks:
            metadata[_WRITERS] = ",".join(marks)
        if len(data) <= BLOCK_BYTES:
            overwrite = condition.get("match_condition") is not MatchConditions.IfMissing
            rest = condition if overwrite else {}
            blob = self._blob(name)
            done = self._attempt(
                "write", name, lambda: blob.upload_blob(data, overwrite=overwrite, metadata=metadata, **rest)
            )
            return done.get("version_id")
        for last in (False, False, True):
            with TransferPool(self.parallel) as pool:
                writer = _BlockWriter(self, name, pool)
                writer.write(data)
                writer.send_rest()
            try:
                return self._commit(name, writer.blocks, condition, metadata)
            except BlobError as error:
                if error.verdict is not AccessVerdict.LOST_BLOCKS or last:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def stage(self, name: str, block: str, data: bytes) -> None:
        """Send one block; it counts once it is committed."""
        blob = self._blob(name)
        self._attempt("write", name, lambda: blob.stage_block(block, data, length=len(data)))

    def _commit(
        self, name: str, blocks: Sequence[str], condition: dict[str, Any], metadata: dict[str, str]
    ) -> str | None:
        """Make staged blocks the content of a blob; return its version. Without a condition, a second call has the same
        effect."""
        blob, chosen = self._blob(name), [BlobBlock(block) for block in blocks]
        done = self._attempt(
            "write", name, lambda: blob.commit_block_list(chosen, metadata=metadata or None, **condition)
        )
        return done.get("version_id")

    def _names(self, prefix: str, at_most: int | None = None) -> Sequence[str]:
        """Return the full names of all blobs with this prefix, at any depth."""
        return self._pages(
            "",
            lambda: self._client.list_blobs(name_starts_with=prefix, results_per_page=at_most),
            lambda item: item.name,
            at_most,
        )

    def _pages(
        self, name: str, listing: Callable[[], Any], pick: Callable[[Any], str], at_most: int | None = None
    ) -> Sequence[str]:
        """Return the items of a listing, page by page; a page that fails is requested again."""
        found: list[str] = []
        token: str | None = None
        while True:

            def page(token: str | None = token) -> tuple[list[str], str | None]:
                pages = listing().by_page(continuation_token=token)
                try:
                    return [pick(item) for item in next(pages)], pages.continuation_token
                except StopIteration:
                    return [], None

            names, token = self._attempt("list", name, page)
            found += names
            if not token or (at_most is not None and len(found) >= at_most):
                return found

    def _delete(self, name: str, keys: Sequence[str]) -> None:
        """Delete these blobs; a missing one counts as deleted."""
        if len(keys) == 1:
            [key] = keys
            with suppress(FileNotFoundError):
                self._attempt("delete", name, lambda: self._client.delete_blob(key, delete_snapshots="include"))
            return

        def batch() -> None:
            answers = self._client.delete_blobs(*keys, delete_snapshots="include", raise_on_any_failure=False)
            bad = [answer for answer in answers if answer.status_code not in (200, 202, 404)]
            if bad:
                raise HttpResponseError(f"{len(bad)} of {len(keys)} could not be deleted", response=bad[0])

        self._attempt("delete", name, batch)


class _BlockWriter(io.RawIOBase):
    """A file that cuts what is written into blocks and sends them by a transfer pool. `send_rest` sends the last
    one."""

    def __init__(self, storage: BlobStorage, name: str, pool: TransferPool) -> None:
        self._storage, self._name, self._pool = storage, name, pool
        self._upload = uuid.uuid4().hex  # blocks of several writers of one blob must not be mixed up
        self._pieces: list[bytes] = []
        self._held = 0
        self.blocks: list[str] = []
        self.version_id: str | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            piece = bytes(view[at : at + BLOCK_BYTES - self._held])
            at += len(piece)
            self._held += len(piece)
            self._pieces.append(piece)
            if self._held == BLOCK_BYTES:
                self.send_rest()
        return len(view)

    def send_rest(self) -> None:
        if not self._held:
            return
        content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._held = [], 0
        block = base64.b64encode(f"{self._upload}-{len(self.blocks):06d}".encode()).decode()
        self.blocks.append(block)
        self._pool.put(lambda: self._storage.stage(self._name, block, content))


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def _marks(metadata: dict[str, str] | None) -> list[str]:
    """Return the marks of the last conditional writes, in order."""
    return [mark for mark in (metadata or {}).get(_WRITERS, "").split(",") if mark]

"""A dataset's verified shards, turned once on each node into memory-mapped arrays.

What all kinds of stored datasets share belongs here: a shard is read only after its sha256 was checked; the first
process of a node unpacks, under a lock; nothing half-written is ever read. Which arrays a kind has, and what of a shard
goes into which, is said by its own class.

The cache is a folder of this user alone. An entry counts where every file is as it was left (size, times of change,
which only the system sets); else it is made anew.

A process holds the manifest, and nothing that grows with the rows: they are in the page cache, which all processes of a
node share and the kernel takes back when it needs room. A dataset that is larger than memory is read by the page.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import stat
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.loader import ArrayData
from trainer.data.manifest import DatasetError, kind_of, read_dataset_manifest
from trainer.documents.places import PlaceError, inside, own_folder
from trainer.runtime.host_memory import available_bytes
from trainer.storage.open import default_cache_dir, open_storage

SAMPLES = ("features", "target")
"""The arrays that training reads; the others are read for evaluation."""
_BUFFER = 1 << 20
CACHE_VERSION = 2
RECORD = "complete.json"
_REMEDY = "point DTRAIN_CACHE (or DTRAIN_HOME, whose cache it is) to a folder of your own"


def open_cache(folder: Path) -> Path:
    """Return the folder of all entries; make it if it is missing. Raise `DatasetError` if others may write to it."""
    try:
        return own_folder(folder, _REMEDY)
    except PlaceError as error:
        raise DatasetError(f"the cache of datasets cannot be trusted: {error}") from error


def own_file(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a new file for writing that only this user can open, whatever the umask."""
    return open(path, "xb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_record(folder: Path, content: str) -> None:
    """Record that the entry is whole. ``content``: the digest of its source (`CachedArrays.content_digest`)."""
    files = {path.name: _state(path) for path in folder.glob("*.npy")}
    with own_file(folder / RECORD) as file:
        file.write(json.dumps({"content": content, "files": files}).encode())


def is_whole(folder: Path, content: str) -> bool:
    """Return whether the entry exists, was made of this content, belongs to this user alone, and is unchanged: a
    changed file would otherwise be read as prices without an error."""
    try:
        record = json.loads((folder / RECORD).read_text())
        files = record["files"]
        return (
            record["content"] == content
            and _is_ours(folder, stat.S_ISDIR)
            and bool(files)
            and all(_is_ours(folder / name, stat.S_ISREG) for name in files)
            and all(_state(folder / name) == state for name, state in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


class CachedArrays(ArrayData):
    """The manifest of one dataset, and its arrays once `open_arrays` was called."""

    device = torch.device("cpu")

    kind: ClassVar[str]
    """That of the datasets that this class reads, see `trainer.data.manifest`."""

    def __init__(self, uri: str, expected_id: str | None = None) -> None:
        """Read the manifest. Raise `DatasetError` if it cannot be used, or is of another kind."""
        self.storage = open_storage(uri)
        self.manifest = read_dataset_manifest(self.storage, expected_id)
        if (found := kind_of(self.manifest)) != self.kind:
            raise DatasetError(f"{self.storage.uri} is a dataset of {found}, but {self.kind} are needed here")

    @abstractmethod
    def array_shapes(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the type and shape of each array by name; the first dimension of each counts all rows."""

    @abstractmethod
    def read_shard(self, file: IO[bytes], shard: Mapping[str, Any]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield the rows of a shard, some at a time, as the parts of each array. Raise `DatasetError` for a shard that
        is not what the manifest says; errors of Arrow and missing columns count as that."""

    @abstractmethod
    def content_digest(self) -> str:
        """Return the sha256 of what the arrays depend on."""

    def open_arrays(self, cache_dir: str | os.PathLike[str] | None) -> None:
        """Map the arrays, which are unpacked where they are missing. Raise `DatasetError` for a shard that is missing
        or damaged, OSError where the disk is full."""
        self.folder = self._cached(Path(cache_dir) if cache_dir else default_cache_dir())
        self._maps = {path.stem: np.load(path, mmap_mode="r") for path in self.folder.glob("*.npy")}
        sampled = [self._maps[name] for name in SAMPLES]
        self.is_larger_than_memory = sum(array.nbytes for array in sampled) > available_bytes()
        if self.is_larger_than_memory:  # each sample would bring in its neighbours, and push others out
            for array in sampled:
                advise(array, mmap.MADV_RANDOM, 0, self.rows)

    @property
    def dataset_id(self) -> str:
        """The dataset's id, from its manifest."""
        return str(self.manifest["dataset_id"])

    @property
    def rows(self) -> int:
        """The number of rows of all shards."""
        return sum(shard["rows"] for shard in self.manifest["shards"])

    def _cached(self, cache_dir: Path) -> Path:
        """Return the folder of this dataset's arrays; the first process of a node makes it, under a lock."""
        content = self.content_digest()
        folder = open_cache(cache_dir) / f"{self.dataset_id}-v{CACHE_VERSION}"
        if is_whole(folder, content):
            return folder
        from filelock import FileLock  # not above: most ranks find the arrays made

        with FileLock(cache_dir / f"{folder.name}.lock", fallback_to_soft=False):
            if is_whole(folder, content):
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            for abandoned in cache_dir.glob(f"{folder.name}-*"):  # by a process that was killed: we hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache_dir))
            try:
                self._convert(building)
                write_record(building, content)
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        return folder

    def _convert(self, folder: Path) -> None:
        """Shards to npy, some rows at a time. Written as files, not through a map: that room on the disk is missing is
        an error then, and not a killed process."""
        import pyarrow as pa

        shapes = self.array_shapes()
        converted = 0
        try:
            with ExitStack() as stack:
                files = {name: stack.enter_context(own_file(folder / f"{name}.npy", _BUFFER)) for name in shapes}
                for name, (kind, shape) in shapes.items():
                    _write_header(files[name], kind, shape)
                for shard in self.manifest["shards"]:
                    with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as opened:
                        handle = opened.enter_context(self._verified(shard, Path(scratch)))
                        for part in self.read_shard(handle, shard):
                            for name, (kind, _) in shapes.items():
                                files[name].write(np.ascontiguousarray(part[name], dtype=kind).data)
                            converted += len(part[next(iter(shapes))])
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
        except (pa.ArrowException, KeyError) as error:
            raise DatasetError(f"{self.storage.uri}: a shard does not match its manifest ({error})") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            reason = f"no room to unpack the dataset ({error.strerror}); point DTRAIN_CACHE to a folder with more"
            raise OSError(error.errno, reason, str(folder)) from error
        if converted != self.rows:
            raise self.miscounted(self.rows, converted)

    def miscounted(self, said: int, held: int) -> DatasetError:
        """Return the error for shards with another number of rows than the manifest says."""
        return DatasetError(f"{self.storage.uri}: the manifest says {said} rows, the shards hold {held}; rebuild it")

    def _verified(self, shard: dict[str, Any], scratch: Path) -> IO[bytes]:
        """Return the shard, open, after its sha256 was checked against the manifest: the bytes that are read are those
        that were checked."""
        name = shard["path"]
        try:
            if self.storage.is_local:
                path = inside(self.storage.local_path(), name, "the path of a shard")
            else:
                path = scratch / "shard"
                self.storage.fetch(name, path)
            file = open(path, "rb")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError as error:
            raise DatasetError(f"{self.storage.uri}: {name} is missing; rebuild the dataset") from error
        except PlaceError as error:
            raise DatasetError(f"{self.storage.uri}: {error}") from error
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != shard["sha256"]:
            file.close()
            raise DatasetError(
                f"{self.storage.uri}: {name} has sha256 {digest[:12]}…, the manifest says "
                f"{shard['sha256'][:12]}…: it is damaged or was changed; delete the folder and rebuild the dataset"
            )
        file.seek(0)
        return file


def _write_header(file: IO[bytes], kind: type, shape: tuple[int, ...]) -> None:
    """Write the header of an npy file whose content follows."""
    description = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, description)


def advise(array: Any, advice: int, first: int, last: int) -> None:
    """Tell the kernel what is going to happen to rows [first, last) of a memory map."""
    width = array.strides[0]
    begin = array.offset + first * width
    start = begin - begin % mmap.PAGESIZE
    array.base.madvise(advice, start, array.offset + last * width - start)


def tensor_over(array: NDArray[Any]) -> Tensor:
    """Return a tensor over the read-only map, without a copy. torch warns that writing to it is undefined; we only
    read."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _is_ours(path: Path, is_kind: Any) -> bool:
    found = os.lstat(path)
    return bool(is_kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _state(path: Path) -> dict[str, int]:
    found = os.lstat(path)
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}

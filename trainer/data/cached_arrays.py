"""A dataset's verified shards, turned once on each node into memory-mapped arrays.

What all kinds of datasets share belongs here: a shard is read only after its sha256 was checked; the first process of a
node unpacks, under a lock; nothing half-written is ever read (`trainer.data.shard_cache`). Which arrays a kind has, and
what of a shard goes into which, is said by its own class.

A process holds the manifest, and nothing that grows with the rows: they are in the page cache, which all processes of a
node share and the kernel takes back when it needs room. A dataset that is larger than memory is read by the page.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.kinds import kind_of
from trainer.data.manifest import DatasetError, read_dataset_manifest
from trainer.data.shard_cache import (
    CACHE_VERSION,
    HashedFile,
    default_cache_dir,
    is_whole,
    open_cache,
    own_file,
    write_record,
)
from trainer.documents.places import PlaceError, inside
from trainer.storage.open import open_storage

_BUFFER = 1 << 20


class CachedArrays(ABC):
    """The manifest of one dataset, and its arrays once `open_arrays` was called."""

    kind: ClassVar[str]
    """That of the datasets that this class reads, see `trainer.data.kinds`."""

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

    def open_arrays(self, cache_dir: str | os.PathLike[str] | None) -> tuple[Path, dict[str, Any]]:
        """Return the folder of the arrays, which are unpacked where they are missing, and a memory map of each. Raise
        `DatasetError` for a shard that is missing or damaged, OSError where the disk is full."""
        folder = self._cached(Path(cache_dir) if cache_dir else default_cache_dir())
        return folder, {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}

    @property
    def rows(self) -> int:
        """The number of rows of all shards."""
        return sum(shard["rows"] for shard in self.manifest["shards"])

    def _cached(self, cache_dir: Path) -> Path:
        """Return the folder of this dataset's arrays; the first process of a node makes it, under a lock."""
        name, content = self.manifest["dataset_id"], self.content_digest()
        folder = open_cache(cache_dir) / f"{name}-v{CACHE_VERSION}"
        if is_whole(folder, content):
            return folder
        from filelock import FileLock  # not above: most ranks find the arrays made

        with FileLock(cache_dir / f"{folder.name}.lock", fallback_to_soft=False):
            if is_whole(folder, content):
                return folder
            shutil.rmtree(cache_dir / f"{name}-v1", ignore_errors=True)  # of an earlier version, which checked less
            shutil.rmtree(folder, ignore_errors=True)
            for abandoned in cache_dir.glob(f"{folder.name}-*"):  # by a process that was killed: we hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache_dir))
            try:
                write_record(building, content, self._convert(building))
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        return folder

    def _convert(self, folder: Path) -> dict[str, str]:
        """Shards to npy, some rows at a time; file name → sha256. Written as files, not through a map: that room on the
        disk is missing is an error then, and not a killed process."""
        import pyarrow as pa

        shapes = self.array_shapes()
        converted = 0
        try:
            with ExitStack() as stack:
                files = {
                    name: HashedFile(stack.enter_context(own_file(folder / f"{name}.npy", _BUFFER))) for name in shapes
                }
                for name, (kind, shape) in shapes.items():
                    _write_header(files[name], kind, shape)
                for shard in self.manifest["shards"]:
                    with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as opened:
                        handle = opened.enter_context(self._verified(shard, Path(scratch)))
                        for part in self.read_shard(handle, shard):
                            for name, (kind, _) in shapes.items():
                                files[name].write(np.ascontiguousarray(part[name], dtype=kind).data)
                            converted += len(part[next(iter(shapes))])
                digests = {f"{name}.npy": file.finish() for name, file in files.items()}
        except (pa.ArrowException, KeyError) as error:
            raise DatasetError(f"{self.storage.uri}: a shard does not match its manifest ({error})") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            reason = f"no room to unpack the dataset ({error.strerror}); point DTRAIN_CACHE to a folder with more"
            raise OSError(error.errno, reason, str(folder)) from error
        if converted != self.rows:
            raise self.miscounted(self.rows, converted)
        return digests

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


def _write_header(file: HashedFile, kind: type, shape: tuple[int, ...]) -> None:
    """Write the header of an npy file whose content follows."""
    description = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(cast(IO[bytes], file), description)


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

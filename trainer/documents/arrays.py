"""Reading of ``.npz`` files that others have written: they are data, and are checked before an array is made."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_VALUES = 200_000_000
"""In all arrays of a file together."""
_MOST_MEMBERS = 64


class ArraysError(ValueError):
    """An error for a file of arrays that cannot be used. The message continues after the file's name."""


def read_arrays(
    source: bytes | str | os.PathLike[str], names: Iterable[str] | None = None, most_values: int = MOST_VALUES
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` file by name, all or ``names``; numbers or truth values only.

    Raise `ArraysError` if the file is no ``.npz``, lacks a name, holds objects or texts, is shorter than its headers
    say, or has more than ``most_values`` in all. Nothing is unpickled, and no memory is allocated by a header alone.
    """
    found: dict[str, NDArray[Any]] = {}
    left = most_values
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()[:_MOST_MEMBERS]}
            for name in members if names is None else names:
                if name not in members:
                    raise ArraysError(f"has no array {name!r}")
                with archive.open(members[name]) as file:
                    shape, dtype = _header(name, file)
                    count = int(np.prod(shape, dtype=object)) if shape else 1
                    if count > left:
                        raise ArraysError(f"holds more than {most_values:,} values: {name} has the shape {shape}")
                    left -= count
                    data = file.read(count * dtype.itemsize)
                    if len(data) != count * dtype.itemsize:
                        raise ArraysError(f"promises {count:,} values in {name}, but ends before")
                found[name] = np.frombuffer(data, dtype).reshape(shape)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, KeyError) as error:
        raise ArraysError(f"is not a file of arrays: {error}") from error
    except ValueError as error:
        if isinstance(error, ArraysError):
            raise
        raise ArraysError(f"is not a file of arrays: {error}") from error
    except Exception as error:  # zlib.error and its like, of a damaged member
        raise ArraysError(f"cannot be unpacked: {error}") from error
    return found


def _header(name: str, file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ArraysError(f"holds {dtype} in {name}; expected numbers")
    if fortran and len(shape) > 1:
        raise ArraysError(f"holds {name} in an order other than row by row")
    if any(size < 0 for size in shape):
        raise ArraysError(f"holds {name} with the shape {shape}")
    return shape, dtype

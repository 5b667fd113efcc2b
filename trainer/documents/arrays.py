"""Reading of ``.npz`` files that others have written: nothing in them is unpickled."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_VALUES = 200_000_000
"""In all arrays of a file together."""
_VALUE_BYTES, _HEADER_BYTES = 8, 1 << 12


class ArraysError(ValueError):
    """An error for a file of arrays that cannot be used. The message continues after the file's name."""


def read_arrays(
    source: bytes | str | os.PathLike[str], names: Iterable[str] | None = None, most_values: int = MOST_VALUES
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` file by name, all or ``names``; numbers or truth values only.

    Raise `ArraysError` if the file is no ``.npz``, lacks a name, holds objects or texts, is shorter than its headers
    say, or has more than ``most_values`` in all.
    """
    try:
        with np.load(io.BytesIO(source) if isinstance(source, bytes) else source, allow_pickle=False) as archive:
            size = sum(max(0, info.file_size - _HEADER_BYTES) for info in archive.zip.infolist())
            if size > most_values * _VALUE_BYTES:
                raise ArraysError(f"holds more than {most_values:,} values")
            wanted = list(archive.files if names is None else names)
            if missing := [name for name in wanted if name not in archive.files]:
                raise ArraysError(f"has no array {missing[0]!r}")
            found = {name: archive[name] for name in wanted}
    except ArraysError:
        raise
    except Exception as error:  # as varied as the damage: of the archive, of what it packs, of a header
        raise ArraysError(f"is not a file of arrays: {error}") from error
    for name, values in found.items():
        kind = getattr(values, "dtype", None)
        if kind is None or kind.kind not in "biuf" or kind.itemsize > _VALUE_BYTES:
            raise ArraysError(f"holds {kind or 'something else'} in {name}; expected numbers")
    if (count := sum(math.prod(values.shape) for values in found.values())) > most_values:
        raise ArraysError(f"holds {count:,} values, more than {most_values:,}")
    return found

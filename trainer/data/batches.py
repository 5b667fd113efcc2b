"""The samples of a training step, as tensors in any structure: tuples, lists, mappings and dataclasses of tensors.

What a batch is made of, and what is looked for in one, belongs here; who reads samples, and when, does not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.coverage import SAMPLES, StreamPlace
from trainer.runtime.nested import leaves_of, map_leaves


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one micro-batch."""

    number: int
    """The place of the micro-batch among those of its step."""
    count: int
    data: Any
    """What the collate function made of ``count`` samples. Of windows: raw windows (count, W, F) and targets
    (count,)."""
    place: int = 0
    """The place among the parts of that micro-batch, where it does not go through the model as a whole."""
    positions: Any = None
    """Positions of the samples within the training split (count,), or `trainer.data.on_device.Places`; None where
    they are not known."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of a global batch, which may still be on its way to the device."""

    samples: int
    """In the global batch, over all ranks."""
    micro_batches: tuple[Samples, ...]
    """Those of this rank."""
    digest: int
    """The digest of this rank's samples, see `trainer.data.coverage`."""
    kind: str = SAMPLES
    """What the digest is of."""
    place: StreamPlace | None = None
    """Where a stream is after this batch; None for samples with positions."""
    largest: int | None = None
    """The samples of its largest micro-batch, on whichever rank; None: the micro-batches are cut evenly."""
    stand_in: Samples | None = None
    """What a rank computes whose sub-streams have ended, while others have samples: its result counts for nothing, but
    ranks sum gradients together."""

    @property
    def passes(self) -> tuple[Samples, ...]:
        """Return what goes through the model: this rank's samples, or what stands in for them."""
        return self.micro_batches if self.stand_in is None else (self.stand_in,)

    @property
    def local_samples(self) -> int:
        """Return the number of this rank's samples."""
        return sum(part.count for part in self.micro_batches)


def move_to(data: Any, device: torch.device) -> Any:
    """Return the same structure with its tensors on this device, and objects of other kinds as their own ``to`` moves
    them; other parts stay as they are."""

    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if type(data) is dict:
        return {name: move_to(part, device) for name, part in data.items()}
    if type(data) in (list, tuple):
        if all(type(part) in _PLAIN for part in data):  # such as the texts of a batch, of which there may be many
            return data
        return type(data)(move_to(part, device) for part in data)

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=True)
        return part.to(device) if callable(getattr(part, "to", None)) else part

    return map_leaves(move, data)


_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
"""The types of what is not moved."""


_WHOLE = "its batch"


def find_non_finite(data: Any, row: int, name: str = _WHOLE) -> tuple[str, float] | None:
    """Return (name of the part, value) of the first number in a row of a batch that is not finite, None where all are.
    ``name``: of the whole."""
    if isinstance(data, Tensor):
        if not (data.is_floating_point() or data.is_complex()) or data.layout is not torch.strided:
            return None
        if data.dim() == 0 or row >= len(data):
            return None
        values = data[row].flatten()
        odd = values[~torch.isfinite(values)]
        return (name, float(abs(odd[0]) if odd.is_complex() else odd[0])) if len(odd) else None
    if isinstance(data, np.ndarray):
        return find_non_finite(torch.from_numpy(data), row, name) if data.dtype.kind in "fc" else None
    found: list[tuple[str, float]] = []

    def look(part: Any, of: str) -> None:
        if not found and (odd := find_non_finite(part, row, of)) is not None:
            found.append(odd)

    if isinstance(data, Mapping):
        for key, part in data.items():
            look(part, f"{name}[{key!r}]")
    elif isinstance(data, list | tuple):
        is_pair = name == _WHOLE and len(data) == 2
        for number, part in enumerate(data):
            look(part, ("its inputs", "its target")[number] if is_pair else f"{name}[{number}]")
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            look(getattr(data, field.name), f"{name}.{field.name}")
    return found[0] if found else None


def find_odd_row(data: Any, losses: Tensor) -> tuple[int, str, float] | None:
    """Return (row, name of the part, value) of the first number of a batch that is not finite, None where all are.
    ``losses`` (n,): where some of them are not finite, only their rows are looked at."""
    odd = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    for row in odd or range(len(losses)):
        if (found := find_non_finite(data, row)) is not None:
            return row, *found
    return None


def digest_array(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Return sixteen hex digits over the type, shape and content of a tensor or an array."""
    content = f"{value.dtype}{tuple(value.shape)}".encode()
    if isinstance(value, np.ndarray):
        content += b"" if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    elif value.layout is torch.strided and not value.is_quantized and value.device.type != "meta":
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content += flat.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def update_digest(digest: Any, sample: Any, takes_bytes: bool = False) -> bool:
    """Add the content of a sample to a digest of `hashlib`, as far as its parts have bytes, and return whether any has.
    ``takes_bytes``: whether `bytes` count, and what has them."""
    has_content = False
    for part in leaves_of(sample):
        if isinstance(part, Tensor) and part.layout is torch.strided:
            part = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(part, np.ndarray | np.generic) and not part.dtype.hasobject:
            digest.update(np.ascontiguousarray(part).tobytes())
        elif isinstance(part, str | int | float | bool):
            digest.update(repr(part).encode())
        elif takes_bytes and isinstance(part, bytes):
            digest.update(part)
        elif takes_bytes and callable(getattr(part, "tobytes", None)):  # an image of PIL
            digest.update(part.tobytes())
        else:
            continue
        has_content = True
    return has_content

"""The files of a checkpoint: written in pieces, with their sha256; of a sharded model one by each rank of a replica.

    checkpoints/<folder>/part-0001-of-0004.pt    the part of place 1
    checkpoints/<folder>/part-0001-of-0004.json  its size and sha256, once it is complete

The rank of place 0 waits for the others' parts in storage, on the thread that writes, and writes the manifest last.

A part is what `torch.save` wrote of a dictionary: ``place`` and ``size`` (of the replica), ``rows`` (by kind:
``weights``, what the optimizer keeps, such as ``exp_avg``, and ``best`` where there are best weights; each by name of
the parameter), ``aliases`` (further names of shared parameters), ``scalars`` and ``options`` (of the optimizer), and
``buffers``, ``best_buffers``, ``order`` (the names of a state dict) and ``progress``, which are the same in each part.
Older parts have ``updates`` and ``groups`` instead of ``scalars`` and ``options``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from trainer.documents import schemas
from trainer.documents.reader import MARK_BYTES, read_document
from trainer.storage.base import Storage

PART_SECONDS = 300.0
"""How long the rank of place 0 waits for the parts of the others."""
_CHUNK, _SMALL = 4 << 20, 1 << 16


def part_name(place: int, size: int) -> str:
    """Return the file of the part at this place."""
    return f"part-{place:04d}-of-{size:04d}.pt"


def assemble(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state that these parts hold together, as an unsharded training saves it. Raise ValueError where parts
    are missing or do not belong together."""
    first = parts[0]
    places = [part["place"] for part in parts]
    if places != list(range(first["size"])) or any(part["progress"] != first["progress"] for part in parts):
        raise ValueError(f"its parts are those of places {places} of {first['size']}, or of different steps")

    def whole(kind: str, name: str) -> Tensor:
        return torch.cat([part["rows"][kind][name] for part in parts])

    def weights(kind: str, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {name: whole(kind, name) for name in first["rows"][kind]}
        values |= {alias: values[name] for alias, name in first["aliases"].items()} | buffers
        return {name: values[name] for name in first["order"]}

    kinds = [kind for kind in first["rows"] if kind not in ("weights", "best")]
    scalars, options = first.get("scalars"), first.get("options") or {"param_groups": first.get("groups")}
    if scalars is None:
        updates = torch.tensor(float(first["updates"]))
        scalars = {name: {"step": updates} for kind in kinds for name in first["rows"][kind]}
    optimizer = {
        place: scalars.get(name, {}) | {kind: whole(kind, name) for kind in kinds if name in first["rows"][kind]}
        for place, name in enumerate(first["rows"]["weights"])
    }
    state = {
        "model": weights("weights", first["buffers"]),
        "step": {"optimizer": {"state": {k: v for k, v in optimizer.items() if v}, **options}, "scaler": {}},
        "progress": first["progress"],
        "grown": first.get("grown", {}),
    }
    if "best" in first["rows"]:
        state["best"] = weights("best", first["best_buffers"])
    return state


@dataclass(frozen=True, slots=True)
class Part:
    """A place among those whose parts are a checkpoint."""

    place: int
    size: int


def part_of(state: Mapping[str, Any]) -> Part | None:
    """Return which part of a sharded state this is, None if it is a whole state."""
    return Part(state["place"], state["size"]) if "rows" in state else None


def write_whole(storage: Storage, folder: str, state: Any) -> dict[str, Any]:
    """Write a whole state, and return its entry of the manifest."""
    return {"state.pt": write_file(storage, f"{folder}/state.pt", state)}


def write_part(storage: Storage, folder: str, part: Part, state: Any) -> dict[str, Any]:
    """Write a part and what describes it, unless it is there already; return its entry of the manifest."""
    name = part_name(part.place, part.size)
    known = _read_description(storage, folder, name)
    if known is None:
        known = write_file(storage, f"{folder}/{name}", state)
        with suppress(FileExistsError):  # this rank's own, of an attempt whose answer was lost
            storage.create(_description(folder, name), json.dumps(known).encode())
    return {name: known}


def wait_for_parts(storage: Storage, folder: str, part: Part, give_up: Callable[[], None]) -> dict[str, Any]:
    """Return the entries of all other places once their parts are complete. ``give_up`` is called now and then, and
    raises where they will not come. Raise TimeoutError after `PART_SECONDS`."""
    began, found = time.monotonic(), dict[str, Any]()
    missing = [part_name(place, part.size) for place in range(part.size) if place != part.place]
    pause = 0.05 if storage.is_local else 1.0
    while missing:
        for name in list(missing):
            described = _read_description(storage, folder, name)
            if described is not None:
                found[name] = described
                missing.remove(name)
        if missing:
            give_up()
            if time.monotonic() - began > PART_SECONDS:
                raise TimeoutError(f"{folder}/{missing[0]} was not written within {PART_SECONDS:g} s")
            time.sleep(pause)
    return found


def digest_file(file: IO[bytes]) -> tuple[int, str]:
    """Return the size and the sha256 of what is left of a file."""
    size, sha256 = 0, hashlib.sha256()
    while piece := file.read(_CHUNK):
        size += len(piece)
        sha256.update(piece)
    return size, sha256.hexdigest()


def write_file(storage: Storage, name: str, state: Any) -> dict[str, Any]:
    """Write what `torch.save` makes of a state, as it is made, and return its size (``bytes``) and ``sha256``, and its
    ``version_id`` where storage gives one."""
    with storage.stream(name) as file, ThreadPoolExecutor(1, thread_name_prefix="digest") as beside:
        writer: Any = _HashingWriter(file, beside)
        try:
            torch.save(state, writer)
        except Exception as error:
            raise writer.error or error from None  # torch tells what failed in words of its own
    described = {"bytes": writer.size, "sha256": writer.sha256.hexdigest()}
    version = getattr(file, "version_id", None)  # where storage keeps versions, and says which this is
    return described | ({"version_id": version} if version else {})


def _description(folder: str, name: str) -> str:
    return f"{folder}/{name.removesuffix('.pt')}.json"


def _read_description(storage: Storage, folder: str, name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = read_document(storage, _description(folder, name), schemas.PART, MARK_BYTES)
    return found


class _HashingWriter:
    """A file for `torch.save` that computes sha256 of what passes, beside the writing and without holding the GIL."""

    def __init__(self, file: IO[bytes], beside: Executor) -> None:
        self.file, self._beside = file, beside
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        digested = self._beside.submit(self.sha256.update, view) if len(view) > _SMALL else None
        try:
            for start in range(0, len(view), _CHUNK):
                self.file.write(view[start : start + _CHUNK])
        except Exception as error:
            self.error = error
            raise
        finally:
            if digested is None:
                self.sha256.update(view)
            else:
                digested.result()  # the memory is the caller's again
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        self.file.flush()

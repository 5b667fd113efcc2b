"""Checkpoints in the run directory: written in the background, all or nothing, verified before they count, cleaned up.

    checkpoints/g0001-s000000100/state.pt       what `torch.save` wrote; of a sharded model `trainer.checkpoint.files`
    checkpoints/g0001-s000000100/manifest.json  sizes, sha256, who wrote it; last: what has none does not count
    checkpoints/LATEST.json, BEST.json          {"path": …, "step": …, "generation": …}, moved by compare-and-swap

Where storage keeps versions and names them (Azure Blob, if the account has versioning on), the manifest holds the
``version_id`` of each file, LATEST and BEST that of the manifest; elsewhere there are none.

A folder is made once, for its (generation, step), and never written again. LATEST says up to which folder checkpoints
count, and carries the newest generation that may write: who belongs to an older one cannot move it any more.
"""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import uuid
from collections.abc import Callable, Mapping
from itertools import islice
from typing import IO, Any

import torch
from torch import Tensor

from trainer.checkpoint.async_writer import Save, Writer
from trainer.checkpoint.files import Part, assemble, digest_file, part_of, wait_for_parts, write_part, write_whole
from trainer.checkpoint.manifest import NO_MANIFEST, position_of, read_checkpoint_manifest
from trainer.differences import describe_difference, list_differences
from trainer.documents import schemas
from trainer.documents.reader import MARK_BYTES, parse_document
from trainer.errors import ConfigError, DamagedError
from trainer.rundir import CHECKPOINTS, RunDir
from trainer.storage.base import Storage

LATEST = f"{CHECKPOINTS}/LATEST.json"
BEST = f"{CHECKPOINTS}/BEST.json"
LITTER_SECONDS = 3600.0
"""The age from which half-written files are removed: no process writes them any more."""
_FOLDER = re.compile(r"g(\d+)-s(\d+)$")
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written. The message names it and what is wrong with it."""


class FencedError(CheckpointError):
    """A newer generation writes the checkpoints now: what this one has does not count."""


class CheckpointManager:
    """A manager that saves, finds and loads the checkpoints of one job; rank 0 saves, and loads for all.

    ``fingerprint`` identifies what is trained (model, loss, dataset), and ``parts`` say more of it, as JSON; a
    checkpoint of something else is refused, by the name of the part that differs.

    ``report`` is called by the writer's thread with ``"checkpoint"`` (step, path, seconds, stall_seconds, is_best,
    bytes) for a checkpoint that counts from now on and ``"checkpoint_failed"`` (step, attempt, message, gives_up) for
    each attempt that failed. `save` reports a failure too, of a writer that has been silent for half a minute.
    """

    def __init__(
        self,
        rundir: RunDir,
        keep: int,
        fingerprint: str,
        report: Callable[..., None] | None = None,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        self.storage = rundir.storage
        self.storage.require_compare_and_swap()
        self.keep = keep
        self.fingerprint, self.parts = fingerprint, json.loads(json.dumps(dict(parts or {})))
        self.id = uuid.uuid4().hex
        self._report = report or (lambda kind, **fields: None)
        self._committed: int | None = None
        self._counted: set[str] = set()
        self._fence: tuple[int, tuple[int, int]] | None = None
        """The generation that we fenced for, and the (generation, step) of the last checkpoint that counted then."""
        self._leads = 0
        """The newest generation that this process has fenced for."""
        self._writer = Writer(self._commit, self._tell, final=(FencedError,))

    def save(
        self, state: dict[str, Any], step: int, generation: int, is_best: bool = False, is_last: bool = False
    ) -> bool:
        """Copy a state of tensors and plain values, and return; it is written in the background, in order.

        False if nothing was taken, since one is being written and another waits already. The one that waits gives way
        to a new best, and to the last of a training unless it is the best itself. Never raises for what storage does.
        To be called from one thread.
        """
        return self._writer.put(state, step, generation, is_best, is_last)

    @property
    def has_room(self) -> bool:
        """Whether `save` would take a state without giving up another."""
        return self._writer.has_room

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all that was taken counts or was given up; False if it takes longer than that."""
        return self._writer.wait(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Wait for what was taken, though no longer than that, and end the thread."""
        self._writer.close(seconds)

    def committed_step(self) -> int | None:
        """Return the step of the newest checkpoint that this manager has made count, None if there is none."""
        return self._committed

    def fence(self, generation: int) -> None:
        """Let no older generation write checkpoints that count any more; rank 0 of a new one, before its first step.

        A state that this process has saved already, as a member of an older generation, still counts once it is
        written. Raise `FencedError` if there is a newer generation; storage that fails is only reported, since the next
        checkpoint fences as well.
        """
        self._writer.promote(generation)
        self._leads = generation
        try:
            self._fence = generation, _order(self._move(LATEST, None, lambda: generation)["path"])
            self._move(BEST, None, lambda: generation)
        except FencedError:
            raise
        except Exception as error:
            _log.warning("could not fence the checkpoints for generation %d: %s", generation, error)
            self._tell("checkpoint_failed", step=None, attempt=1, message=f"fencing: {error}", gives_up=False)

    def clean_up(self, generation: int) -> None:
        """Delete what counts no more, as each save does; at the end for a start that had nothing to save."""
        try:
            self._prune(generation)
        except Exception as error:
            _log.warning("could not delete old checkpoints: %s", error)

    def load_latest(self) -> tuple[str, dict[str, Any]] | None:
        """Return (folder, state) of the newest usable checkpoint, None if there is none. Log those passed over.

        Raise `ConfigError` if all that are whole belong to another training, and `CheckpointError` if none could be
        used and storage would not let some be read: they may be good.
        """
        latest = self._read_pointer(LATEST)[0]
        foreign: ConfigError | None = None
        unreadable: OSError | None = None
        for folder in self.folders():
            if latest.get("path") and _order(folder) > _order(latest["path"]):
                _log.warning("the checkpoint %s was never committed; using the one before it", folder)
                continue
            try:
                state = self.load(folder)
                if foreign:
                    _log.warning("%s; using the one before it", foreign)
                return folder, state
            except OSError as error:  # before ConfigError: storage that does not let us in raises both in one
                unreadable = unreadable or error
                _log.warning("the checkpoint %s cannot be read (%s); using the one before it", folder, error)
            except ConfigError as error:
                foreign = foreign or error
            except CheckpointError as error:
                _log.warning("%s; using the one before it", error)
        if unreadable:
            raise CheckpointError(f"no checkpoint in {self.storage.uri}/{CHECKPOINTS} can be read: {unreadable}")
        if foreign:
            raise foreign
        return None

    def refuse_others(self) -> tuple[int, int] | None:
        """Return (epoch, samples used of it) of the newest checkpoint, None where there is none that says so. Raise
        `ConfigError` if there are checkpoints, and all of them belong to another training."""
        foreign: ConfigError | None = None
        for folder in self.folders():
            try:
                manifest = read_checkpoint_manifest(self.storage, folder)
                self._refuse_other(folder, manifest)
                return position_of(manifest)
            except ConfigError as error:
                foreign = foreign or error
            except (OSError, *NO_MANIFEST):
                continue
        if foreign:
            raise foreign
        return None

    def load_best(self) -> tuple[str, dict[str, Any]]:
        """Return (folder, state) of the best checkpoint by validation. Raise `CheckpointError` if it is gone or
        damaged."""
        folder = self._read_pointer(BEST)[0].get("path")
        if not folder:
            raise CheckpointError(f"{self.storage.uri}/{BEST} is gone, and with it the best weights")
        return folder, self.load(folder)

    def load(self, folder: str) -> dict[str, Any]:
        """Return the state in a folder, on the CPU, with the sha256 of its manifest; nothing live is touched.
        Raise `CheckpointError` for a damaged one, `ConfigError` for one of another training, OSError if storage fails.
        """
        try:
            manifest = read_checkpoint_manifest(self.storage, folder)
            states = [self._load_file(folder, manifest, name) for name in sorted(manifest["files"])]
        except NO_MANIFEST as error:
            raise CheckpointError(f"the checkpoint {folder} is incomplete ({error!r})") from error
        try:
            return assemble(states) if part_of(states[0]) else states[0]
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint {folder} is incomplete: {error}") from error

    def _load_file(self, folder: str, manifest: dict[str, Any], name: str) -> dict[str, Any]:
        expected = manifest["files"][name]
        with self._open(f"{folder}/{name}") as file:
            if digest_file(file) != (expected["bytes"], expected["sha256"]):
                raise CheckpointError(f"the checkpoint {folder} is damaged: its sha256 is not the one in its manifest")
            self._refuse_other(folder, manifest)
            file.seek(0)
            try:
                state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
                return state
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                raise CheckpointError(f"the checkpoint {folder} was not written by this trainer: {error}") from error

    def _refuse_other(self, folder: str, manifest: dict[str, Any]) -> None:
        """Raise `ConfigError` for a checkpoint of another training. Older versions did not write its parts."""
        found = list_differences(manifest["parts"], self.parts) if manifest.get("parts") and self.parts else {}
        if found:
            differs = "; ".join(describe_difference(name, *values) for name, values in islice(found.items(), 3))
        elif manifest["fingerprint"] != self.fingerprint:
            differs = "its model, loss or dataset differ"
        else:
            return
        raise ConfigError(
            f"the checkpoint {self.storage.uri}/{folder} belongs to another training ({differs}): use another run "
            "directory, or training.resume=false to start over"
        )

    def _open(self, name: str) -> IO[bytes]:
        try:
            return self.storage.open(name)
        except DamagedError as error:
            raise OSError(errno.EIO, error.what, name) from error

    def folders(self) -> list[str]:
        """Return the folders of checkpoints, the newest first: of the latest generation, the furthest step.

        Generation comes before step: after a start from scratch in a used folder, the old ones are further and older.
        """
        names = (name for name in self.storage.list(CHECKPOINTS) if _FOLDER.match(name))
        return sorted((f"{CHECKPOINTS}/{name}" for name in names), key=_order, reverse=True)

    def _tell(self, kind: str, **fields: Any) -> None:
        try:
            self._report(kind, **fields)
        except Exception:  # it must not end the thread
            _log.exception("could not report %s", kind)

    def _commit(self, save: Save) -> dict[str, Any]:
        """Write a save, make it count and clean up: one attempt, which may be repeated. What is to be reported."""
        folder = f"{CHECKPOINTS}/g{save.generation:04d}-s{save.step:09d}"
        self._raise_if_fenced(save)
        part = part_of(save.state)
        if part and part.place:  # the rank of place 0 makes it count
            written = write_part(self.storage, folder, part, save.state)
            return {"path": folder, "bytes": _bytes({"files": written})}
        size, version = self._write(folder, save)
        self._move(LATEST, folder, lambda: save.authority, version)
        self._counted.add(folder)
        if save.is_best:
            self._move(BEST, folder, lambda: save.authority, version)
        self._committed = save.step
        self.clean_up(save.authority)
        return {"path": folder, "bytes": size}

    def _write(self, folder: str, save: Save) -> tuple[int, str | None]:
        """Fill a fresh folder, its manifest last; bytes of the state, and the version that the manifest was given."""
        try:
            manifest = read_checkpoint_manifest(self.storage, folder)
            if manifest.get("writer") != self.id:
                raise FencedError(f"the checkpoint {folder} already exists and was written by another process")
            if _is_whole(self.storage, folder):  # saved as the best before, or all but LATEST went well
                return _bytes(manifest), None
        except NO_MANIFEST:
            pass
        part = part_of(save.state)
        if not part and self.storage.exists(folder):
            _delete(self.storage, folder)  # what a failed attempt has left
        files = write_whole(self.storage, folder, save.state) if not part else self._write_all(folder, save, part)
        manifest = {
            "step": save.step,
            "generation": save.generation,
            "fingerprint": self.fingerprint,
            "parts": self.parts,
            "writer": self.id,
            "position": _position_of(save.state),
            "files": files,
        }
        self._raise_if_fenced(save)
        try:
            made = self.storage.create(f"{folder}/manifest.json", json.dumps(manifest, indent=2).encode())
        except FileExistsError as error:
            raise FencedError(f"the checkpoint {folder} already exists and was written by another process") from error
        return _bytes(manifest), made

    def _write_all(self, folder: str, save: Save, part: Part) -> dict[str, Any]:
        """Write this rank's part, and return the files of all parts once they are there."""

        def give_up() -> None:
            self._raise_if_fenced(save)
            if self._leads > save.generation:
                raise FencedError(f"parts of the checkpoint {folder} were not written before their ranks were lost")

        return write_part(self.storage, folder, part, save.state) | wait_for_parts(self.storage, folder, part, give_up)

    def _raise_if_fenced(self, save: Save) -> None:
        newest = self._read_pointer(LATEST)[0]["generation"]
        if newest > save.authority:
            raise FencedError(
                f"generation {newest} writes the checkpoints now: the one of generation {save.generation}, step "
                f"{save.step} is ignored"
            )

    def _read_pointer(self, name: str) -> tuple[dict[str, Any], bytes | None]:
        """Return LATEST or BEST, and its bytes. A missing or invalid one points nowhere and fences no generation."""
        nowhere: dict[str, Any] = {"path": None, "step": None, "generation": 0}
        try:
            data = self.storage.read_bounded(name, MARK_BYTES)
        except FileNotFoundError:
            return nowhere, None
        except DamagedError as error:  # no regular file, or none of ours: nothing can be swapped for it
            _log.warning("%s; it is removed", error)
            self.storage.delete(name)
            return nowhere, None
        try:
            pointer = {**nowhere, **parse_document(data, name, schemas.DOCUMENTS[name])}
            if pointer["path"] is not None:
                _order(pointer["path"])
            return {**pointer, "generation": int(pointer["generation"])}, data
        except (ValueError, TypeError):
            _log.warning("%s/%s is damaged and will be replaced", self.storage.uri, name)
            return nowhere, data

    def _move(
        self, name: str, folder: str | None, authority: Callable[[], int], version: str | None = None
    ) -> dict[str, Any]:
        """Let LATEST or BEST point to a folder (None: the same one) on behalf of a generation; return the new pointer.
        Raise `FencedError` if there is a newer one."""
        while True:
            pointer, data = self._read_pointer(name)
            generation = authority()
            if pointer["generation"] > generation:
                raise FencedError(
                    f"generation {pointer['generation']} writes the checkpoints now: {folder or 'the fence'} of "
                    f"generation {generation} is ignored"
                )
            if folder:
                pointer.update(path=folder, step=_order(folder)[1])
                pointer.pop("manifest_version_id", None)
                if version:
                    pointer["manifest_version_id"] = version
            pointer["generation"] = generation
            if self.storage.compare_and_swap(name, data, json.dumps(pointer).encode()):
                return pointer

    def _prune(self, generation: int) -> None:
        """Delete what is not needed: all whole ones but the newest ``keep`` and the best, what is not whole, and what
        older generations wrote after they were fenced out. Newer generations clean up after themselves, and what is
        further than LATEST in this one stays: other ranks may just be writing their parts of it."""
        latest, best = (self._read_pointer(name)[0]["path"] for name in (LATEST, BEST))
        needed = {latest, best}
        whole: list[str] = []
        rest: list[str] = []
        for folder in self.folders():
            late = self._fence and self._fence[1] < _order(folder) < (self._fence[0], 0) and folder not in self._counted
            (rest if late or not _is_whole(self.storage, folder) else whole).append(folder)
        if not whole:
            return
        unwanted = whole[self.keep :] + [each for each in rest if not _order(latest) < _order(each) >= (generation, 0)]
        for folder in unwanted:
            if folder not in needed and _order(folder)[0] <= generation:
                try:
                    _delete(self.storage, folder)
                except OSError as error:
                    _log.warning("could not delete the old checkpoint %s: %s", folder, error)
        self.storage.sweep(CHECKPOINTS, LITTER_SECONDS)


def check_fits(state: dict[str, Any], like: dict[str, Any], name: str = "") -> None:
    """Raise `CheckpointError` with the name of the first tensor whose key, shape or dtype is not that of ``like``."""
    for key in [*like, *(key for key in state if key not in like)]:
        path = f"{name}.{key}" if name else str(key)
        if key not in like or key not in state:
            where = "model has" if key in like else "checkpoint has"
            raise CheckpointError(
                f"{path} does not fit: only the {where} it. The model has changed since: train under another name"
            )
        old, new = like[key], state[key]
        if isinstance(old, dict) and isinstance(new, dict):
            check_fits(new, old, path)
        elif isinstance(old, Tensor) != isinstance(new, Tensor) or isinstance(old, dict) != isinstance(new, dict):
            raise CheckpointError(f"{path} does not fit: {type(new).__name__} instead of {type(old).__name__}")
        elif isinstance(old, Tensor) and (old.shape != new.shape or old.dtype != new.dtype):
            raise CheckpointError(
                f"{path} does not fit: {tuple(new.shape)} {new.dtype} in the checkpoint, {tuple(old.shape)} "
                f"{old.dtype} in the model"
            )


def _position_of(state: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the epoch that a training has come to, and the samples used of it; None before the first step."""
    [*_, last] = state.get("progress", {}).get("consumed") or [None]
    return last and {"epoch": last["epoch"], "samples": last["samples"]}


def _bytes(manifest: dict[str, Any]) -> int:
    return sum(int(file["bytes"]) for file in manifest["files"].values())


def _order(folder: str | None) -> tuple[int, int]:
    """(generation, step) of a folder, (0, 0) of none. ValueError if it is not that of a checkpoint."""
    if folder is None:
        return 0, 0
    match = _FOLDER.search(folder)
    if not match:
        raise ValueError(f"{folder} is no checkpoint")
    return int(match[1]), int(match[2])


def _is_whole(storage: Storage, folder: str) -> bool:
    """Return whether it has a manifest, and files of the sizes in it. Raise OSError if storage fails."""
    try:
        files = read_checkpoint_manifest(storage, folder)["files"]
        return all(storage.size(f"{folder}/{name}") == file["bytes"] for name, file in files.items())
    except NO_MANIFEST:
        return False


def _delete(storage: Storage, folder: str) -> None:
    """Delete a checkpoint, its manifest first: half deleted, it must not look whole."""
    if storage.exists(f"{folder}/manifest.json"):
        storage.delete(f"{folder}/manifest.json")
    storage.delete(folder)

"""Checkpoints in the run directory: written all or nothing, verified before they count, cleaned up.

    checkpoints/g0001-s000000100/state.pt       what `torch.save` wrote
    checkpoints/g0001-s000000100/manifest.json  sizes and sha256, written last: without it the folder does not count
    checkpoints/LATEST.json, BEST.json          {"path": …, "step": …}

A folder is made once, for its (generation, step), and never written again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from typing import Any

import torch

from trainer.config import ConfigError
from trainer.rundir import CHECKPOINTS, RunDir

LATEST = f"{CHECKPOINTS}/LATEST.json"
BEST = f"{CHECKPOINTS}/BEST.json"
_FOLDER = re.compile(r"g(\d+)-s(\d+)$")
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used. The message names its folder and what is wrong with it."""


class CheckpointManager:
    """Saves, finds and loads the checkpoints of one job; rank 0 saves, every rank loads.

    ``fingerprint`` says what is trained (model, loss, dataset); a checkpoint of something else is refused. The folders
    themselves say what there is; LATEST tells others, BEST tells the one that counts by validation.
    """

    def __init__(self, rundir: RunDir, keep: int, fingerprint: str) -> None:
        self.storage = rundir.storage
        self.keep = keep
        self.fingerprint = fingerprint

    def save(self, state: dict[str, Any], step: int, generation: int, is_best: bool = False) -> str:
        """Write a checkpoint and move LATEST (and BEST) to it; its folder. The state holds tensors and plain values."""
        folder = f"{CHECKPOINTS}/g{generation:04d}-s{step:09d}"
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        manifest = {
            "step": step,
            "generation": generation,
            "fingerprint": self.fingerprint,
            "files": {"state.pt": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}},
        }
        if not self.storage.exists(f"{folder}/manifest.json"):
            self.storage.write(f"{folder}/state.pt", data)
            self.storage.write(f"{folder}/manifest.json", json.dumps(manifest, indent=2).encode())
        pointer = json.dumps({"path": folder, "step": step}).encode()
        self.storage.write(LATEST, pointer)
        if is_best:
            self.storage.write(BEST, pointer)
        self._prune()
        return folder

    def load_latest(self) -> tuple[str, dict[str, Any]] | None:
        """(folder, state) of the newest checkpoint that is whole; a damaged one is named in the log and passed over.
        None if there is none. `ConfigError` for one of another training."""
        for folder in self.folders():
            try:
                return folder, self.load(folder)
            except _DamagedError as error:
                _log.warning("%s; using the one before it", error)
        return None

    def load_best(self) -> tuple[str, dict[str, Any]]:
        """(folder, state) of the best checkpoint by validation. `CheckpointError` where it is gone or damaged."""
        try:
            folder = json.loads(self.storage.read(BEST))["path"]
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.storage.uri}/{BEST} is gone, and with it the best weights") from error
        return folder, self.load(folder)

    def load(self, folder: str) -> dict[str, Any]:
        """The state in a folder, on the CPU, once its sha256 is what the manifest says; nothing live is touched.

        `CheckpointError` for a damaged one, `ConfigError` for one of another training.
        """
        try:
            manifest = json.loads(self.storage.read(f"{folder}/manifest.json"))
            data = self.storage.read(f"{folder}/state.pt")
            expected, fingerprint = manifest["files"]["state.pt"], manifest["fingerprint"]
        except (FileNotFoundError, json.JSONDecodeError, KeyError) as error:
            raise _DamagedError(f"the checkpoint {folder} is incomplete ({error!r})") from error
        if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise _DamagedError(f"the checkpoint {folder} is damaged: its sha256 is not the one in its manifest")
        if fingerprint != self.fingerprint:
            raise ConfigError(
                f"the checkpoint {self.storage.uri}/{folder} belongs to another training (its model, loss or dataset "
                "differ): use another run directory, or training.resume=false to start over"
            )
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    def folders(self) -> list[str]:
        """Folders of checkpoints, the newest first: of the latest generation, the furthest step.

        Generation comes before step: after a start from scratch in a used folder, the old ones are further and older.
        """
        found = []
        for name in self.storage.list(CHECKPOINTS):
            match = _FOLDER.match(name)
            if match:
                found.append((int(match[1]), int(match[2]), f"{CHECKPOINTS}/{name}"))
        return [folder for _, _, folder in sorted(found, reverse=True)]

    def _prune(self) -> None:
        """Delete all but the newest ``keep`` and the best. A delete that fails is reported, and training goes on."""
        try:
            best = json.loads(self.storage.read(BEST))["path"]
        except FileNotFoundError:
            best = None
        for folder in self.folders()[self.keep :]:
            if folder != best:
                try:
                    self.storage.delete(folder)
                except OSError as error:
                    _log.warning("could not delete the old checkpoint %s: %s", folder, error)


class _DamagedError(CheckpointError):
    pass

"""The checkpoints that a job keeps, as its page lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import DamagedError
from trainer.rundir import CHECKPOINTS, RunDir

MOST = 50
"""The most checkpoints that are read; a job keeps a handful."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that can be resumed from."""

    folder: str
    """In the run directory."""
    step: int
    generation: int
    bytes: int
    saved_at: float | None
    """Unix time; None where no event told it."""
    marks: tuple[str, ...]
    """``latest``: the job resumes from it; ``best``: the model is taken from it."""


def list_checkpoints(rundir: RunDir, saved_at: Mapping[int, float]) -> list[Checkpoint]:
    """Return the complete checkpoints of a job, the newest first. ``saved_at``: the time of each step's save, as far as
    it is known. A damaged one is left out: the trainer does not resume from it either."""
    named = {"latest": _named(rundir, "LATEST.json"), "best": _named(rundir, "BEST.json")}
    found = []
    for name in sorted(rundir.storage.list(CHECKPOINTS), reverse=True)[:MOST]:
        folder = f"{CHECKPOINTS}/{name}"
        manifest = _read(rundir, f"{folder}/manifest.json")
        step, generation, files = (manifest.get(key) for key in ("step", "generation", "files"))
        if not isinstance(step, int) or not isinstance(generation, int) or not isinstance(files, Mapping):
            continue
        sizes = [item.get("bytes") for item in files.values() if isinstance(item, Mapping)]
        found.append(
            Checkpoint(
                folder=folder,
                step=step,
                generation=generation,
                bytes=sum(size for size in sizes if isinstance(size, int)),
                saved_at=saved_at.get(step),
                marks=tuple(mark for mark, path in named.items() if path == folder),
            )
        )
    return sorted(found, key=lambda item: (item.step, item.generation), reverse=True)


def _named(rundir: RunDir, name: str) -> str:
    return str(_read(rundir, f"{CHECKPOINTS}/{name}").get("path") or "")


def _read(rundir: RunDir, name: str) -> Mapping[str, Any]:
    try:
        found = rundir.read_json(name)
    except (DamagedError, OSError):
        return {}
    return found if isinstance(found, Mapping) else {}

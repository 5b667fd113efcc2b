"""A model's answers from a process of its own: the one way in which a model's own code runs where there are secrets.

The child (`trainer.isolation.child`) gets an environment of its own without any of them, an empty home, and files: a
folder with the model, and windows. Its time, memory and files are limited (`trainer.isolation.limited`). It gives
arrays back, which are checked here. It runs as this user: its code is of modules that were allowed.

`rehearse`: before nodes are bought, a model and a loss are built there and do a training step. What a training's own
data and nodes do is not seen so; a probe on the cluster shows that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from trainer.config import JobConfig
from trainer.documents.arrays import ArraysError, read_arrays
from trainer.performance.memory import MOMENTS, ModelBytes
from trainer.runtime.scratch import scratch_folder
from trainer.spec import ROWS, WINDOWS, DataSpec, RowSpec

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = 1024
"""The most columns of an answer."""
_SAID = 2000
"""The characters of a child's message that are shown."""
_REHEARSED_SAMPLES = 8
_REHEARSAL_SECONDS = 60.0
"""Seconds after which a rehearsal is given up without a verdict."""


class IsolationError(RuntimeError):
    """An error for a model that gave no usable answer. The message says why, and begins with ``the model …``."""

    def __init__(self, message: str, is_of_machine: bool = False) -> None:
        """``is_of_machine``: the reason is one that another machine need not share: memory, files, networks, packages,
        time."""
        super().__init__(message)
        self.is_of_machine = is_of_machine


class RehearsalError(ValueError):
    """A model or a loss that no rank could train. The message names the field and the remedy."""


class UnsureRehearsalError(RuntimeError):
    """A rehearsal that failed for a reason which nodes need not share."""

    model: ModelBytes | None = None
    """The bytes of the model, where they could be counted nevertheless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolated:
    """A model in a folder of its own, to be asked in a process of its own."""

    folder: Path
    """``model.json`` and ``weights.pt``, what MLflow has packed, or ``rehearsal.json``."""
    kind: Literal["job", "mlflow", "program", "rehearsal", "count"] = "job"
    modules: tuple[str, ...] = ()
    """Modules of which the factories of a job may be."""
    path: tuple[Path, ...] = ()
    """Folders in which the model's own code is found."""
    seconds: float = 300.0
    """The seconds after which the child is ended."""
    memory_bytes: int = field(default_factory=lambda: max(2 << 30, psutil.virtual_memory().total // 2))
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))

    def predict(self, windows: NDArray[Any] | pd.DataFrame) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for windows (n, window, features), or rows (n, columns); of what MLflow has packed,
        also for rows of a table by the names of its columns.

        Raise `IsolationError` if the model does not answer, takes too much time or memory, or gives anything else.
        """
        with scratch_folder("isolated") as scratch:
            given, answers, said = (scratch / each for each in ("windows", "answers.npz", "said.txt"))
            if isinstance(windows, np.ndarray):
                with open(given, "wb") as file:
                    np.save(file, windows)
            else:
                windows.to_parquet(given)
            (scratch / "home").mkdir()
            order = {
                "kind": self.kind,
                "model": str(self.folder),
                "modules": list(self.modules),
                "path": [str(path) for path in self.path],
                "windows": str(given),
                "answers": str(answers),
                "threads": self.threads,
            }
            (scratch / "order.json").write_text(json.dumps(order))
            self._run(scratch, said, file_bytes=len(windows) * _COLUMNS * 8 + (1 << 20))
            try:
                columns = read_arrays(answers, most_values=max(1, len(windows)) * _COLUMNS)
            except ArraysError as error:
                raise IsolationError(f"the model's answer {error}") from None
        return _checked(columns, len(windows))

    def _run(self, scratch: Path, said: Path, file_bytes: int) -> None:
        child = [sys.executable, "-I", str(Path(__file__).with_name("child.py")), str(scratch / "order.json")]
        cpu_seconds = int(self.seconds * max(1, self.threads)) + 1
        command = limit_command(child, self.memory_bytes, cpu_seconds, file_bytes)
        with open(said, "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=scratch / "home",
                env=clean_environment(scratch / "home", self.threads),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            code = process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            raise IsolationError(f"the model took longer than {self.seconds:g} s and was stopped", True) from None
        finally:
            kill_session(process)
        if code != 0:
            why = {-signal.SIGXCPU: "it used too much processor time", -signal.SIGKILL: "it was killed"}.get(code, "")
            why_not = why or last_words(said) or f"exit code {code}"
            raise IsolationError(f"the model could not be called: {why_not}", bool(why) or code == os.EX_TEMPFAIL)


def limit_command(command: Sequence[str], memory_bytes: int, cpu_seconds: int, file_bytes: int) -> list[str]:
    """Return a command that runs another one with limits, see `trainer.isolation.limited`."""
    limits = (str(limit) for limit in (os.getpid(), memory_bytes, cpu_seconds, file_bytes))
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("limited.py")), *limits, *command]


def clean_environment(home: Path, threads: int) -> dict[str, str]:
    """Return the whole environment of a child, which has nothing of this process's own."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "USER": "nobody",
        "OMP_NUM_THREADS": str(threads),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def last_words(said: Path) -> str:
    """Return the last line that a child printed, as printable text."""
    size = said.stat().st_size
    with open(said, "rb") as file:
        file.seek(max(0, size - 4 * _SAID))
        lines = [line for line in file.read(4 * _SAID).decode(errors="replace").splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)[-_SAID:]


def _checked(columns: dict[str, Any], count: int) -> dict[str, NDArray[np.float64]]:
    if not columns or len(columns) > _COLUMNS:
        raise IsolationError(f"the model's answer has {len(columns)} columns; expected 1 to {_COLUMNS}")
    for name, values in columns.items():
        if not name.isidentifier() or len(name) > 100:
            raise IsolationError(f"the model's answer has a column called {name[:100]!r}")
        if values.shape != (count,):
            raise IsolationError(f"the model's answer has the shape {values.shape} in {name}; expected {(count,)}")
        if not np.isfinite(values).all():
            raise IsolationError(f"the model's answer has values that are not finite in {name}")
    return {name: values.astype(np.float64) for name, values in columns.items()}


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and whatever is left of that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rehearse(
    job: JobConfig, spec: DataSpec | RowSpec, steps: int, modules: tuple[str, ...] = (), path: Sequence[Path] = ()
) -> ModelBytes:
    """Build the loss, the model and the optimizer of a job, do one training step on random samples of the dataset's
    scale, and return the bytes of the model.

    ``steps``: of the training; ``modules``: those that their factories may be of; ``path``: the
    folders in which they are found. Raise `RehearsalError` where the training could not work on any node, and
    `UnsureRehearsalError` where that cannot be said from here.
    """
    kind, inputs = random_inputs(spec)
    document = {"kind": kind, "job": job.to_json(), "steps": steps, "spec": asdict(spec)}
    try:
        return _ask("rehearsal", document, inputs, modules, path)
    except IsolationError as error:
        said = str(error).removeprefix("the model could not be called: ")
        if error.is_of_machine:
            unsure = UnsureRehearsalError(said)
            with contextlib.suppress(IsolationError):
                unsure.model = _ask("count", document, inputs, modules, path)
            raise unsure from None
        name, _, rest = said.partition("ConfigError: ")
        raise RehearsalError(rest if rest and not name else f"one training step of this model failed: {said}") from None


def _ask(
    kind: Literal["rehearsal", "count"],
    document: Mapping[str, Any],
    inputs: NDArray[np.float32],
    modules: tuple[str, ...],
    path: Sequence[Path],
) -> ModelBytes:
    with scratch_folder("rehearsal") as folder:
        (folder / "rehearsal.json").write_text(json.dumps(document))
        isolated = Isolated(folder=folder, kind=kind, modules=modules, path=tuple(path), seconds=_REHEARSAL_SECONDS)
        answers = isolated.predict(inputs)
    figures = {name: max(0.0, float(values[0])) for name, values in answers.items()}
    whole = {name: int(figures.get(name, 0)) for name in ("parameters", "trained", "block", "rest")}
    return ModelBytes(**whole, sample=figures.get("sample"), moments=figures.get("moments", MOMENTS))


def random_inputs(spec: DataSpec | RowSpec) -> tuple[str, NDArray[np.float32]]:
    """Return the kind of data, and the inputs of random samples of the dataset's scale. Pure."""
    random = np.random.default_rng(0)
    if isinstance(spec, DataSpec):
        mean, scale = (np.asarray(figures, dtype=np.float32) for figures in (spec.feature_mean, spec.feature_std))
        noise = random.standard_normal((_REHEARSED_SAMPLES, spec.window, len(spec.features)), dtype=np.float32)
        return WINDOWS, mean + scale * noise
    rows = random.standard_normal((_REHEARSED_SAMPLES, len(spec.features)), dtype=np.float32)  # as they are stored
    for place, values in enumerate(spec.categories):
        if values:
            rows[:, place] = random.integers(0, len(values) + 1, _REHEARSED_SAMPLES)
    return ROWS, rows

"""A model's answers from a process of its own: the one way in which a model's own code runs where there are secrets.

The child (`trainer.isolation.child`) gets an environment of its own without any of them, an empty home, and files: a
folder with the model, and windows. Its time, memory and files are limited (`trainer.isolation.limited`). It gives
arrays back, which are checked here. It runs as this user: its code is of modules that were allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from trainer.documents.arrays import ArraysError, read_arrays
from trainer.runtime.scratch import scratch_folder

_COLUMNS = 64
"""The most columns of an answer."""
_SAID = 2000
"""The characters of a child's message that are shown."""


class IsolationError(RuntimeError):
    """An error for a model that gave no usable answer. The message says why, and begins with ``the model …``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolated:
    """A model in a folder of its own, to be asked in a process of its own."""

    folder: Path
    """``model.json`` and ``weights.pt``, what MLflow has packed, or ``rehearsal.json``."""
    kind: Literal["job", "mlflow", "rehearsal", "count"] = "job"
    modules: tuple[str, ...] = ()
    """Modules of which the factories of a job may be."""
    path: tuple[Path, ...] = ()
    """Folders in which the model's own code is found."""
    seconds: float = 300.0
    """The seconds after which the child is ended."""
    memory_bytes: int = field(default_factory=lambda: max(2 << 30, psutil.virtual_memory().total // 2))
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))

    def predict(self, windows: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for windows (n, window, features), or rows (n, columns).

        Raise `IsolationError` if the model does not answer, takes too much time or memory, or gives anything else.
        """
        with scratch_folder("isolated") as scratch:
            given, answers, said = (scratch / each for each in ("windows.npy", "answers.npz", "said.txt"))
            np.save(given, np.asarray(windows))
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
            raise IsolationError(f"the model took longer than {self.seconds:g} s and was stopped") from None
        finally:
            kill_session(process)
        if code != 0:
            why = {-signal.SIGXCPU: "it used too much processor time", -signal.SIGKILL: "it was killed"}.get(code, "")
            raise IsolationError(f"the model could not be called: {why or last_words(said) or f'exit code {code}'}")


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

"""Nodes that are played: what their program would do comes as data in the command, and no process is started.

The command is ``played RUN_DIR STEPS``, steps a JSON list. Each of the job's processes takes them one after the other:

- ``{"say": TEXT}``: a line of its log; ``{RANK}``, ``{WORLD_SIZE}`` and the job's other variables are filled in;
- ``{"write": NAME, "content": OBJECT}``: a file of the run directory, by rank 0 alone;
- ``{"await": NAME}``: until the run directory has this file;
- ``{"stay": LAUNCH}``: for ever, in launches before this one; ``{"stay": null}``: in any;
- ``{"exit": CODE}``.

Their signals work at once, as on a process that does not catch them. What is about real processes (their logs, secrets,
signals and ends) is proven with real ones: see `harness.azure.emulator.nodes.Guarded`.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.azure.emulator.storage import Blobs
from trainer.runtime.launch import Launch

WORD = "played"
LOOK_SECONDS = 0.1
"""Between two looks for a file; of the real clock."""


def is_played(command: str) -> bool:
    return command.startswith(f"{WORD} ")


class Played:
    """The processes of a node, as `Guarded` has them."""

    def __init__(self, blobs: Blobs, command: str, environments: list[dict[str, str]], outputs: list[Path]) -> None:
        _, run_dir, steps = shlex.split(command)
        self.codes: dict[int, int] = {}
        self.pid = 0
        self._blobs, self._run_dir = blobs, run_dir
        self._left = {
            index: self._play(json.loads(steps), environment, output)
            for index, (environment, output) in enumerate(zip(environments, outputs, strict=True))
        }

    def gone(self) -> bool:
        """Has everything ended? Also goes on with what has not."""
        for index, steps in list(self._left.items()):
            if (code := next(steps)) is not None:
                self._end(index, code)
        return not self._left

    def end(self, grace_seconds: float) -> None:
        for index in list(self._left):
            self._end(index, -signal.SIGTERM if grace_seconds > 0 else -signal.SIGKILL)

    def close(self) -> None:
        self.end(0)

    def _place(self, name: str) -> tuple[str, str] | None:
        """Container and path of a file, None where the run directory is a folder of this machine."""
        container, _, folder = self._run_dir.removeprefix("az://").partition("/")
        return (container, f"{folder}/{name}") if self._run_dir.startswith("az://") else None

    def _write(self, name: str, data: bytes) -> None:
        if place := self._place(name):
            return self._blobs.upload(*place, data)
        part = Path(self._run_dir, f"{name}.tmp")
        part.write_bytes(data)
        part.rename(Path(self._run_dir, name))

    def _exists(self, name: str) -> bool:
        place = self._place(name)
        return self._blobs.exists(*place) if place else Path(self._run_dir, name).exists()

    def _end(self, index: int, code: int) -> None:
        self.codes[index] = code
        del self._left[index]

    def _play(self, steps: list[dict[str, Any]], environment: dict[str, str], output: Path) -> Iterator[int | None]:
        """None as often as it is asked before it ends, then its exit code."""
        output.touch()
        launch = Launch.read(environment).number
        for step in steps:
            if "say" in step:
                with output.open("a") as log:
                    print(step["say"].format_map({**environment, "LAUNCH": launch}), file=log)
            elif "write" in step:
                if environment["RANK"] == "0":
                    text = json.dumps(step["content"]).replace('"{LAUNCH}"', str(launch))
                    self._write(step["write"], text.encode())
            elif "await" in step:
                while not self._exists(step["await"]):
                    looked = time.monotonic()
                    while time.monotonic() - looked < LOOK_SECONDS:
                        yield None
            elif "stay" in step:
                while step["stay"] is None or launch < step["stay"]:
                    yield None
            elif "exit" in step:
                yield int(step["exit"])
            yield None
        yield 0

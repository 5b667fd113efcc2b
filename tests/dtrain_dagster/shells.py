"""A working folder with a home of its own, in which commands of `dtrain` run as a person gives them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from trainer.rundir import RunDir

DTRAIN = str(Path(sys.executable).parent / "dtrain")


class Shell:
    """The folder ``folder``, whose home is ``home``; ``env``: variables besides those of this process that are not
    dtrain's."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.home = folder, folder / "home"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
        self.env = inherited | {"DTRAIN_HOME": str(self.home)} | env

    def start(self, *arguments: str, program: tuple[str, ...] = (DTRAIN,)) -> subprocess.Popen[str]:
        pipe, command = subprocess.PIPE, [*program, *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Standard output and error of a command that must end with this exit code."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=200)
        assert process.returncode == code, out + err
        return out + err

    def interrupted(
        self, *arguments: str, when: str, number: signal.Signals = signal.SIGINT, **options: Any
    ) -> tuple[int, str, str]:
        """Exit code, output and messages of a command that gets Ctrl-C, as a terminal gives it to the whole group, once
        it, or its program, has printed this."""
        process = self.start(*arguments, **options)
        assert process.stdout
        while when not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def here(self, *arguments: str, code: int = 0, **env: str) -> str:
        """The same without a process of its own, for speed."""
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(main, arguments, env=self.env | env)
        assert done.exit_code == code, done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        return done.output

    def read(self, *arguments: str) -> Any:
        """The document that a command prints."""
        return json.loads(self.here(*arguments, "--json"))

    def refused(self, *arguments: str, **env: str) -> str:
        """What a command says that must refuse, with exit code 2."""
        return self.here(*arguments, code=2, **env)

    def job(self, name: str) -> RunDir:
        return RunDir(str(self.home / "storage" / "jobs" / name))

    def processes(self) -> list[psutil.Process]:
        """Whatever runs for the home, and scripts of the folder."""
        found = psutil.process_iter(["cmdline"])
        return [p for p in found if any(str(self.folder) in word for word in p.info["cmdline"] or [])]


@contextlib.contextmanager
def shell_in(folder: Path, **env: str) -> Iterator[Shell]:
    """Yield a shell, and kill at the end what it has left running."""
    made = Shell(folder, **env)
    try:
        yield made
    finally:
        for process in made.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

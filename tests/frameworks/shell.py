"""A folder to run `dtrain` in as a person does, with the scripts of examples/frameworks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.waiting import until
from trainer.frameworks.catalogue import FRAMEWORKS, explain_missing
from trainer.rundir import RunDir

SCRIPTS = Path(__file__).parents[2] / "examples" / "frameworks"
DTRAIN = "import sys; from dtrain_dagster.cli.main import main; sys.argv[0] = 'dtrain'; main()"
LIMIT_SECONDS = 900.0
"""The most seconds of a command: the first one of DeepSpeed compiles."""


def needs(engine: str) -> pytest.MarkDecorator:
    """Skip a test where a framework is not installed, and say how it is."""
    why = explain_missing(FRAMEWORKS[engine])
    return pytest.mark.skipif(bool(why), reason=why or "installed")


@dataclass
class Shell:
    """A working folder with a home of its own."""

    folder: Path
    env: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", DTRAIN, *arguments], cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What a command prints that must end with this exit code."""
        process = self.start(*arguments)
        said = process.communicate(timeout=LIMIT_SECONDS)[0]
        assert process.returncode == code, said
        return said

    def launch(self, engine: str, name: str, script: str, *arguments: str, nodes: int = 2, code: int = 0) -> str:
        """What `dtrain launch` prints of a script of the examples; nothing of it may be left then."""
        size = ["--nodes", str(nodes), *([] if engine in ("ray", "tensorflow") else ["--procs-per-node", "1"])]
        command = [sys.executable, str(SCRIPTS / script), *arguments]
        said = self("launch", "--engine", engine, "--name", name, *size, "--", *command, code=code)
        assert self.left() == []
        return said

    def rundir(self, name: str) -> RunDir:
        return RunDir(str(self.folder / "home" / "storage" / "jobs" / name))

    def assert_accounted(self, name: str, nodes: int) -> None:
        """Each node was there, is paid for, and its output is in the logs."""
        presence = self.rundir(name).nodes()
        assert sorted(node.node_id for node in presence) == list(range(nodes))
        assert all(node.ended_at is not None for node in presence)
        cost: dict[str, Any] = json.loads(self("cost", name, "--json"))
        assert cost["total_usd"] > 0
        assert [row["cause"] for row in cost["ledger"]] == ["script"]
        for node in range(nodes):
            assert f"node-{node}.log" in self("logs", name)

    def left(self) -> list[str]:
        """Processes that still run of any job of this home."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            with contextlib.suppress(psutil.Error):
                ours = any(str(self.folder) in word for word in words) or process.environ().get("DTRAIN_HOME") == str(
                    self.folder / "home"
                )
                if ours and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(" ".join(words)[:200])
        return found

    def wait_for(self, name: str, words: str, seconds: float = 400.0) -> str:
        """The logs of a job once they contain these words."""
        until(lambda: words in self("logs", name), lambda: self("logs", name), seconds, pause=0.5)
        return self("logs", name)

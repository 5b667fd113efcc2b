"""A folder to run `dtrain` in as a person does, in front of an emulated workspace, and a model of that person's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from harness.azure.emulator import ROOT, Emulator

DTRAIN = str(Path(sys.executable).parent / "dtrain")
JOBS = "az://dtrain/team/jobs"
MODEL = """
import time
from torch import nn


class Paced(nn.Linear):
    pause = 0.0

    def forward(self, x):
        time.sleep(self.pause)
        return super().forward(x.flatten(1))


def make(spec, outputs, pause=0.0):
    print("a model of my own", flush=True)
    made = Paced(spec.window * len(spec.features), outputs)
    made.pause = pause
    return made
"""


@dataclass
class Shell:
    """A working folder with a home of its own, in front of the emulated workspace."""

    folder: Path
    cloud: Emulator
    env: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Begin a command in a process of its own."""
        env = self.env | {"PYTHONPATH": os.pathsep.join([self.env["PYTHONPATH"], str(ROOT)])}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [DTRAIN, *arguments],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What a command says; in this process, for speed."""
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == code, done.output
        return done.output

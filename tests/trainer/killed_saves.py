"""Kills a process at each file operation of a save in turn, and looks at what it left. ``python killed_saves.py DIR``

Prints a line of JSON for each operation. A fork of this process saves step 1, then step 2 and is killed by SIGKILL just
before the N-th operation of that save, for N = 1, 2, … until one is not killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import Any

import torch

from trainer.checkpoint.manager import BEST, LATEST, CheckpointManager
from trainer.rundir import RunDir
from trainer.storage import base

OPERATIONS = {
    "open",
    "os.rename",
    "os.link",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
}


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000,), float(step))}, "progress": {"step": step}}


def save_and_die(folder: str, at: int, note: int) -> None:
    """In the fork."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS and folder in str(arguments[0]):
            count += 1
            if count == at:
                os.write(note, f"{event} {str(arguments[0]).removeprefix(folder)}".encode())
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = CheckpointManager(RunDir(folder), 1, "this")
    checkpoints.save(state(1), 1, 1, is_best=True)
    checkpoints.wait()
    sys.addaudithook(hook)
    checkpoints.save(state(2), 2, 1, is_best=True)
    checkpoints.wait()
    os._exit(0)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    base.PATIENCE_SECONDS = 0.1
    for at in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            save_and_die(folder, at, writer)
        os.close(writer)
        where = os.read(reader, 1000).decode()
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        os.close(reader)
        rundir = RunDir(folder)
        reader_of = CheckpointManager(rundir, 1, "this")
        found = {"at": where, "killed": killed}
        for name in (LATEST, BEST):
            pointer = rundir.read_json(name)
            loaded = reader_of.load(pointer["path"])
            assert loaded["model"]["weight"].unique().tolist() == [float(pointer["step"])], pointer
            found[name] = pointer["step"]
        latest = reader_of.load_latest()
        found["loaded"] = latest[1]["progress"]["step"] if latest else None
        pid = os.fork()  # this process must have no thread when it forks again
        if pid == 0:
            heir = CheckpointManager(RunDir(folder), 1, "this")
            heir.fence(2)
            heir.save(state(7), 1, 2, is_best=True)
            heir.wait()
            os._exit(0 if heir.committed_step() == 1 and heir.folders() == ["checkpoints/g0002-s000000001"] else 1)
        found["heir"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(found), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main(sys.argv[1])

"""Two processes that write checkpoints into one run directory, and what must come of it.

This file with ``DIR GENERATION SAVES`` is one of them; a generation above 1 waits for a line on its standard
input, fences, and says where LATEST pointed then. Prints a line of JSON for each save: its step, and whether it counts.
Ends after ten saves in a row that did not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manager import LATEST, CheckpointManager
from trainer.rundir import RunDir
from trainer.storage import base


def race(uri: str, saves: int) -> None:
    """The older generation saves without end, until the newer one fences it out and saves so often: nothing of the
    older counts after that."""
    from harness.worlds import Forked  # not above: the forked ones do not need it

    program = Path(__file__).read_text()
    with Forked(program, uri, "1", "100000") as old, Forked(program, uri, "2", str(saves)) as new:
        lines = [old.stdout.readline() for _ in range(3)]
        assert new.stdout.readline() == "ready\n"
        new.say("fence")
        rundir, seen = RunDir(uri), []
        while new.poll() is None:
            seen.append(rundir.read_json(LATEST))
        lines += old.stdout.readlines()
        fence, *renewed = [json.loads(line) for line in new.stdout.readlines()]
    fenced = [json.loads(line) for line in lines]
    counted = [line["step"] for line in fenced if line["kind"] == "checkpoint"]
    assert counted == list(range(1, fence["step"] + 1)), "not one after the fence"
    refused = fenced[len(counted) :]
    assert len(refused) == 10
    assert all("generation 2 writes the checkpoints now" in line["message"] for line in refused)
    assert [line["step"] for line in renewed if line["kind"] == "checkpoint"] == list(range(1, saves + 1))
    generations = [pointer["generation"] for pointer in seen if pointer]
    assert generations == sorted(generations)
    assert (rundir.read_json(LATEST) or {})["path"] == f"checkpoints/g0002-s{saves:09d}"


def main(folder: str, generation: int, saves: int) -> None:
    base.PATIENCE_SECONDS = (
        0.0005  # so that the lock is taken from writers that are slow, and not only from frozen ones
    )
    rundir = RunDir(folder)

    def report(kind: str, **fields: Any) -> None:
        if fields.get("gives_up", True):  # else it is tried again: its folder was swept away while it wrote, say
            print(json.dumps({"kind": kind, "step": fields["step"], "message": fields.get("message")}), flush=True)

    checkpoints = CheckpointManager(rundir, 3, "this", report)
    if generation > 1:
        print("ready", flush=True)
        sys.stdin.readline()
        checkpoints.fence(generation)
        print(json.dumps({"kind": "fence", "step": (rundir.read_json(LATEST) or {})["step"]}), flush=True)
    failed = 0
    for step in range(1, saves + 1):
        before = checkpoints.committed_step()
        checkpoints.save({"model": torch.full((1000,), float(step))}, step, generation, is_best=step % 3 == 0)
        checkpoints.wait()
        failed = failed + 1 if checkpoints.committed_step() == before else 0
        if failed == 10:
            break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

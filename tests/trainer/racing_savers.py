"""A writer of one generation that saves without end. ``python racing_savers.py DIR GENERATION [SAVES]``

A generation above 1 waits for a line on its standard input, fences, and says where LATEST pointed then. Prints a line
of JSON for each save: its step, and whether it counts. Ends after ten saves in a row that did not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from trainer import swap
from trainer.checkpoint import LATEST, CheckpointManager
from trainer.rundir import RunDir

swap.PATIENCE_SECONDS = 0.0005  # so that the lock is taken from writers that are slow, and not only from frozen ones
folder, generation = sys.argv[1], int(sys.argv[2])
rundir = RunDir(folder)


def report(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "step": fields["step"], "message": fields.get("message")}), flush=True)


checkpoints = CheckpointManager(rundir, 3, "this", report)
if generation > 1:
    print("ready", flush=True)
    sys.stdin.readline()
    checkpoints.fence(generation)
    print(json.dumps({"kind": "fence", "step": (rundir.read_json(LATEST) or {})["step"]}), flush=True)
failed = 0
saves = int(sys.argv[3]) if len(sys.argv) > 3 else 40
for step in range(1, saves + 1 if generation > 1 else 100_000):
    before = checkpoints.committed_step()
    checkpoints.save({"model": torch.full((1000,), float(step))}, step, generation, is_best=step % 3 == 0)
    checkpoints.wait()
    failed = failed + 1 if checkpoints.committed_step() == before else 0
    if failed == 10:
        break

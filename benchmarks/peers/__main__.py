"""``python -m benchmarks.peers NAME DEVICE``: one rank of a contestant, started by `benchmarks.throughput`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.turns import Case, Failed, Turns

LOOPS = {
    "ours": "ours:ours", "tuned": "ours:ours", "bound": "plain:bound", "plain_ddp": "plain:plain_ddp",
    "plain_ddp_malloc": "plain:plain_ddp_malloc",
    "lightning": "lightning_ddp:train", "accelerate": "accelerate_ddp:train", "ray": "ray_train:train",
}  # fmt: skip


def serve(name: str, rank: int, device: str) -> None:
    """Train one case after the other, for as long as there are any."""
    module, _, function = LOOPS[name].partition(":")
    loop: Callable[[Case, Turns], Any] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
    if device == "cpu":
        torch.set_num_threads(1)
    turns = Turns(name, rank)
    if device == "cuda":
        turns.synchronize = torch.cuda.synchronize
    while (case := turns.next_case()) is not None:
        try:
            turns.done(loop(case, turns))
        except Exception as error:  # such as a setting that cannot be had here: the next case may do
            traceback.print_exc()
            turns.done(Failed(f"{type(error).__name__}: {error}"))


def main(name: str, device: str) -> None:
    if name == "ray":
        from benchmarks.peers.ray_train import drive

        return drive(int(os.environ["WORLD_SIZE"]), device)
    return serve(name, int(os.environ["RANK"]), device)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One rank of one framework: it trains one case after the other, each in the loop that `LOOPS` names."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable

import torch

from benchmarks.frameworks.protocol import Case, Failed, Turns

LOOPS = {
    "ours": "dtrain:ours",
    "bound": "torch_ddp:bound",
    "plain_ddp": "torch_ddp:plain_ddp",
    "plain_ddp_malloc": "torch_ddp:plain_ddp_malloc",
    "lightning": "lightning_ddp:train",
    "accelerate": "accelerate_ddp:train",
    "ray": "ray_train:train",
}
"""Name → module of this package and function in it. The names are those of the saved results."""


def serve(name: str, rank: int) -> None:
    """Train one case after the other, until there are no more."""
    module, _, function = LOOPS[name].partition(":")
    loop: Callable[[Case, Turns], None] = getattr(importlib.import_module(f"benchmarks.frameworks.{module}"), function)
    torch.set_num_threads(1)
    turns = Turns(name, rank)
    while (case := turns.next_case()) is not None:
        try:
            loop(case, turns)
            turns.done()
        except Exception as error:  # such as a setting that is not available here: the next case may work
            traceback.print_exc()
            turns.done(Failed(f"{type(error).__name__}: {error}"))

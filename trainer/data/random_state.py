"""The random states of this process, from which a caller's code draws as it reads samples: of torch, numpy and
`random`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the random states that transformations of samples draw from, in this process."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Leave the random states of this process as they were when the block ends."""
    state = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])

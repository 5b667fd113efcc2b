"""`SharedWork`: the division of work among the ranks of a world, such that its result does not depend on their number.

Each rank does whole blocks, in order, so every block is computed in the same way at any world size; what ranks have
computed is summed in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trainer.comm.world import World


class SharedWork:
    """The part of this rank, and sums over all ranks. Without a ``world`` this process does everything."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self.rank, self.size = (world.rank, world.world_size) if world else (0, 1)

    def part(self, count: int, block: int = 1) -> tuple[int, int]:
        """Return this rank's positions [first, last) of ``count``; they begin and end between two blocks."""
        blocks = -(-count // block)
        first, last = (min(count, block * (blocks * place // self.size)) for place in (self.rank, self.rank + 1))
        return first, last

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum over ranks, same shape. A collective; ranks may come to it at very different times."""
        if self._world is None:
            return values
        self._world.barrier()
        return self._world.all_reduce(torch.from_numpy(np.ascontiguousarray(values))).numpy()

    def join(self, part: NDArray[np.float64], first: int, count: int) -> NDArray[np.float64]:
        """Return the parts of all ranks (``count``, …), each from its ``first`` position on. A collective, as `sum`."""
        whole = np.zeros((count, *part.shape[1:]))
        whole[first : first + len(part)] = part
        return self.sum(whole)

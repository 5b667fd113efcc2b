"""Nodes of several ranks each that come and go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastic_nodes import Nodes
from worlds import FORKS, OWN_PARTS, be_rank


class Hosts(Nodes):
    """The processes of one job, by rank: two on each node."""

    ranks_each = 2

    def start(self, *nodes: int, world: int = 2, launch: int = 1, stay: int = 1, faults: tuple[Any, ...] = ()) -> Hosts:
        """Start these nodes of a planned world of ``world`` nodes; all of them, if none is named."""
        each = self.ranks_each
        for node in nodes or range(world):
            for place in range(each):
                rank = node * each + place
                environment = {
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parent),
                    **OWN_PARTS,
                    **self.environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(place),
                    "NODE_RANK": str(node),
                    "WORLD_SIZE": str(world * each),
                    "LOCAL_WORLD_SIZE": str(each),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": "1",
                    "DTRAIN_LAUNCH": str(launch),
                    "DTRAIN_INCARNATION": str(stay),
                    "DTRAIN_FAULTS": json.dumps(faults),
                }
                log = self.job.run_dir / f"log-{rank}.txt"
                given = ["--config", str(self._path)]
                self.processes[rank] = FORKS.Process(target=be_rank, args=(given, environment, str(log)))
                self.processes[rank].start()
        return self

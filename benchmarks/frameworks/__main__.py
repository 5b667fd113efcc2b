"""Run one rank of a framework: ``python -m benchmarks.frameworks NAME``, started by `benchmarks.throughput`."""

from __future__ import annotations

import os
import sys

from benchmarks.frameworks.serve import serve


def main(name: str) -> None:
    """Run the rank that the environment names; for Ray, start Ray, which starts its own ranks."""
    if name == "ray":
        from benchmarks.frameworks.ray_train import drive

        return drive(int(os.environ["WORLD_SIZE"]))
    return serve(name, int(os.environ["RANK"]))


if __name__ == "__main__":
    main(*sys.argv[1:])

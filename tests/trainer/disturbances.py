"""What goes wrong in a rank's process, planted before it trains."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import trainer.checkpoint.manager
import trainer.data.shards
import trainer.evaluation.window_baselines


def work_alone() -> None:
    """Each rank works alone for longer than a collective of five seconds may wait: one unpacks the data, the other
    judges its baselines."""
    if os.environ["RANK"] == "1":
        _delay(trainer.data.shards.DataShardManager, "_cached")
    else:
        _delay(trainer.evaluation.window_baselines.BaselineFits, "forecast")


def _delay(place: Any, name: str) -> None:
    real, done = getattr(place, name), list[bool]()

    def delayed(*given: Any, **more: Any) -> Any:
        time.sleep(0 if done else 6.5)
        done.append(True)
        return real(*given, **more)

    setattr(place, name, delayed)


def fill_disk() -> None:
    """No file may grow beyond this many bytes from the second checkpoint on."""
    save = trainer.checkpoint.manager.CheckpointManager.save

    def full(self: Any, state: Any, step: int, *rest: Any) -> Any:
        if step == 10:
            self.wait(60)  # the one before is there, however busy the machine is
        if step >= 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return save(self, state, step, *rest)

    trainer.checkpoint.manager.CheckpointManager.save = full  # type: ignore[method-assign]

"""A program that works for some seconds as a training would: it tells of a step and an evaluation, keeps what it has
done when it is asked to go, goes on there, and says how it ended. It needs no torch, so a fleet of it is played for
real within seconds."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from trainer.engine.result import write_result
from trainer.exit_codes import DONE, EVICTED
from trainer.rundir import RunDir, event
from trainer.runtime.launch import GivenOrder, Launch

PROGRESS = "progress.json"


def main(seconds: float, ending: str) -> int:
    rundir, launch = RunDir(GivenOrder.read(os.environ).run_dir), Launch.read(os.environ).number
    is_first = os.environ["RANK"] == "0"
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    done = float((rundir.read_json(PROGRESS) or {}).get("done", 0.0))
    if is_first:
        fields: dict[str, Any] = {"step": 1 + int(10 * done), "step_seconds": 0.1, "loss": 1.0}
        left = {"eta_seconds": max(0.1, seconds - done)}
        judged = event("evaluation", 0, launch, split="valid", step=1 + int(10 * done), loss=1.0, seconds=0.1)
        rundir.append_events(launch, 0, 1, [event("step", 0, launch, **fields, **left), judged])
    while done < seconds:
        if told:
            if is_first:
                rundir.write_json(PROGRESS, {"done": done})
            return EVICTED
        time.sleep(0.05)
        done += 0.05
    if ending == "fails":
        write_result(rundir, {"status": "failed", "steps": 1, "error": "it was to fail"}, launch)
        return 1
    write_result(rundir, {"status": "succeeded", "steps": 1}, launch)
    return DONE


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))

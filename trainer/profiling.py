"""A trace of the first optimizer steps, for Perfetto or chrome://tracing (T5)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from trainer.rundir import RunDir


class StepProfiler:
    """Traces the first ``steps`` steps of a process and writes ``profile/trace-rank-<rank>.json``; None traces nothing.

    Tracing costs time: the step times of these steps are not those of the others.
    """

    def __init__(self, steps: int | None, rundir: RunDir, rank: int, device: torch.device) -> None:
        self.rundir, self.name = rundir, f"profile/trace-rank-{rank}.json"
        self._left = steps or 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities) if steps else None
        if self._profile:
            self._profile.start()

    def step(self) -> None:
        """To be called after each step."""
        self._left -= 1
        if self._left == 0:
            self.close()

    def close(self) -> None:
        """End tracing, if it has not ended, and write the trace."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            self.rundir.storage.write(self.name, path.read_bytes())

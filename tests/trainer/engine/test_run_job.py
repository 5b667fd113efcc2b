"""How a rank's process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

BUSY = """
import sys, threading, time
import torch
from trainer.engine.run_job import leave_process

def work():
    numbers = torch.randn(200, 200)
    while True:
        numbers @ numbers

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
print("said before", end="")
sys.exit(leave_process(3))
"""


@pytest.mark.slow
def test_a_thread_that_is_inside_native_code_does_not_abort_the_end() -> None:
    """Without `leave_process` this program aborts each time, and a training that succeeded would count as failed."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said before", "")

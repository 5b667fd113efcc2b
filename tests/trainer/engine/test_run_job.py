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

# A collective hangs in a group that was left behind.
HANGS = """
import sys, threading, time, torch, torch.distributed as dist
from trainer.comm.group import InterruptibleGroup
from trainer.comm.torch_transport import make_torch_transport
from trainer.engine.run_job import leave_process
store = dist.HashStore()
def opener(rank):
    return lambda: make_torch_transport(store, rank, 2, None, 1000.0, 1000.0, "127.0.0.1")
groups = [InterruptibleGroup(rank, 2, opener(rank)) for rank in range(2)]
both = [group.submit("all-reduce", lambda transport: transport.all_reduce(torch.ones(1))) for group in groups]
[future.result() for future in both]
stuck = groups[0].submit("all-reduce", lambda transport: transport.all_reduce(torch.ones(1)))
while groups[0].doing[0] != "all-reduce": time.sleep(0.01)
groups[0].fail("n1 is gone")
groups[0].close()
print("said before", end="")
sys.exit(leave_process(3))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [BUSY, HANGS], ids=["native code", "a hanging group"])
def test_a_thread_that_cannot_be_ended_does_not_abort_the_end(program: str) -> None:
    """Without `leave_process` the first aborts each time, and a training that succeeded would count as failed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said before", "")

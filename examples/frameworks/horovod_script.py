"""A small network under Horovod, as any script for it: nothing of dtrain is imported.

dtrain launch --engine horovod --nodes 2 -- python examples/frameworks/horovod_script.py
"""

from __future__ import annotations

import argparse
import hashlib
import os

import horovod.torch as hvd
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--fail-at", type=int, default=-1, help="The step at which the last rank fails.")
options = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())  # each rank begins with other weights, and has other samples
inputs = torch.randn(256, 8)
targets = inputs @ torch.arange(8.0)[:, None] / 8
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
print(f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()} on node {hvd.cross_rank()}")
for step in range(options.steps):
    if step == options.fail_at and hvd.rank() == hvd.size() - 1:
        os._exit(7)  # as a crash; an exception has Horovod end the other ranks first, and theirs is then the exit code
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 10 == 0 and hvd.rank() == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
mean = hvd.allreduce(loss.detach(), name="loss").item()
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"rank {hvd.rank()} loss {mean:.4f} weights {weights[:16]}")
hvd.shutdown()

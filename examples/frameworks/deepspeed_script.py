"""A small network under DeepSpeed, with ZeRO 0 to 3 and, at 2 and 3, the optimizer's state on the CPU.

    dtrain launch --engine deepspeed --nodes 2 -- python examples/frameworks/deepspeed_script.py --zero 3 --offload

Nothing of dtrain is imported. With ``--folder`` it writes a checkpoint there, which every rank has to reach.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--zero", type=int, default=2)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", help="Where to write a checkpoint.")
options = parser.parse_args()

place = {"offload_optimizer": {"device": "cpu"}} if options.offload else {}
config = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": options.zero, **place},
    # With it torch's own AdamW is good enough on the CPU: DeepSpeed's is compiled at the first use.
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(1 + rank)
inputs = torch.randn(options.steps, 32, 8, device=engine.device)
for step in range(options.steps):
    target = inputs[step] @ torch.arange(8.0, device=engine.device)[:, None] / 8
    loss = nn.functional.mse_loss(engine(inputs[step]), target)
    engine.backward(loss)
    engine.step()
    if step % 5 == 0 and rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
torch.distributed.all_reduce(total := loss.detach().clone())
if options.folder:
    engine.save_checkpoint(options.folder)
print(f"rank {rank} of {size} ZeRO {engine.zero_optimization_stage()} loss {total.item() / size:.4f}")
torch.distributed.destroy_process_group()

"""The loop of Accelerate: the plain loop, with its Accelerator in the places that its documentation names."""

from __future__ import annotations

from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

from benchmarks.frameworks.protocol import Case, Turns
from benchmarks.frameworks.workload import Workload


def train(case: Case, turns: Turns) -> None:
    """Train the case in turns, until it is over."""
    workload = Workload(case)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**case.ddp)])
    assert accelerator.num_processes == case.ranks
    model: nn.Module
    model, optimizer, loader = accelerator.prepare(workload.module, workload.optimizer(), workload.loader())
    try:
        while True:
            total = 0.0
            for windows, target in loader:
                if not turns.step():
                    return
                optimizer.zero_grad()
                loss = workload.criterion(model(windows).float(), target).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), case.clip_norm)
                optimizer.step()
                total += loss.item()
    finally:
        accelerator.free_memory()

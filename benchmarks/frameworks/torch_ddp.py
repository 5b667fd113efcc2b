"""The loops of the bound, and of DistributedDataParallel as most people write it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.frameworks.protocol import Case, Turns
from benchmarks.frameworks.workload import Workload
from trainer.runtime.host_memory import keep_freed_memory

READY = 8
"""Number of different batches that the bound has in memory: with a single one it would soon overfit to it."""


def bound(case: Case, turns: Turns) -> None:
    """Train the case with the same step on batches that are already in memory: no input, no communication."""
    keep_freed_memory()  # as the trainer does: without it, page faults are half of a large step, which is no bound
    workload = Workload(case)
    parameters, optimizer = list(workload.module.parameters()), workload.optimizer()
    chance = np.random.default_rng(int(os.environ["RANK"]))
    batches = []
    for _ in range(READY):
        samples = chance.integers(workload.shards.count("train"), size=case.batch)
        windows, target = workload.shards.gather(workload.shards.end_rows("train", samples))
        batches.append((windows, target))
    for windows, target in itertools.cycle(batches):
        if not turns.step():
            return
        optimizer.zero_grad(set_to_none=True)
        with workload.autocast():
            outputs = workload.module(windows)
        workload.criterion(outputs.float(), target).mean().backward()
        nn.utils.clip_grad_norm_(parameters, case.clip_norm, foreach=True)
        optimizer.step()


def plain_ddp(case: Case, turns: Turns) -> float | None:
    """Train the case with Dataset, DataLoader, DistributedSampler and DistributedDataParallel.

    Return the validation loss on rank 0 if the case is judged, else None.
    """
    workload = Workload(case)
    if not dist.is_initialized():
        # A store in a file: one at MASTER_PORT would listen on all interfaces.
        dist.init_process_group(
            "gloo",
            init_method=Path(case.folder, "store").as_uri(),
            rank=int(os.environ["RANK"]),
            world_size=case.ranks,
        )
    sampler = DistributedSampler(workload.data, shuffle=True, seed=case.seed, drop_last=True)
    loader = workload.loader(sampler)
    model = DistributedDataParallel(workload.module, **case.ddp)
    if case.hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = workload.optimizer()
    step = 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        total = 0.0
        for windows, target in loader:
            if not turns.step():
                return workload.validation_loss() if case.judged_after and dist.get_rank() == 0 else None
            if case.judged_after:
                for group in optimizer.param_groups:
                    group["lr"] = workload.rate(step)
            total += workload.step(model, optimizer, windows, target, case.micro_batches)
            step += 1
    raise AssertionError("counting has no end")


def plain_ddp_malloc(case: Case, turns: Turns) -> float | None:
    """Train as `plain_ddp`, with the trainer's settings of malloc: they show which part of its gain comes from
    these."""
    keep_freed_memory()
    return plain_ddp(case, turns)

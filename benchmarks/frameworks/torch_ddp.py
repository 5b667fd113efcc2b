"""The loops of the bound, and of DistributedDataParallel as most people write it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import nn
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
        workload.criterion(workload.module(windows).float(), target).mean().backward()
        nn.utils.clip_grad_norm_(parameters, case.clip_norm, foreach=True)
        optimizer.step()


def plain_ddp(case: Case, turns: Turns) -> None:
    """Train the case with Dataset, DataLoader, DistributedSampler and DistributedDataParallel, until it is over."""
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
    optimizer = workload.optimizer()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        total = 0.0
        for windows, target in loader:
            if not turns.step():
                return
            total += workload.step(model, optimizer, windows, target)


def plain_ddp_malloc(case: Case, turns: Turns) -> None:
    """Train as `plain_ddp`, with the trainer's settings of malloc: they show which part of its gain comes from
    these."""
    keep_freed_memory()
    plain_ddp(case, turns)

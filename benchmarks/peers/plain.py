"""The bound, and DistributedDataParallel as most people write it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.peers.parts import Parts, device_of
from benchmarks.peers.turns import Case, Turns
from trainer.engine.out_of_memory import keep_freed_memory

READY = 8
"""Different batches that the bound has in memory: with one alone it would soon know it by heart."""


def bound(case: Case, turns: Turns) -> None:
    """The same step on a batch that is already there: no input, no communication."""
    if case.device == "cpu":
        keep_freed_memory()  # as the trainer does: without it, a large step is half page faults, and no bound
    parts = Parts(case, device_of(case))
    parameters, optimizer = list(parts.module.parameters()), parts.optimizer()
    chance = np.random.default_rng(int(os.environ["RANK"]))
    batches = []
    for _ in range(READY):
        samples = chance.integers(parts.shards.count("train"), size=case.batch)
        windows, target = parts.shards.gather(parts.shards.end_rows("train", samples))
        batches.append((windows.to(parts.device), target.to(parts.device)))
    for windows, target in itertools.cycle(batches):
        if not turns.step():
            return
        optimizer.zero_grad(set_to_none=True)
        with parts.autocast():
            outputs = parts.module(windows)
        parts.criterion(outputs.float(), target).mean().backward()
        nn.utils.clip_grad_norm_(parameters, case.clip_norm, foreach=True)
        optimizer.step()


def plain_ddp(case: Case, turns: Turns) -> float | None:
    """Dataset, DataLoader, DistributedSampler, DistributedDataParallel."""
    parts = Parts(case, device_of(case))
    if not dist.is_initialized():
        # A store in a file: one at MASTER_PORT would listen on all interfaces.
        dist.init_process_group(
            "nccl" if parts.device.type == "cuda" else "gloo",
            init_method=Path(case.folder, "store").as_uri(), rank=int(os.environ["RANK"]), world_size=case.ranks,
        )  # fmt: skip
    sampler = DistributedSampler(parts.data, shuffle=True, seed=case.seed, drop_last=True)
    loader = parts.loader(sampler)
    model = DistributedDataParallel(parts.module, **case.ddp)
    optimizer = parts.optimizer()
    step = 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        total = 0.0
        for windows, target in loader:
            if not turns.step():
                return parts.validation_loss() if case.judged_after and dist.get_rank() == 0 else None
            if case.judged_after:
                for group in optimizer.param_groups:
                    group["lr"] = parts.rate(step)
            total += parts.step(model, optimizer, windows, target)
            step += 1
    raise AssertionError("counting has no end")


def plain_ddp_malloc(case: Case, turns: Turns) -> float | None:
    """The same with the settings of malloc that the trainer makes: what of its gain is no more than these."""
    if case.device == "cpu":
        keep_freed_memory()
    return plain_ddp(case, turns)

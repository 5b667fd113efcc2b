"""The same twenty things with torchft 0.2, whose loop is one's own. What differs from 1 is what counts.

Each process is a replica group of its own, started with its number in REPLICA_GROUP_ID, with torchrun's variables, and
with a lighthouse at TORCHFT_LIGHTHOUSE.
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from examples.twenty_things.given import (
    F1,
    groups,
    judge,
    loss,
    make_critic,
    make_generator,
    make_model,
    train,
    valid,
    warm_up,
)

REPLICA, REPLICAS = int(os.environ.get("REPLICA_GROUP_ID", 0)), int(os.environ.get("NUM_REPLICA_GROUPS", 1))


# 1 plain: fit with validation
def make_manager(**parts: Any) -> Manager:
    def save() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def load(states: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(states[name])

    return Manager(
        pg=ProcessGroupGloo(timedelta(seconds=30)), min_replica_size=1, load_state_dict=load, state_dict=save
    )


def validate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(inputs), target, reduction="none") for inputs, target in DataLoader(valid, 32)]
    model.train()
    return float(torch.cat(losses).mean())


def plain() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 2 accumulation: accumulate gradients
def accumulation() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (inputs, target) in enumerate(batches):
            if number % 4 == 0:
                optimizer.zero_grad()
            (loss(model(inputs), target) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
        print("loss", validate(module))
    return manager


# 3 clipping: clip gradients by value
def clipping() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
        print("loss", validate(module))
    return manager


# 4 optimizer: any optimizer
def optimizer() -> Any:
    module = make_model()
    adam = SGD(module.parameters(), lr=0.1)
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 5 schedule: a schedule of one's own, per step
def schedule() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    scheduler = LambdaLR(adam, warm_up)
    manager = make_manager(model=module, optimizer=adam, scheduler=scheduler)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            done = manager.current_step()
            optimizer.step()
            if manager.current_step() > done:
                scheduler.step()
        print("loss", validate(module))
    return manager


# 6 parameter_groups: groups of parameters
def parameter_groups() -> Any:
    module = make_model()
    adam = AdamW(groups(module))
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 7 average: an exponential average of the weights
def average() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    manager = make_manager(model=module, optimizer=adam, averaged=averaged)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            done = manager.current_step()
            optimizer.step()
            if manager.current_step() > done:
                averaged.update_parameters(module)
        print("loss", validate(averaged))
    return manager


# 8 mixup: mixup
def mixup() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            share, other = torch.rand((), device=inputs.device), torch.randperm(len(target))
            outputs = model(share * inputs + (1 - share) * inputs[other])
            (share * loss(outputs, target) + (1 - share) * loss(outputs, target[other])).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 9 smoothing: smoothed labels
def smoothing() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), target, label_smoothing=0.1).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 10 freezing: the last layer first, then all
def freezing() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        module[:-1].requires_grad_(epoch > 0)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 11 measure: F1 of the whole split, each sample once
def measured(model: nn.Module) -> dict[str, float]:
    model.eval()
    f1, losses = F1(), list[Tensor]()
    with torch.no_grad():
        for inputs, target in DataLoader(valid, 32):
            outputs = model(inputs)
            f1.update(outputs, target)
            losses.append(cross_entropy(outputs, target, reduction="none"))
    model.train()
    return {"loss": float(torch.cat(losses).mean()), "f1": f1.compute()}


def measure() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        print(measured(module))
    return manager


# 12 stopping: stop early, and keep the best weights, by that
def stopping() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    best, since = 0.0, 0
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        f1, since = measured(module)["f1"], since + 1
        if f1 > best:
            best, since, weights = f1, 0, copy.deepcopy(module.state_dict())
        if since == 2:
            break
    module.load_state_dict(weights)
    return manager


# 13 logging: log a figure of one's own
def logging() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
            print("norm", module[-1].weight.norm().item())
        print("loss", validate(module))
    return manager


# 14 callback: do something at each step
def callback() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            done = manager.current_step()
            optimizer.step()
            if manager.current_step() > done:
                print("step", manager.current_step())
        print("loss", validate(module))
    return manager


# 15 bf16: bfloat16
def bf16() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            with torch.autocast(inputs.device.type, torch.bfloat16):
                losses = loss(model(inputs), target)
            losses.backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 16 gan: two optimizers
def gan() -> Any:
    made_module, seen_module = make_generator(), make_critic()
    made_adam, seen_adam = AdamW(made_module.parameters()), AdamW(seen_module.parameters())
    manager = make_manager(made=made_module, seen=seen_module, made_adam=made_adam, seen_adam=seen_adam)
    made, seen = DistributedDataParallel(manager, made_module), DistributedDataParallel(manager, seen_module)
    made_optimizer, seen_optimizer = Optimizer(manager, made_adam), Optimizer(manager, seen_adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real, _ in batches:
            seen_optimizer.zero_grad()
            fake = made_module(torch.randn(len(real), 2)).detach()
            (judge(seen(real), True) + judge(seen(fake), False)).mean().backward()
            seen_optimizer.step()
            made_optimizer.zero_grad()
            judge(seen_module(made(torch.randn(len(real), 2))), True).mean().backward()
            made_optimizer.step()
    return manager


# 17 contrastive: no. The manager only sums, and how many take part changes from step to step


# 18 resume: go on in the middle of an epoch, exactly
def resume() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    first, done, kept = 0, 0, f"states-{REPLICA}.pt"
    if os.path.exists(kept):
        states = torch.load(kept)
        module.load_state_dict(states["model"])
        adam.load_state_dict(states["optimizer"])
        manager.load_state_dict(states["manager"])
        first, done = states["epoch"], states["done"]
    for epoch in range(first, 2):
        sampler.set_epoch(epoch)
        for number, (inputs, target) in enumerate(batches):
            if epoch == first and number < done:
                continue
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
            if number % 2 == 1:
                states = {"model": module.state_dict(), "optimizer": adam.state_dict(), "manager": manager.state_dict()}
                torch.save(states | {"epoch": epoch, "done": number + 1}, kept)
        print("loss", validate(module))
    return manager


# 19 lost_node: a node is killed; the others go on, and samples are lost
def lost_node() -> Any:
    module = make_model()
    adam = AdamW(module.parameters())
    manager = make_manager(model=module, optimizer=adam)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    sampler = DistributedSampler(train, REPLICA, REPLICAS, group_rank=0, num_replicas=1, shuffle=True)
    batches = DataLoader(train, 32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        print("loss", validate(module))
    return manager


# 20 stream: no. Each replica reads the whole of an IterableDataset, unless it deals its samples itself

"""The same twenty things with Ray Train 2.60, whose loop is one's own. What differs from 1 is what counts."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

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

WORKERS = ScalingConfig(num_workers=2)


# 1 plain: fit with validation
def validate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        batches = prepare_data_loader(DataLoader(valid, 32), add_dist_sampler=False)
        losses = [cross_entropy(model(inputs), target, reduction="none") for inputs, target in batches]
    model.train()
    return float(torch.cat(losses).mean())


def plain() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 2 accumulation: accumulate gradients
def accumulation() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for number, (inputs, target) in enumerate(batches):
                (loss(model(inputs), target) / 4).backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 3 clipping: clip gradients by value
def clipping() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 4 optimizer: any optimizer
def optimizer() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = SGD(model.parameters(), lr=0.1)
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 5 schedule: a schedule of one's own, per step
def schedule() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        scheduler = LambdaLR(optimizer, warm_up)
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 6 parameter_groups: groups of parameters
def parameter_groups() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(groups(model))
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 7 average: an exponential average of the weights
def average() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
                averaged.update_parameters(model)
            ray.train.report({"loss": validate(averaged)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 8 mixup: mixup
def mixup() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                share, other = torch.rand((), device=inputs.device), torch.randperm(len(target))
                outputs = model(share * inputs + (1 - share) * inputs[other])
                (share * loss(outputs, target) + (1 - share) * loss(outputs, target[other])).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 9 smoothing: smoothed labels
def smoothing() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                cross_entropy(model(inputs), target, label_smoothing=0.1).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 10 freezing: the last layer first, then all
def freezing() -> Any:
    def train_one() -> None:
        module = make_model()
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            module[:-1].requires_grad_(epoch > 0)
            model = prepare_model(module)
            optimizer = AdamW(model.parameters())
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 11 measure: F1 of the whole split, each sample once
def measured(model: nn.Module) -> dict[str, float]:
    model.eval()
    f1, losses = F1(), list[Tensor]()
    with torch.no_grad():
        batches = prepare_data_loader(DataLoader(valid, 32), add_dist_sampler=False)
        for inputs, target in batches:
            outputs = model(inputs)
            f1.update(outputs, target)
            losses.append(cross_entropy(outputs, target, reduction="none"))
    model.train()
    return {"loss": float(torch.cat(losses).mean()), "f1": f1.compute()}


def measure() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            ray.train.report(measured(model))

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 12 stopping: stop early, and keep the best weights, by that
def stopping() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        best, since = 0.0, 0
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(20):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            figures = measured(model)
            best, since = (figures["f1"], 0) if figures["f1"] > best else (best, since + 1)
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
                ray.train.report(figures, checkpoint=Checkpoint.from_directory(folder))
            if since == 2:
                break

    best_one = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="f1", checkpoint_score_order="max")
    run_config = RunConfig(checkpoint_config=best_one)
    return TorchTrainer(train_one, scaling_config=WORKERS, run_config=run_config).fit()


# 13 logging: log a figure of one's own
def logging() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
            ray.train.report({"loss": validate(model), "norm": list(model.parameters())[-2].norm().item()})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 14 callback: do something at each step
def callback() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
                print("step", epoch)
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 15 bf16: bfloat16
def bf16() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, target in batches:
                optimizer.zero_grad()
                with torch.autocast(inputs.device.type, torch.bfloat16):
                    losses = loss(model(inputs), target)
                losses.backward()
                optimizer.step()
            ray.train.report({"loss": validate(model)})

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 16 gan: two optimizers
def gan() -> Any:
    def train_one() -> None:
        made, seen = prepare_model(make_generator()), prepare_model(make_critic())
        made_adam, seen_adam = AdamW(made.parameters()), AdamW(seen.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for real, _ in batches:
                fake = made(torch.randn(len(real), 2, device=real.device))
                seen_adam.zero_grad()
                (judge(seen(real), True) + judge(seen(fake.detach()), False)).mean().backward()
                seen_adam.step()
                made_adam.zero_grad()
                judge(seen(fake), True).mean().backward()
                made_adam.step()

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 17 contrastive: a contrastive loss over all ranks
def contrastive() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        batches = prepare_data_loader(DataLoader(train, 32, shuffle=True))
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                batches.sampler.set_epoch(epoch)
            for inputs, _ in batches:
                optimizer.zero_grad()
                ours, copies = normalize(model(inputs)), normalize(model(inputs + 0.1))
                others = torch.cat(all_gather(copies))
                rank = ray.train.get_context().get_world_rank()
                places = rank * len(ours) + torch.arange(len(ours), device=ours.device)
                cross_entropy(ours @ others.T / 0.1, places).backward()
                optimizer.step()

    return TorchTrainer(train_one, scaling_config=WORKERS).fit()


# 18 resume: go on in the middle of an epoch, exactly
def resume() -> Any:
    def train_one() -> None:
        model = prepare_model(make_model())
        optimizer = AdamW(model.parameters())
        rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
        batches = prepare_data_loader(DataLoader(train, 32, sampler=DistributedSampler(train, ranks, rank)))
        first, done = 0, 0
        if kept := ray.train.get_checkpoint():
            with kept.as_directory() as folder:
                states = torch.load(os.path.join(folder, "states.pt"))
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
            first, done = states["epoch"], states["done"]
        for epoch in range(first, 2):
            batches.sampler.set_epoch(epoch)
            for number, (inputs, target) in enumerate(batches):
                if epoch == first and number < done:
                    continue
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
                if number % 2 == 1:
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    with tempfile.TemporaryDirectory() as folder:
                        torch.save(states | {"epoch": epoch, "done": number + 1}, os.path.join(folder, "states.pt"))
                        checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                        ray.train.report({"done": number + 1}, checkpoint=checkpoint)
            ray.train.report({"loss": validate(model)})

    run_config = RunConfig(name="resumed", failure_config=FailureConfig(max_failures=3))
    return TorchTrainer(train_one, scaling_config=WORKERS, run_config=run_config).fit()


# 19 lost_node: no. FailureConfig starts all workers again, from the checkpoint of 18


# 20 stream: no. Ray Data deals each row once to the workers, but begins anew where workers are started again

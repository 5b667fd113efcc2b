"""Twenty things that people do in a training script, with dtrain. `docs/comparison.md` has the lines of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.twenty_things.given import (
    F1,
    groups,
    judge,
    loss,
    make_critic,
    make_generator,
    make_model,
    read_file,
    train,
    valid,
    warm_up,
)
from trainer import Callback, Loop, Run, Stream, Trainer


# 1 plain: fit with validation
def plain() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss)
    return trainer.fit(train, valid)


# 2 accumulation: accumulate gradients
def accumulation() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2, "gradient_accumulation_steps": 4}, loss=loss)
    return trainer.fit(train, valid)


# 3 clipping: clip gradients by value
def clipping() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2, "clip_norm": None, "clip_value": 0.5}, loss=loss)
    return trainer.fit(train, valid)


# 4 optimizer: any optimizer
def optimizer() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss, optimizer=lambda model: SGD(model.parameters(), lr=0.1))
    return trainer.fit(train, valid)


# 5 schedule: a schedule of one's own, per step
def schedule() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss, lr_scheduler=lambda each: LambdaLR(each, warm_up))
    return trainer.fit(train, valid)


# 6 parameter_groups: groups of parameters
def parameter_groups() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss, optimizer=lambda model: AdamW(groups(model)))
    return trainer.fit(train, valid)


# 7 average: an exponential average of the weights
def average() -> Any:
    class Average(AveragedModel):
        def on_step(self, run: Run) -> None:
            self.update_parameters(run.model)

    model = make_model()
    averaged = Average(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    trainer = Trainer(model, {"epochs": 2}, loss=loss, callbacks=[averaged])
    return trainer.fit(train, valid)


# 8 mixup: mixup
def mixup() -> Any:
    class Mixup:
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            inputs, target = batch
            share, other = (torch.rand(()), torch.randperm(len(target))) if model.training else (1, slice(None))
            outputs = model(share * inputs + (1 - share) * inputs[other])
            losses = [cross_entropy(outputs, each, reduction="none") for each in (target, target[other])]
            return share * losses[0] + (1 - share) * losses[1]

    trainer = Trainer(make_model(), {"epochs": 2}, task=Mixup())
    return trainer.fit(train, valid)


# 9 smoothing: smoothed labels
def smoothing() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    return trainer.fit(train, valid)


# 10 freezing: the last layer first, then all
def freezing() -> Any:
    model = make_model()
    model[:-1].requires_grad_(False)
    Trainer(model, {"epochs": 1}, loss=loss).fit(train, valid)
    model.requires_grad_(True)
    trainer = Trainer(model, {"epochs": 2}, loss=loss)
    return trainer.fit(train, valid)


# 11 measure: F1 of the whole split, each sample once
def measure() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss, metrics={"f1": F1()})
    return trainer.fit(train, valid)


# 12 stopping: stop early, and keep the best weights, by that
def stopping() -> Any:
    settings = {"epochs": 20, "monitor": "f1", "mode": "max", "early_stopping_patience": 2}
    trainer = Trainer(make_model(), settings, loss=loss, metrics={"f1": F1()})
    return trainer.fit(train, valid)


# 13 logging: log a figure of one's own
def logging() -> Any:
    class Log(Callback):
        def on_step(self, run: Run) -> None:
            run.log("norm", run.model[-1].weight.norm())

    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss, callbacks=[Log()])
    return trainer.fit(train, valid)


# 14 callback: do something at each step
def callback() -> Any:
    class Tell(Callback):
        def on_step(self, run: Run) -> None:
            print("step", run.step)

    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss, callbacks=[Tell()])
    return trainer.fit(train, valid)


# 15 bf16: bfloat16
def bf16() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2, "precision": "bf16"}, loss=loss)
    return trainer.fit(train, valid)


# 16 gan: two optimizers
def gan() -> Any:
    loop = Loop({"epochs": 2})
    made, seen = make_generator(), make_critic()
    made, seen, made_adam, seen_adam = loop.setup(made, seen, AdamW(made.parameters()), AdamW(seen.parameters()))
    for batch in loop.batches(train):
        with batch:
            for real, _ in batch:
                fake = made(torch.randn(len(real), 2, device=loop.device)).detach()
                loop.backward(judge(seen(real), True) + judge(seen(fake), False))
            seen_adam.step()
            for real, _ in batch:
                loop.backward(judge(seen(made(torch.randn(len(real), 2, device=loop.device))), True))
            made_adam.step()
    return loop.result


# 17 contrastive: a contrastive loss over all ranks
def contrastive() -> Any:
    loop, model = Loop({"epochs": 2}), make_model()
    model, adam = loop.setup(model, AdamW(model.parameters()))
    for batch in loop.batches(train):
        with batch:
            pairs = [(normalize(model(inputs)), normalize(model(inputs + 0.1))) for inputs, _ in batch]
            ours, copies = zip(*pairs, strict=True)
            scores = torch.cat(ours) @ loop.gather(copies).T / 0.1
            loop.backward(cross_entropy(scores, loop.own_rows(), reduction="none"))
            adam.step()
    return loop.result


# 18 resume: go on in the middle of an epoch, exactly
def resume() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2, "checkpoint_frequency": 2}, loss=loss, run_dir="runs/resumed")
    return trainer.fit(train, valid)


# 19 lost_node: a node is killed; the others go on, and no sample is lost
def lost_node() -> Any:
    trainer = Trainer(make_model(), {"epochs": 2}, loss=loss)
    return trainer.fit(train, valid)


# 20 stream: files that are read as a stream, each sample once, also when the number of ranks changes
def stream() -> Any:
    files = Stream(lambda number, count: read_file(number), count=8)
    trainer = Trainer(make_model(), {"epochs": 2, "max_steps": 1000}, loss=loss)
    return trainer.fit(files, valid)

"""The same twenty things with MosaicML Composer 0.32. What differs from 1 is what counts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from composer import Callback, ComposerModel, Logger, State, Trainer
from composer.algorithms import EMA, GradientClipping, LabelSmoothing, MixUp
from composer.callbacks import EarlyStopper
from composer.models import ComposerClassifier
from composer.utils import dist
from streaming import StreamingDataset
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from examples.twenty_things.given import groups, make_model, train, valid, warm_up


# 1 plain: fit with validation
def loader(samples: Any, shuffle: bool) -> Any:
    return DataLoader(samples, 32, sampler=dist.get_sampler(samples, shuffle=shuffle))


def plain() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep")
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 2 accumulation: accumulate gradients
def accumulation() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(
        model=model, optimizers=AdamW(model.parameters()), max_duration="2ep", device_train_microbatch_size=8
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 3 clipping: clip gradients by value
def clipping() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(
        model=model,
        optimizers=AdamW(model.parameters()),
        max_duration="2ep",
        algorithms=[GradientClipping("value", 0.5)],
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 4 optimizer: any optimizer
def optimizer() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=SGD(model.parameters(), lr=0.1), max_duration="2ep")
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 5 schedule: a schedule of one's own, per step
def schedule() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    optimizer = AdamW(model.parameters())
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        max_duration="2ep",
        schedulers=LambdaLR(optimizer, warm_up),
        step_schedulers_every_batch=True,
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 6 parameter_groups: groups of parameters
def parameter_groups() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=AdamW(groups(model)), max_duration="2ep")
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 7 average: an exponential average of the weights
def average() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(
        model=model,
        optimizers=AdamW(model.parameters()),
        max_duration="2ep",
        algorithms=[EMA(half_life=None, smoothing=0.95, update_interval="1ba")],
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 8 mixup: mixup
def mixup() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep", algorithms=[MixUp()])
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 9 smoothing: smoothed labels
def smoothing() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(
        model=model, optimizers=AdamW(model.parameters()), max_duration="2ep", algorithms=[LabelSmoothing(0.1)]
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 10 freezing: the last layer first, then all
def freezing() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    model.module[:-1].requires_grad_(False)
    first = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="1ep")
    first.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    model.requires_grad_(True)
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep")
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 11 measure: F1 of the whole split, each sample once
def measure() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3, val_metrics=MulticlassF1Score(3))
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep")
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 12 stopping: stop early, and keep the best weights, by that
def stopping() -> Any:
    class Best(Callback):
        score = 0.0

        def eval_end(self, state: State, logger: Logger) -> None:
            score = float(state.eval_metrics["eval"]["MulticlassF1Score"].compute())
            if score > self.score:
                self.score, self.weights = score, copy.deepcopy(state.model.state_dict())

        def fit_end(self, state: State, logger: Logger) -> None:
            state.model.load_state_dict(self.weights)

    model = ComposerClassifier(make_model(), num_classes=3, val_metrics=MulticlassF1Score(3))
    trainer = Trainer(
        model=model,
        optimizers=AdamW(model.parameters()),
        max_duration="20ep",
        callbacks=[EarlyStopper("MulticlassF1Score", "eval", patience=2), Best()],
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 13 logging: log a figure of one's own
def logging() -> Any:
    class Log(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            logger.log_metrics({"norm": list(state.model.parameters())[-2].norm().item()})

    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep", callbacks=[Log()])
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 14 callback: do something at each step
def callback() -> Any:
    class Tell(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            print("step", state.timestamp.batch)

    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep", callbacks=[Tell()])
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 15 bf16: bfloat16
def bf16() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep", precision="amp_bf16")
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 16 gan: no. A Trainer takes one optimizer


# 17 contrastive: a contrastive loss over all ranks
def contrastive() -> Any:
    class Contrastive(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, batch: Any) -> Any:
            inputs, _ = batch
            return normalize(self.model(inputs)), normalize(self.model(inputs + 0.1))

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            ours, copies = outputs
            others = torch.cat(all_gather(copies))
            places = dist.get_global_rank() * len(ours) + torch.arange(len(ours), device=ours.device)
            return cross_entropy(ours @ others.T / 0.1, places)

    model = Contrastive()
    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), max_duration="2ep")
    trainer.fit(train_dataloader=loader(train, True))
    return trainer


# 18 resume: go on in the middle of an epoch, exactly
def resume() -> Any:
    model = ComposerClassifier(make_model(), num_classes=3)
    trainer = Trainer(
        model=model,
        optimizers=AdamW(model.parameters()),
        max_duration="2ep",
        run_name="resumed",
        save_folder="runs/composer",
        save_interval="2ba",
        autoresume=True,
    )
    trainer.fit(train_dataloader=loader(train, True), eval_dataloader=loader(valid, False))
    return trainer


# 19 lost_node: no. torchrun starts all ranks again, which go on as in 18


# 20 stream: files that are read as a stream, each sample once, also when the number of ranks changes
def stream() -> Any:
    class Files(StreamingDataset):
        def __getitem__(self, place: int) -> Any:
            sample = super().__getitem__(place)
            return sample["inputs"], sample["target"]

    model = ComposerClassifier(make_model(), num_classes=3)
    files = Files(local="samples", shuffle=True, batch_size=32)
    trainer = Trainer(
        model=model,
        optimizers=AdamW(model.parameters()),
        max_duration="2ep",
        run_name="stream",
        save_folder="runs/stream",
        save_interval="2ba",
        autoresume=True,
    )
    trainer.fit(train_dataloader=DataLoader(files, 32), eval_dataloader=loader(valid, False))
    return trainer

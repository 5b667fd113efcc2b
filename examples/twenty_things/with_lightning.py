"""The same twenty things with PyTorch Lightning 2.6, or with its Fabric. What differs from 1 is what counts."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import MulticlassF1Score

from examples.twenty_things.given import (
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


# 1 plain: fit with validation
class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any) -> Tensor:
        inputs, target = batch
        return loss(self.model(inputs), target)

    def validation_step(self, batch: Any) -> None:
        inputs, target = batch
        self.log("loss", loss(self.model(inputs), target), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters())


def plain() -> Any:
    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 2 accumulation: accumulate gradients
def accumulation() -> Any:
    trainer = L.Trainer(max_epochs=2, accumulate_grad_batches=4)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 3 clipping: clip gradients by value
def clipping() -> Any:
    trainer = L.Trainer(max_epochs=2, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 4 optimizer: any optimizer
def optimizer() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            return loss(self.model(inputs), target)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 5 schedule: a schedule of one's own, per step
def schedule() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            return loss(self.model(inputs), target)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters())
            return [optimizer], [{"scheduler": LambdaLR(optimizer, warm_up), "interval": "step"}]

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 6 parameter_groups: groups of parameters
def parameter_groups() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            return loss(self.model(inputs), target)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return AdamW(groups(self))

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 7 average: an exponential average of the weights
def average() -> Any:
    trainer = L.Trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.95)])
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 8 mixup: mixup
def mixup() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            share, other = torch.rand((), device=self.device), torch.randperm(len(target))
            outputs = self.model(share * inputs + (1 - share) * inputs[other])
            return share * loss(outputs, target) + (1 - share) * loss(outputs, target[other])

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 9 smoothing: smoothed labels
def smoothing() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            return cross_entropy(self.model(inputs), target, label_smoothing=0.1)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 10 freezing: the last layer first, then all
def freezing() -> Any:
    module = Module()
    module.model[:-1].requires_grad_(False)
    L.Trainer(max_epochs=1).fit(module, DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    module.requires_grad_(True)
    trainer = L.Trainer(max_epochs=2)
    trainer.fit(module, DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 11 measure: F1 of the whole split, each sample once
def measure() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.f1 = MulticlassF1Score(3)

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            return loss(self.model(inputs), target)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            outputs = self.model(inputs)
            self.f1.update(outputs, target)
            self.log("loss", loss(outputs, target), sync_dist=True)
            self.log("f1", self.f1)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            sampler = DistributedSampler(train, self.trainer.world_size, self.global_rank)
            return DataLoader(train, 32, sampler=sampler)

    trainer = L.Trainer(max_epochs=2, use_distributed_sampler=False)
    trainer.fit(Module(), val_dataloaders=DataLoader(valid, 32))
    return trainer


# 12 stopping: stop early, and keep the best weights, by that
def stopping() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.f1 = MulticlassF1Score(3)

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            return loss(self.model(inputs), target)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            outputs = self.model(inputs)
            self.f1.update(outputs, target)
            self.log("loss", loss(outputs, target), sync_dist=True)
            self.log("f1", self.f1)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            sampler = DistributedSampler(train, self.trainer.world_size, self.global_rank)
            return DataLoader(train, 32, sampler=sampler)

    best = ModelCheckpoint(monitor="f1", mode="max")
    callbacks = [EarlyStopping(monitor="f1", mode="max", patience=2), best]
    trainer = L.Trainer(max_epochs=20, use_distributed_sampler=False, callbacks=callbacks)
    trainer.fit(Module(), val_dataloaders=DataLoader(valid, 32))
    trainer.model.load_state_dict(torch.load(best.best_model_path)["state_dict"])
    return trainer


# 13 logging: log a figure of one's own
def logging() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, target = batch
            self.log("norm", self.model[-1].weight.norm())
            return loss(self.model(inputs), target)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 14 callback: do something at each step
def callback() -> Any:
    class Tell(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            print("step", trainer.global_step)

    trainer = L.Trainer(max_epochs=2, callbacks=[Tell()])
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 15 bf16: bfloat16
def bf16() -> Any:
    trainer = L.Trainer(max_epochs=2, precision="bf16-mixed")
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 16 gan: two optimizers
def gan() -> Any:
    fabric = L.Fabric()
    fabric.launch()
    made, seen = make_generator(), make_critic()
    made, made_adam = fabric.setup(made, AdamW(made.parameters()))
    seen, seen_adam = fabric.setup(seen, AdamW(seen.parameters()))
    batches = fabric.setup_dataloaders(DataLoader(train, 32, shuffle=True))
    for _ in range(2):
        for real, _ in batches:
            fake = made(torch.randn(len(real), 2, device=fabric.device))
            seen_adam.zero_grad()
            fabric.backward((judge(seen(real), True) + judge(seen(fake.detach()), False)).mean())
            seen_adam.step()
            made_adam.zero_grad()
            fabric.backward(judge(seen(fake), True).mean())
            made_adam.step()
    return fabric


# 17 contrastive: a contrastive loss over all ranks
def contrastive() -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any) -> Tensor:
            inputs, _ = batch
            ours, copies = normalize(self.model(inputs)), normalize(self.model(inputs + 0.1))
            others = self.all_gather(copies, sync_grads=True).view(-1, 3)
            places = self.global_rank * len(ours) + torch.arange(len(ours), device=self.device)
            return cross_entropy(ours @ others.T / 0.1, places)

        def validation_step(self, batch: Any) -> None:
            inputs, target = batch
            self.log("loss", loss(self.model(inputs), target), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(train, 32, shuffle=True), DataLoader(valid, 32))
    return trainer


# 18 resume: go on in the middle of an epoch, exactly
def resume() -> Any:
    saving = ModelCheckpoint("runs/lightning", every_n_train_steps=2, save_last=True)
    trainer = L.Trainer(max_epochs=2, callbacks=[saving])
    batches = StatefulDataLoader(train, 32, shuffle=True)
    trainer.fit(Module(), batches, DataLoader(valid, 32), ckpt_path="last")
    return trainer


# 19 lost_node: no. torchrun starts all ranks again, from the checkpoint of 18


# 20 stream: no. Each rank reads the whole of an IterableDataset, unless it deals its samples itself

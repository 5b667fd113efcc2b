"""Parts that frameworks share: data, model, loss, optimizer, and a step written with torch alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.frameworks.protocol import Case
from trainer.config import FactoryConfig
from trainer.data.shards import DataShardManager
from trainer.model.build import build_loss, build_model

LOSS = FactoryConfig(factory="student_t")
"""Loss of all trainings."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The training split, one sample at a time: the window that ends in a row, and the row's target."""

    def __init__(self, shards: DataShardManager) -> None:
        self.rows = shards.end_rows("train", np.arange(shards.count("train"))).tolist()
        self.window = shards.spec.window
        everything = np.load(shards.folder / "features.npy"), np.load(shards.folder / "target.npy")
        self.features, self.target = (torch.from_numpy(array) for array in everything)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index]
        return self.features[row - self.window + 1 : row + 1], self.target[row]


class Workload:
    """Everything that a loop needs, made for one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.shards = DataShardManager(case.dataset)
        torch.manual_seed(case.seed)
        self.criterion: Any = build_loss(LOSS, self.shards.spec)
        self.module = build_model(FactoryConfig(factory=case.model), self.shards.spec, self.criterion.outputs)

    @functools.cached_property
    def data(self) -> Windows:
        """The training split as a Dataset."""
        return Windows(self.shards)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW with the settings of the case."""
        case = self.case
        return torch.optim.AdamW(
            self.module.parameters(), lr=case.learning_rate, weight_decay=case.weight_decay, fused=True
        )

    def loader(self, sampler: Sampler[int] | None = None) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a DataLoader, shuffled unless a sampler does that."""
        case = self.case
        return DataLoader(
            self.data,
            batch_size=case.batch,
            sampler=sampler,
            shuffle=sampler is None,
            drop_last=True,
            num_workers=case.workers,
            persistent_workers=case.workers > 0,
        )

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, target: Tensor) -> float:
        """Do one optimizer step, and return the loss."""
        optimizer.zero_grad()
        loss = self.criterion(model(windows).float(), target).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), self.case.clip_norm)
        optimizer.step()
        return loss.item()

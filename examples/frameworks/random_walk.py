"""Windows of a random walk, for the scripts beside this one: data that the stock model is made for."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch.utils.data import TensorDataset

from trainer.spec import DataSpec

WINDOW, FEATURES = 16, ("return", "absolute_return")


def make_windows(days: int = 1500) -> tuple[DataSpec, list[TensorDataset]]:
    """Return windows (n, WINDOW, 2) of a random walk whose volatility changes slowly, each with the return of the day
    after it (n,), for training, validation and test; and before them what describes them."""
    random = np.random.default_rng(0)
    spread = 0.01 * np.exp(0.6 * np.sin(np.arange(days) / 30))
    returns = (random.standard_normal(days) * spread).astype(np.float32)
    rows = np.column_stack([returns, np.abs(returns)])
    inputs = np.lib.stride_tricks.sliding_window_view(rows, WINDOW, axis=0)[:-1].swapaxes(1, 2)
    target = returns[WINDOW:]
    edges = [0, len(target) * 6 // 10, len(target) * 8 // 10, len(target)]
    splits = [
        TensorDataset(torch.from_numpy(inputs[first:last].copy()), torch.from_numpy(target[first:last].copy()))
        for first, last in itertools.pairwise(edges)
    ]
    spec = DataSpec(
        dataset_id="walk", features=FEATURES, window=WINDOW, horizon=1, target="next_return",
        feature_mean=tuple(rows.mean(0).tolist()), feature_std=tuple(rows.std(0).tolist()),
        target_mean=float(target.mean()), target_std=float(target.std()),
    )  # fmt: skip
    return spec, splits

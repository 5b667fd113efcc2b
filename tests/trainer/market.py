"""A small market with volatility that clusters, in memory, with the reading interface of `trainer.data.shards`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trainer.spec import DataSpec

FEATURES = (
    "scaled_return",
    "log_return",
    "log_rv_1",
    "log_rv_5",
    "log_rv_22",
    "index_return",
    "index_log_rv_5",
    "index_log_rv_22",
)
HORIZON = 5


def trailing(values: np.ndarray, days: int) -> np.ndarray:
    """Mean over the last ``days`` days up to and including each; NaN before there are so many."""
    sums = np.cumsum(np.r_[0.0, values])
    return np.r_[np.full(days - 1, np.nan), (sums[days:] - sums[:-days]) / days]


def log_rv(returns: np.ndarray, days: int) -> np.ndarray:
    return 0.5 * np.log(trailing(returns**2, days) + 1e-8)


class Market:
    """``tickers`` random walks whose log volatility is a slow autoregression they share in part."""

    def __init__(self, tickers: int = 6, days: int = 900, window: int = 12, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def slow(scale: float) -> np.ndarray:
            path = np.zeros(days)
            for day in range(1, days):
                path[day] = 0.97 * path[day - 1] + scale * random.standard_normal()
            return path

        common = slow(0.12)
        returns = [
            0.015 * np.exp(common + slow(0.08)) * random.standard_t(6, days) * np.sqrt(4 / 6) for _ in range(tickers)
        ]
        index = np.mean(returns, axis=0)
        calendar = np.datetime64("2001-01-01") + np.arange(days)
        splits = {
            "train": (0, days * 6 // 10),
            "valid": (days * 6 // 10, days * 8 // 10),
            "test": (days * 8 // 10, days),
        }
        columns: dict[str, list[np.ndarray]] = {name: [] for name in (*FEATURES, "ewma_variance", "target_log_rv")}
        columns |= {"target_return": [], "date": [], "ticker": []}
        self.targets: tuple[str, ...] = ("target_return",)
        self.tickers_by_code = [f"T{number}" for number in range(tickers)]
        self._rows: dict[str, list[np.ndarray]] = {name: [] for name in splits}
        for number, r in enumerate(returns):
            ewma = np.empty(days)
            ewma[0] = r[0] ** 2
            for day in range(1, days):
                ewma[day] = 0.94 * ewma[day - 1] + 0.06 * r[day] ** 2
            future = np.r_[trailing(r, HORIZON)[HORIZON:] * HORIZON, np.full(HORIZON, np.nan)]
            values = {
                "scaled_return": r / np.exp(log_rv(r, 22)),
                "log_return": r,
                **{f"log_rv_{k}": log_rv(r, k) for k in (1, 5, 22)},
                "index_return": index,
                **{f"index_log_rv_{k}": log_rv(index, k) for k in (5, 22)},
                "ewma_variance": ewma,
                "target_log_rv": np.r_[log_rv(r, HORIZON)[HORIZON:], np.full(HORIZON, np.nan)],
                "target_return": future,
                "date": calendar,
                "ticker": np.full(days, number, dtype=np.int32),
            }
            for name, column in columns.items():
                column.append(values[name])
            for split, (first, last) in splits.items():
                ends = np.arange(max(first, 21 + window), last - HORIZON)
                self._rows[split].append(number * days + ends)
        self.columns = {name: np.concatenate(parts) for name, parts in columns.items()}
        self.rows = {split: np.concatenate(parts) for split, parts in self._rows.items()}
        self.features = np.column_stack([self.columns[name] for name in FEATURES]).astype(np.float32)
        seen = self.features[self.rows["train"]].astype(np.float64)
        target = self.columns["target_return"][self.rows["train"]]
        self.spec = DataSpec(
            dataset_id="market",
            features=FEATURES,
            window=window,
            horizon=HORIZON,
            feature_mean=tuple(seen.mean(axis=0).tolist()),
            feature_std=tuple(seen.std(axis=0).tolist()),
            target="target_return",
            target_mean=float(target.mean()),
            target_std=float(target.std()),
        )

    def count(self, split: str) -> int:
        return len(self.rows[split])

    def end_rows(self, split: str, positions: np.ndarray) -> np.ndarray:
        return self.rows[split][positions]

    def add_target(self, name: str) -> None:
        self.targets = ("target_return", name)

    def gather(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        steps = np.arange(-self.spec.window + 1, 1)
        windows = torch.from_numpy(self.features[rows[:, None] + steps])
        target = np.column_stack([self.columns[name][rows] for name in self.targets]).astype(np.float32)
        return windows, torch.from_numpy(target if len(self.targets) == 2 else target[:, 0])

    def read_each(self, split: str, parts: Sequence[np.ndarray], device: torch.device) -> Iterator[Any]:
        return (self.gather(self.end_rows(split, positions)) for positions in parts)

    def column(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.columns[name][rows]

    def tickers(self, rows: np.ndarray) -> np.ndarray:
        return self.columns["ticker"][rows]

    def dates(self, rows: np.ndarray) -> np.ndarray:
        return self.columns["date"][rows]

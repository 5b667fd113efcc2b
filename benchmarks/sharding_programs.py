"""The programs that `benchmarks.sharding` compares: each makes shards of the same prices, or reads windows from them.

Each imports its heavy modules in its function: a measurement counts its own imports and no others. Starting, timing and
limiting the programs belongs to `benchmarks.sharding`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DAYS, TICKERS, WINDOW, HORIZON, BATCH = 8313, 20, 60, 5, 1024

BLOCK = 1024
"""Samples in a block of `COLD`'s block-wise shuffle."""

STEADY_SECONDS = 120.0
"""Seconds after which the rate of a program that writes row by row is known."""

RAY_STORE_BYTES = 512 << 20
"""Shared memory of Ray's object store; the settings' default."""

MDS_ROWS = {"ticker": "str", "date": "int32", "adj_close": "float64"}
"""Columns of a row beside the features, for MDSWriter."""


def write_walks(path: Path, tickers: int) -> None:
    """Write synthetic prices in long form, in order of ticker and date."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    dates = pa.array(np.busday_offset("1990-01-02", np.arange(DAYS), roll="forward").astype("datetime64[D]"))
    writer = None
    for number in range(tickers):
        walk = np.round(50 * np.exp(np.cumsum(random.normal(0, 0.01, DAYS)).clip(-8, 8)), 6)
        table = pa.table({"date": dates, "ticker": [f"SYN{number:05d}"] * DAYS, "adj_close": walk})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


# Sharding. Each function makes shards of the prices in ``folder`` and returns the number of rows that it read.


def shard_ours(folder: Path) -> int:
    """Build a dataset as the product does."""
    from dtrain_dagster.data.engines import DUCKDB

    return _shard(folder / "walks.parquet", folder / "ours", DUCKDB)


def shard_ray(folder: Path) -> int:
    """Build a dataset as the product does with ``DTRAIN_DATA_ENGINE=ray``, on a Ray that is started for it."""
    import ray

    from dtrain_dagster.data.ray_engine import opened_ray_engine

    ray.init(
        num_cpus=len(os.sched_getaffinity(0)), object_store_memory=RAY_STORE_BYTES, include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    with opened_ray_engine("auto") as engine:
        return _shard(folder / "walks.parquet", folder / "ray", engine)


def _shard(walks: Path, storage: Path, engine: Any) -> int:
    from dtrain_dagster.data.prices import write_prices
    from dtrain_dagster.data.sharding import build_dataset
    from dtrain_dagster.data.sources import price_source
    from dtrain_dagster.data.validation import validate_prices

    prices = write_prices(price_source(str(walks)), str(storage), engine=engine)
    build_dataset(prices, validate_prices(prices, None), str(storage), calendar=None, engine=engine)
    return prices.rows


def shard_pandas(folder: Path) -> int:
    """Write features with pandas in one go, without checks and manifest."""
    import pandas as pd

    from dtrain_dagster.data.features import FEATURES, index_features, ticker_features

    frame = pd.read_parquet(folder / "walks.parquet")
    frame["date"] = pd.to_datetime(frame["date"])
    frame = frame.sort_values(["ticker", "date"], kind="stable")
    returns = np.log(frame["adj_close"]).groupby(frame["ticker"]).diff()
    index = index_features(*(part.groupby(frame["date"]).mean().dropna() for part in (returns, returns**2)))
    parts = [ticker_features(part, index, HORIZON) for _, part in frame.groupby("ticker", sort=False)]
    pd.concat(parts).dropna(subset=list(FEATURES)).to_parquet(folder / "pandas.parquet", compression="zstd")
    return len(frame)


def feature_frames(folder: Path) -> Iterator[Any]:
    """Yield features ticker by ticker, as a careful user of mosaicml-streaming would make them."""
    import pandas as pd
    import pyarrow.parquet as pq

    from dtrain_dagster.data.features import FEATURES, index_features, ticker_features

    file = pq.ParquetFile(folder / "walks.parquet")
    total, squares, count = 0.0, 0.0, 0
    for group in range(file.num_row_groups):
        part = file.read_row_group(group, columns=["date", "adj_close"]).to_pandas()
        returns = np.log(part["adj_close"]).diff().to_numpy()
        total, squares, count = total + returns, squares + returns**2, count + 1
    dates = pd.to_datetime(part["date"])
    index = index_features(*(pd.Series(part / count, index=dates).dropna() for part in (total, squares)))
    for group in range(file.num_row_groups):
        part = file.read_row_group(group).to_pandas()
        part["date"] = pd.to_datetime(part["date"])
        yield ticker_features(part, index, HORIZON).dropna(subset=list(FEATURES))


def shard_mosaic(folder: Path) -> int:
    """Write features row by row with mosaicml-streaming, for at most `STEADY_SECONDS`."""
    from streaming import MDSWriter

    from dtrain_dagster.data.features import AUXILIARY, FEATURES, TARGET

    numbers = [*FEATURES, *AUXILIARY, TARGET]
    rows, until = 0, time.monotonic() + STEADY_SECONDS
    columns = {**MDS_ROWS, **dict.fromkeys(numbers, "float32")}
    with MDSWriter(out=str(folder / "mds"), columns=columns, compression="zstd") as writer:
        for frame in feature_frames(folder):
            if time.monotonic() > until:
                break
            rows += DAYS
            values = frame[numbers].to_numpy(np.float32)
            days = frame["date"].to_numpy().astype("datetime64[D]").astype(np.int32)
            closes, ticker = frame["adj_close"].to_numpy(), str(frame["ticker"].iloc[0])
            for place in range(len(frame)):
                head = {"ticker": ticker, "date": days[place], "adj_close": closes[place]}
                writer.write(head | dict(zip(numbers, values[place], strict=True)))
    return rows


# Reading. Each function yields batches of windows without end.


def read_ours(folder: Path, block: int | None = None) -> Iterator[Any]:
    """Yield batches of random windows from the product's shards; ``block``: shuffle in blocks of so many samples."""
    from trainer.data.sampler import Sampler
    from trainer.data.shards import DataShardManager

    shards = DataShardManager(str(next((folder / "ours" / "datasets").glob("*"))), folder / "cache")
    sampler = Sampler(
        samples=shards.count("train"), global_batch_size=BATCH, micro_batches=1, seed=0, rank=0, world_size=1,
        shuffle_block=block,
    )  # fmt: skip
    for epoch in range(10**6):
        for step in range(sampler.steps_per_epoch - 1):
            for first, last in sampler.ahead(epoch, 0, step, is_first=not step):
                shards.will_need("train", first, last)
            yield shards.gather(shards.end_rows("train", sampler.step(epoch, BATCH * step)[1][0].positions))


class Windows:
    """A torch Dataset as most people write it: the arrays in memory, one window a call."""

    def __init__(self, folder: Path) -> None:
        import torch

        from trainer.data.shards import DataShardManager

        shards = DataShardManager(str(next((folder / "ours" / "datasets").glob("*"))), folder / "cache")
        self.ends = shards.end_rows("train", np.arange(shards.count("train")))
        self.features = torch.from_numpy(np.load(shards.folder / "features.npy"))
        self.target = torch.from_numpy(np.load(shards.folder / "target.npy"))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int) -> Any:
        end = self.ends[place]
        return self.features[end - WINDOW + 1 : end + 1], self.target[end]


def read_dataloader(folder: Path, workers: int) -> Iterator[Any]:
    """Yield batches from torch's DataLoader over `Windows`."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Windows(folder),  # type: ignore[arg-type]
        batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0,
    )  # fmt: skip
    while True:
        yield from loader


def read_mosaic(folder: Path, workers: int) -> Iterator[Any]:
    """Yield batches from a StreamingDataset of single windows, which is written first if it is missing."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()  # an earlier process that was ended may have left some
    store = folder / "mds-windows"
    if not store.exists():
        windows = Windows(folder)
        columns = {"x": f"ndarray:float32:{WINDOW},8", "y": "float32"}
        with MDSWriter(out=str(store), columns=columns) as writer:
            for place in range(len(windows)):
                x, y = windows[place]
                writer.write({"x": x.numpy(), "y": np.float32(y)})
    dataset = StreamingDataset(local=str(store), shuffle=True, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, drop_last=True, persistent_workers=workers > 0)
    while True:
        yield from loader


SHARDING: dict[str, Callable[[Path], int]] = {
    "ours": shard_ours,
    "ray": shard_ray,
    "pandas": shard_pandas,
    "mosaic": shard_mosaic,
}
"""Programs that make shards, by name."""

READING: dict[str, Callable[[Path], Iterator[Any]]] = {
    "ours": read_ours,
    "ours_blocks": lambda folder: read_ours(folder, 64),  # groups of a sixth of this small set
    "dataloader_0": lambda folder: read_dataloader(folder, 0),
    "dataloader_2": lambda folder: read_dataloader(folder, 2),
    "mosaic_0": lambda folder: read_mosaic(folder, 0),
    "mosaic_2": lambda folder: read_mosaic(folder, 2),
}
"""Programs that read windows, by name."""

COLD: dict[str, int | None] = {"full": None, "blocks": BLOCK}
"""Ways to read from a cold cache: name → block of the shuffle (None: all samples permuted)."""

"""A file may be larger than memory: what reading it takes does not grow with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

TICKERS = 300

MEASURE = """
import json, re, sys
import duckdb, numpy, pandas, pyarrow.parquet
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Validation

def peak():
    # Of this program alone: ru_maxrss would begin with the peak of the process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

before = peak()
prices = write_prices(price_source(sys.argv[1]), sys.argv[2], memory_limit=96)
dataset = build_dataset(prices, Validation(checks=(), masks=()), sys.argv[2], calendar=None)
print(json.dumps({"grown": peak() - before, "rows": prices.rows, "tickers": prices.tickers, "built": dataset.built}))
"""


def write_interleaved(path: Path, days: int) -> float:
    """A synthetic long file, its tickers in another order each day; size in MB."""
    random = np.random.default_rng(0)
    order = random.permuted(np.tile(np.arange(TICKERS), (days, 1)), axis=1)
    walk = 50 * np.exp(np.cumsum(random.normal(0, 0.01, (days, TICKERS)), axis=0))
    price = np.take_along_axis(walk, order, axis=1).ravel()
    dates = np.repeat(np.datetime64("2000-01-01") + np.arange(days), TICKERS)
    names = np.array([f"SYN{number:03d}" for number in range(TICKERS)])[order.ravel()]
    columns = {"date": dates, "ticker": names, **dict.fromkeys(("open", "high", "low", "close", "adj_close"), price)}
    pa.csv.write_csv(pa.table(columns), path)
    return path.stat().st_size / 1e6


@pytest.mark.long
@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file ten times as large takes little more: far less than what came on top, even as text."""
    size, grown = {}, {}
    for name, days in (("small", 600), ("large", 6000)):
        size[name] = write_interleaved(tmp_path / f"{name}.csv", days)
        command = [sys.executable, "-c", MEASURE, str(tmp_path / f"{name}.csv"), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
        result = json.loads(done.stdout)
        assert (result["rows"], result["tickers"], result["built"]) == (days * TICKERS, TICKERS, True)
        grown[name] = result["grown"]
    assert size["large"] > 190
    # The small one does not come to the engine's limit of 96 MB, the large one does.
    assert grown["large"] - grown["small"] < 0.75 * (size["large"] - size["small"]), (grown, size)
    assert 30 < grown["large"] < size["large"], (grown, size)

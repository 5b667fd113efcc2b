"""The engine of data on a real Ray whose workers die in the shuffle, or whose disk is full: equal bytes, or an error
and nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
from price_files import assert_nothing_half_written, long_frame, prepare, save

from dtrain_dagster.data import ray_engine
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.ray_engine import RayEngine
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.support.ray_session import LEAST_STORE_BYTES, RayPlace, ray_session

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed: pip install 'dtrain[ray]'"),
]


def large_prices(folder: Path, tickers: int, days: int = 8000) -> str:
    """Prices in the order of days, so that each ticker is spread over all blocks."""
    dates = np.busday_offset("1990-01-02", np.arange(days), roll="forward").astype("datetime64[D]")
    names, random = [f"T{number:03d}" for number in range(tickers)], np.random.default_rng(0)
    rows = days * tickers
    frame = pd.DataFrame({
        "date": np.repeat(dates, tickers), "ticker": np.tile(names, days),
        "adj_close": random.normal(90, 1, rows), "open": random.normal(90, 1, rows),
    })  # fmt: skip
    frame.to_parquet(folder / "prices.parquet")
    return str(folder / "prices.parquet")


PARAMS = DatasetParams(window=20, horizon=5, shards=3)


class ShuffleKiller(threading.Thread):
    """Kills the first workers that it sees at a task of the sort, as often as it is told."""

    def __init__(self, times: int) -> None:
        super().__init__(daemon=True)
        self.times, self.killed, self.stopped = times, list[str](), threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while len(self.killed) < self.times and not self.stopped.is_set():
            for process in own.children(recursive=True):
                try:
                    title = " ".join(process.cmdline())
                    if title.startswith("ray::") and any(word in title for word in ("sort", "Sort", "reduce", "map")):
                        process.kill()
                        self.killed.append(title)
                        break
                except psutil.Error:
                    continue
            time.sleep(0.002)


def test_workers_that_are_killed_in_the_shuffle_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = large_prices(tmp_path, tickers=60)
    monkeypatch.setattr(ray_engine, "BLOCK_ROWS", 1 << 15)
    place, killer = RayPlace(cpus=2, store_bytes=LEAST_STORE_BYTES), ShuffleKiller(times=3)
    with ray_session(place, tmp_path / "spill"), ExitStack() as stack:
        killer.start()
        one = write_prices(price_source(address), str(tmp_path / "ray"), engine=RayEngine(place, tmp_path, stack))
        killer.stopped.set()
        killer.join()
    assert killer.killed, "nobody was killed"
    other = write_prices(price_source(address), str(tmp_path / "duckdb"))
    assert one.path.read_bytes() == other.path.read_bytes()
    assert_nothing_half_written(tmp_path / "ray")


BUILD = """
import os, sys
from pathlib import Path
from dtrain_dagster.data import ray_engine
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.support.ray_session import LEAST_STORE_BYTES, RayPlace
address, storage = sys.argv[1:]
before = sorted(str(path) for path in Path(storage).rglob("*") if path.is_file())
try:
    with ray_engine.opened_ray_engine(RayPlace(cpus=1, store_bytes=LEAST_STORE_BYTES), storage) as engine:
        write_prices(price_source(address), storage, engine=engine)
    print("built")
except OSError as error:
    print("OSError", error)
print("same files:", before == sorted(str(path) for path in Path(storage).rglob("*") if path.is_file()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which only root may do")
def test_a_disk_that_is_really_full_is_told_and_nothing_half_written_stays(tmp_path: Path) -> None:
    """The storage folder is a small file system of its own: it is full while rows are sorted."""
    address = large_prices(tmp_path, tickers=300)
    small, storage = tmp_path / "small", tmp_path / "storage"
    prepared = prepare(save(long_frame(), tmp_path / "small.csv"), small, PARAMS)
    storage.mkdir()
    script = (
        f"mount -t tmpfs -o size=60m small {storage} && cp -r {small}/. {storage} && "
        f'exec {sys.executable} -W ignore -c "$BUILD" {address} {storage}'
    )
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script]
    if subprocess.run([*command[:-1], f"mount -t tmpfs none {storage}"], capture_output=True).returncode:
        pytest.skip("this kernel mounts no file system here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "BUILD": BUILD})
    assert "OSError" in done.stdout, (done.stdout, done.stderr[-3000:])
    assert str(storage) in done.stdout
    assert "same files: True" in done.stdout
    again = build_dataset(prepared.prices, prepared.validation, str(small), PARAMS)
    assert (again.built, again.dataset_id) == (False, prepared.dataset.dataset_id)

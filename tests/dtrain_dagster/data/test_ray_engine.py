"""The engine of data on a real Ray: the same bytes as the other's, whatever order, size or end of a worker; nothing
left. What starts a Ray is run by `make test-all`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from price_files import Panel, assert_nothing_half_written, long_frame, prepare, save, sessions, walk

from dtrain_dagster.data import engines
from dtrain_dagster.data.engines import RayEngine, opened_ray_engine, refuse_other_versions
from dtrain_dagster.data.errors import DataEngineError, DataError
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed: pip install 'dtrain[ray]'"),
]
PARAMS = DatasetParams(window=20, horizon=5, shards=3)
STORE_BYTES = 80 << 20
"""The smallest object store that Ray starts with."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEngine]:
    """On one Ray for all tests here, with the smallest object store."""
    import ray

    spill = tmp_path_factory.mktemp("spill")
    ray.init(
        num_cpus=2, object_store_memory=STORE_BYTES, object_spilling_directory=str(spill), include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    try:
        with opened_ray_engine("auto") as opened:
            yield opened
        assert ray.is_initialized(), "a connection that was there is kept"
    finally:
        ray.shutdown()


def content(panel: Panel) -> dict[str, Any]:
    """All that is stored of prices and dataset but the time; shards by their digest."""
    manifest = panel.dataset.manifest()
    del manifest["created_at"]
    return {"prices": panel.prices.path.read_bytes(), **manifest}


def built_on(engine: RayEngine, address: str, storage: Path) -> Panel:
    prices = write_prices(price_source(address), str(storage), engine=engine)
    validation = validate_prices(prices)
    return Panel(prices, validation, build_dataset(prices, validation, str(storage), PARAMS, engine=engine))


def frames_of(count: int, rows: int) -> Iterator[tuple[str, pd.DataFrame]]:
    for number in range(count):
        yield f"T{number}", pd.DataFrame({"ticker": f"T{number}", "adj_close": np.full(rows, number, dtype=float)})


@pytest.mark.long
def test_unsorted_prices_with_gaps_masks_and_one_giant_ticker_give_the_same_bytes(
    engine: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    frame = long_frame(days=500, tickers=("AAA", "BBB", "CCC", "DDD", "EEE"))
    frame.loc[1200:1229, "adj_close"] = frame.loc[1200, "adj_close"]
    frame = frame.drop(index=[650, 651, 700])
    days = sessions(3000, first="2012-01-03")
    giant = pd.DataFrame({"date": days, "ticker": "GIANT", "adj_close": walk(len(days), 9)})
    late = frame.iloc[-10:].assign(ticker="NEW")
    mixed = pd.concat([giant, frame, late]).sort_values(["date", "ticker"], ascending=[True, False])
    address = save(mixed, tmp_path / "prices.csv")
    monkeypatch.setattr(engines, "BLOCK_ROWS", 2048)  # three blocks, through which each ticker is spread
    monkeypatch.setattr(engines, "TASK_ROWS", 600)
    mine = content(built_on(engine, address, tmp_path / "ray"))
    assert mine == content(prepare(address, tmp_path / "duckdb", PARAMS))
    assert mine["masks"]
    assert list(mine["excluded"]) == ["NEW"]
    assert_nothing_half_written(tmp_path)


def killed_once(mark: Path) -> Callable[[pd.DataFrame], tuple[str, int]]:
    def work(frame: pd.DataFrame) -> tuple[str, int]:
        if frame["ticker"].iloc[0] == "T2" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return frame["ticker"].iloc[0], len(frame)

    return work


@pytest.mark.long
def test_the_work_of_a_killed_worker_is_done_again_in_its_place(
    engine: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "TASK_ROWS", 1)
    found = list(engine.map_tickers(frames_of(5, 10), killed_once(tmp_path / "killed")))
    assert found == [(f"T{number}", 10) for number in range(5)]
    assert (tmp_path / "killed").exists()


@pytest.mark.long
def test_workers_that_die_again_and_again_and_refusals_are_told_apart(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
):
    def killed_always(frame: pd.DataFrame) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def refused(frame: pd.DataFrame) -> None:
        raise DataError("window = 60: of no use")

    monkeypatch.setattr(engines, "RETRIES", 1)
    with pytest.raises(DataEngineError, match=r"data_engine=ray: .*died"):
        list(engine.map_tickers(frames_of(1, 10), killed_always))
    with pytest.raises(DataError, match="window = 60: of no use"):
        list(engine.map_tickers(frames_of(1, 10), refused))


@pytest.mark.long
def test_data_larger_than_the_object_store_passes_through_it(engine: RayEngine):
    rows = (8 << 20) // 8
    total = 0.0
    for number, frame in enumerate(engine.map_tickers(frames_of(16, rows), lambda frame: frame)):
        assert len(frame) == rows
        assert frame["adj_close"].iloc[-1] == number
        total += frame["adj_close"].memory_usage(index=False)
    assert total > 1.5 * STORE_BYTES


def test_workers_with_other_versions_are_refused():
    here = {"numpy": "2.1", "pandas": "3.0", "dtrain": "ab"}
    refuse_other_versions(here, dict(here))
    with pytest.raises(DataEngineError, match=r"have pandas 2\.2 \(here 3\.0\), dtrain None \(here ab\): install"):
        refuse_other_versions(here, {"numpy": "2.1", "pandas": "2.2"})


@pytest.mark.parametrize(
    ("address", "said"), [("ray://head:10001", "Ray Client"), ("127.0.0.1:9", "`ray start --head`")]
)
def test_a_cluster_that_cannot_be_used_is_told_with_the_remedy(address: str, said: str):
    code = (
        "from dtrain_dagster.data.engines import opened_ray_engine\n"
        f"with opened_ray_engine({address!r}) as engine:\n    next(engine.map_tickers(iter(()), len))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "DataEngineError" in done.stderr
    assert said in done.stderr

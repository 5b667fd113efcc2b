"""The engine of data on a real Ray: the same bytes as the other's, whatever order, size or end of a worker; nothing
left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from price_files import Panel, assert_nothing_half_written, long_frame, prepare, save, sessions, walk

from dtrain_dagster.data import ray_engine
from dtrain_dagster.data.errors import DataEngineError, DataError
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.ray_engine import RayEngine, refuse_other_versions
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
from dtrain_dagster.support.ray_session import LEAST_STORE_BYTES, RayPlace, ray_session

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed: pip install 'dtrain[ray]'"),
]
PARAMS = DatasetParams(window=20, horizon=5, shards=3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEngine]:
    """On one Ray for all tests here, with the smallest object store."""
    spill = tmp_path_factory.mktemp("spill")
    place = RayPlace(cpus=2, store_bytes=LEAST_STORE_BYTES)
    with ray_session(place, spill), ExitStack() as stack:
        yield RayEngine(place, spill, stack)


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
    monkeypatch.setattr(ray_engine, "BLOCK_ROWS", 2048)  # three blocks, through which each ticker is spread
    monkeypatch.setattr(ray_engine, "TASK_ROWS", 600)
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
    monkeypatch.setattr(ray_engine, "TASK_ROWS", 1)
    found = list(engine.map_tickers(frames_of(5, 10), killed_once(tmp_path / "killed")))
    assert found == [(f"T{number}", 10) for number in range(5)]
    assert (tmp_path / "killed").exists()


def test_workers_that_die_again_and_again_and_refusals_are_told_apart(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
):
    def killed_always(frame: pd.DataFrame) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def refused(frame: pd.DataFrame) -> None:
        raise DataError("window = 60: of no use")

    monkeypatch.setattr(ray_engine, "RETRIES", 1)
    with pytest.raises(DataEngineError, match=r"DTRAIN_DATA_ENGINE=ray: .*died"):
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
    assert total > 1.5 * LEAST_STORE_BYTES


def test_a_ray_that_is_started_here_listens_on_loopback_only(engine: RayEngine):
    next(engine.map_tickers(frames_of(1, 1), len))
    own = psutil.Process()
    heard = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in [own, *own.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert heard == {"127.0.0.1"}


@pytest.mark.long
def test_a_ray_that_is_started_here_lets_nobody_in_without_its_token(engine: RayEngine):
    next(engine.map_tickers(frames_of(1, 1), len))
    import ray

    address = ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init(address={address!r}, logging_level='fatal'); print('let in')"
    said = []
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", ""):
        left_out = {name, "RAY_AUTH_TOKEN"} if name else set()
        kept = {each: value for each, value in os.environ.items() if each not in left_out}
        done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=120)
        said.append("let in" in done.stdout)
    assert said == [False, False, True]


SESSION = """
import json, pathlib, sys, time
import psutil
from dtrain_dagster.support.ray_session import RayPlace, ray_session
with ray_session(RayPlace(), pathlib.Path(sys.argv[1])) as ray:
    assert ray.get(ray.put(1)) == 1
    below = {process.pid: process.name() for process in psutil.Process().children(recursive=True)}
    folder = ray.init(ignore_reinit_error=True).address_info["session_dir"]
    print(json.dumps({"below": below, "folder": folder}), flush=True)
    if sys.argv[2] == "killed":
        time.sleep(100)
"""


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize("end", ["killed", "ended"])
def test_a_ray_that_is_started_here_leaves_nothing(end: str, tmp_path: Path):
    """Also where its starter is killed."""
    command = [sys.executable, "-W", "ignore", "-c", SESSION, str(tmp_path / "spill"), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        if end == "killed":
            process.kill()
    assert len(found["below"]) > 3
    until = time.monotonic() + 60
    while left := [
        *(f"{pid} {name}" for pid, name in found["below"].items() if runs(int(pid))),
        *(folder for folder in (found["folder"], tmp_path / "spill") if Path(folder).exists()),
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    assert not found["folder"].startswith("/tmp/ray/")


FULL = """
import os, sys
os.environ["RAY_local_fs_capacity_threshold"] = "0.0001"  # as if the disk were full
import numpy as np, pandas as pd
from dtrain_dagster.data.ray_engine import opened_ray_engine
from dtrain_dagster.support.ray_session import LEAST_STORE_BYTES, RayPlace
from dtrain_dagster.data import ray_engine
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sources import price_source
ray_engine.BLOCK_ROWS = 1 << 20
with opened_ray_engine(RayPlace(cpus=1, store_bytes=LEAST_STORE_BYTES), sys.argv[2]) as engine:
    try:
        write_prices(price_source(sys.argv[1]), sys.argv[2], engine=engine)
    except OSError as error:
        print("OSError", error)
"""


@pytest.mark.long
def test_a_full_disk_is_told_and_what_was_built_stays(tmp_path: Path):
    """The full disk is emulated: Ray's own guard is told that any use is too much."""
    storage = tmp_path / "storage"
    before = prepare(save(long_frame(), tmp_path / "small.csv"), storage, PARAMS)
    import pyarrow as pa
    import pyarrow.parquet as pq

    days = np.busday_offset("1990-01-02", np.arange(8000), roll="forward").astype("datetime64[D]")
    names = [f"T{number:03d}" for number in range(500)]
    columns = {name: np.random.default_rng(0).normal(9, 1, 8000 * 500) for name in ("adj_close", "open", "high")}
    pq.write_table(pa.table({"date": np.tile(days, 500), "ticker": np.repeat(names, 8000), **columns}),
                   tmp_path / "large.parquet")  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path / "large.parquet"), str(storage)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert "OSError no room for what Ray spills under" in done.stdout, (done.stdout, done.stderr[-3000:])
    assert str(storage) in done.stdout
    assert_nothing_half_written(storage)
    again = build_dataset(before.prices, before.validation, str(storage), PARAMS)
    assert (again.built, again.dataset_id) == (False, before.dataset.dataset_id)
    assert not list((storage / "spill").iterdir())


@pytest.mark.long
def test_a_sort_larger_than_the_object_store_spills_and_gives_the_same_bytes(engine: RayEngine, tmp_path: Path):
    days = np.busday_offset("1990-01-02", np.arange(8000), roll="forward").astype("datetime64[D]")
    rows, random = 8000 * 400, np.random.default_rng(0)
    frame = pd.DataFrame({
        "date": np.repeat(days, 400), "ticker": np.tile([f"T{number:03d}" for number in range(400)], 8000),
        "adj_close": random.normal(90, 1, rows), "open": random.normal(90, 1, rows),
    })  # fmt: skip
    frame.to_parquet(tmp_path / "prices.parquet")
    address = str(tmp_path / "prices.parquet")
    assert rows * 8 * 5 > 1.5 * LEAST_STORE_BYTES
    one = write_prices(price_source(address), str(tmp_path / "ray"), engine=engine)
    other = write_prices(price_source(address), str(tmp_path / "duckdb"))
    assert one.path.read_bytes() == other.path.read_bytes()


def test_workers_with_other_versions_are_refused():
    here = {"numpy": "2.1", "pandas": "3.0", "dtrain": "ab"}
    refuse_other_versions(here, dict(here))
    with pytest.raises(DataEngineError, match=r"have pandas 2\.2 \(here 3\.0\), dtrain None \(here ab\): install"):
        refuse_other_versions(here, {"numpy": "2.1", "pandas": "2.2"})

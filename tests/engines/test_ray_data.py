"""The engine of data on a Ray cluster that exists: the same bytes, also where a machine is lost; the cluster stays."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Validation
from harness.engines.ray_cluster import RayCluster

pytestmark = pytest.mark.long

BUILD = """
import json, sys, time
import pandas as pd
from dtrain_dagster.data import engines
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Validation
from dtrain_dagster.settings.ray import RaySettings

def slow(frame):
    time.sleep(0.5)
    return int(frame["number"].iloc[0])

engines.TASK_ROWS = 1000
frames = ((str(n), pd.DataFrame({"number": [n] * 1000})) for n in range(60))
with engines.opened_ray_engine(RaySettings.read().address) as engine:
    found = []
    for number in engine.map_tickers(frames, slow):
        found.append(number)
        if len(found) == 10:
            print("under way", flush=True)
            sys.stdin.readline()
    assert found == list(range(60)), found
    prices = write_prices(price_source(sys.argv[1]), sys.argv[2], engine=engine)
    none = Validation(checks=(), masks=())
    params = DatasetParams(window=20)
    print(build_dataset(prices, none, sys.argv[2], params, None, engine).uri)
"""


def test_a_cluster_that_loses_a_machine_gives_the_same_dataset(ray_cluster: RayCluster, tmp_path: Path):
    random = Random(0)
    lines = [
        f"2015-{day // 28 + 1:02d}-{day % 28 + 1:02d},T{ticker},{random.uniform(50, 60):.4f}"
        for day in range(330)
        for ticker in range(6)
    ]
    (tmp_path / "prices.csv").write_text("\n".join(["date,ticker,adj_close", *lines]))
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(tmp_path / "prices.csv"), str(tmp_path / "ray")]
    environment = {**os.environ, "DTRAIN_RAY_ADDRESS": ray_cluster.address}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        ray_cluster.kill("r3")
        said, _ = process.communicate("go on\n", timeout=250)
    assert process.returncode == 0
    prices = write_prices(price_source(str(tmp_path / "prices.csv")), str(tmp_path / "duckdb"))
    none = Validation(checks=(), masks=())
    other = build_dataset(prices, none, str(tmp_path / "duckdb"), DatasetParams(window=20), None)
    assert shards(said.splitlines()[-1]) == shards(other.uri)
    assert all(each.poll() is None for each in ray_cluster.processes.values()), "the cluster is not ours to end"


def shards(uri: str) -> dict[str, str]:
    """Path of each shard → its digest, of the file itself."""
    manifest = json.loads((Path(uri) / "manifest.json").read_text())
    paths = [shard["path"] for shard in manifest["shards"]]
    assert len(paths) > 1
    return {path: hashlib.sha256((Path(uri) / path).read_bytes()).hexdigest() for path in paths}

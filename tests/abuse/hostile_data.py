"""Data made to pass for other data, to leave its folder, to run as SQL, or to fill memory and disk.

Each attack gets a folder of its own with a watched file (canary) beside it. Data must be refused with a message or be
read correctly; the canary, and everything else outside the folder, stays unchanged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.abuse.tally import Tally

CANARY = "canary.txt"
ODD_FOLDERS = (
    "p[1]",
    "p*",
    "p?",
    "p{1,2}",
    "p'1",
    'p"1',
    "p;1",
    "p#1",
    "p%311",
    "p\\1",
    "-p",
    "p 1",
    "p::1",
    "$p",
    "ü",
)
"""Names of folders that mean something to a glob, to SQL, to an address or to a shell."""
IDS: tuple[Any, ...] = (
    "../photos", "..", ".", "", "/tmp/photos", "a/../../photos", "a/b", "~", "-rf", "a\0b", "a\nb", "x" * 300, None, 7,
    ["photos"],
)  # fmt: skip
"""Ids of datasets that must be refused."""
SHARD_PATHS: tuple[Any, ...] = (
    "/etc/passwd", "../../canary.txt", "data/../../canary.txt", "", "data//x", "data/./x", "file:///etc/passwd", None,
    "data\\x", "http://127.0.0.1:9/x",
)  # fmt: skip
"""Paths of shards that must be refused."""


def canary(folder: Path) -> str:
    """Put canaries into a folder (a file, and a folder with files as a person has them), and return their digest."""
    (folder / CANARY).write_text("nobody touches this")
    (folder / "photos").mkdir()
    (folder / "photos" / "1.jpg").write_bytes(b"\xff\xd8 a picture")
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    """Return a digest of the names and contents of the canaries."""
    found = [folder / CANARY, *sorted((folder / "photos").rglob("*"))]
    content = [(path.name, path.read_bytes() if path.is_file() else b"") for path in found if path.exists()]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def csv_of(close: float, tickers: int = 2, days: int = 3) -> bytes:
    """Return a price file whose first close is ``close``."""
    rows = ["date,ticker,adj_close"]
    rows += [f"2020-01-{day + 1:02},T{ticker},{close + day}" for ticker in range(tickers) for day in range(days)]
    return "\n".join(rows).encode() + b"\n"


def first_close(ref: Any) -> float:
    """Return the first close of the first ticker in imported prices."""
    from dtrain_dagster.data.prices import iter_tickers

    return float(next(iter(iter_tickers(ref)))[1]["adj_close"].iloc[0])


def takes_its_own_rows(folder: Path, name: str) -> str:
    """Return "" if a price file in a folder of this name is read, and no other file; else the fault."""
    from dtrain_dagster.data.prices import write_prices
    from dtrain_dagster.data.sources import PriceFile

    for other in ("p1", "p2", "p", "pX"):
        (folder / other).mkdir(exist_ok=True)
        (folder / other / "prices.csv").write_bytes(csv_of(900.0))
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "prices.csv").write_bytes(csv_of(100.0))
    ref = write_prices(PriceFile(str(folder / name / "prices.csv")), str(folder / "storage"))
    return "" if first_close(ref) == 100.0 else f"{name}: the rows of another file were taken"


def runs_no_sql(folder: Path, target: Path) -> str:
    """Return "" if prices are built under a home whose name is SQL that would write ``target``; else the fault."""
    from dtrain_dagster.data.prices import write_prices
    from dtrain_dagster.data.sources import PriceFile

    where = str(target).replace("/", "'||chr(47)||'")
    home = folder / f"x'; COPY (SELECT 42) TO ('{where}'); --".replace("/", "_")[:200]
    home.mkdir()
    (folder / "mine.csv").write_bytes(csv_of(100.0))
    write_prices(PriceFile(str(folder / "mine.csv")), str(home))
    return "" if not target.exists() else "SQL in the name of a folder was run"


def dataset(folder: Path) -> Path:
    """Build a small dataset of random walks with the product's own code."""
    import numpy as np
    import pandas as pd

    from dtrain_dagster.data.prices import write_prices
    from dtrain_dagster.data.sharding import DatasetParams, build_dataset
    from dtrain_dagster.data.sources import PriceFile
    from dtrain_dagster.data.validation import validate_prices

    walk = np.random.default_rng(0)
    days = pd.bdate_range("2015-01-01", periods=700).strftime("%Y-%m-%d")
    frame = pd.DataFrame({"date": days})
    for ticker in ("AAA", "BBB"):
        frame[ticker] = 50 * np.exp(np.cumsum(0.01 * walk.standard_normal(len(days))))
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "walk.csv", index=False)
    ref = write_prices(PriceFile(str(folder / "walk.csv")), str(folder))
    built = build_dataset(ref, validate_prices(ref, None), str(folder), DatasetParams(window=20, shards=2), None)
    return Path(built.uri)


def refused(uri: Path, cache: Path) -> str:
    """Return the message that refuses a dataset; "" if it was opened and read."""
    import numpy as np

    from trainer.data.shards import DatasetError, DataShardManager

    try:
        shards = DataShardManager(str(uri), cache)
        shards.gather(shards.end_rows("train", np.arange(shards.count("train"))))
    except DatasetError as error:
        return str(error)
    return ""


def changed(uri: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of the dataset whose manifest was changed."""
    shutil.copytree(uri, target)
    manifest = json.loads((target / "manifest.json").read_text())
    change(manifest)
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = path

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        for step in way:
            node = node[step]
        node[last] = value

    return change


def manifests(chance: random.Random) -> dict[str, Callable[[dict[str, Any]], None]]:
    """Return changes that make a manifest wrong, by description."""
    segment = ("shards", 0, "segments", 0)
    far = chance.choice([10**6, 10**12, 2**63, -1, -(10**9)])
    made = {f"dataset_id {value!r}": _set("dataset_id", value) for value in IDS}
    made |= {f"path {value!r}": _set("shards", 0, "path", value) for value in SHARD_PATHS}
    for column in ("../../photos/1", "features", "a/b", "", None):
        made[f"column {column!r}"] = _set("columns", 2, "name", column)
    for window in (0, -5, 10**9, 1.5, "60", None, math.nan):
        made[f"window {window!r}"] = _set("window", window)
    for number in (0.5, True, math.nan):
        made[f"a segment from row {number!r}"] = _set(*segment, "rows", 0, number)
        made[f"samples from {number!r}"] = _set(*segment, "samples", "train", 0, number)
    made |= {
        f"rows {far}": _set("shards", 0, "rows", far),
        f"a segment to {far}": _set(*segment, "rows", [0, abs(far)]),
        f"samples to {far}": _set(*segment, "samples", "train", [30, abs(far)]),
        "samples before the first window": _set(*segment, "samples", "train", [0, 30]),
        "samples of other rows": _set(*segment, "samples", "train", [-300, -30]),
        "a mean that is no number": _set("normalisation", "target", "mean", math.nan),
        "a deviation of zero": _set("normalisation", "target", "std", 0.0),
        "no shards": _set("shards", None),
        "shards of text": _set("shards", ["x"]),
        "no splits": _set("splits", {"train": {}, "other": {}}),
        "other rows": _set("shards", 0, "rows", 3),
        "another digest": _set("shards", 0, "sha256", "0" * 64),
        "tickers of numbers": _set("shards", 0, "tickers", [1, 2]),
        "other tickers": _set("shards", 0, "tickers", ["ZZZ"]),
    }
    return made


def keeps_the_cache(uri: Path, cache: Path, chance: random.Random) -> str:
    """Return "" if numbers that were changed in the cache, at the same size and time, are not trained on; else the
    fault."""
    import numpy as np

    from trainer.data.shards import DataShardManager

    shards = DataShardManager(str(uri), cache)
    array = shards.folder / chance.choice(["features.npy", "target.npy"])
    rows = shards.end_rows("train", np.arange(5))
    before = [tensor.clone() for tensor in shards.gather(rows)]
    found = os.stat(array)
    with open(array, "r+b") as file:
        file.seek(128)
        file.write(np.full((found.st_size - 128) // 4, 7.5, dtype=np.float32).tobytes())
    os.utime(array, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = DataShardManager(str(uri), cache).gather(rows)
    same = all(bool((one == other).all()) for one, other in zip(before, after, strict=True))
    return "" if same else f"{array.name} was changed in the cache and trained on"


def attack(random: random.Random, rounds: int) -> Tally:
    """Make every attack once per 20 rounds, each time in another order and with other figures."""
    tally = Tally()
    for _ in range(max(1, rounds // 20)):
        with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as folder:
            _attack_once(random, Path(folder), tally)
    return tally


def _attack_once(chance: random.Random, folder: Path, tally: Tally) -> None:
    before = canary(folder)
    uri = dataset(folder / "built")
    checks: list[tuple[str, Callable[[], str]]] = []
    for number, name in enumerate(ODD_FOLDERS):
        place = folder / f"odd-{number}"
        place.mkdir()
        checks.append((f"prices in {name}", lambda place=place, name=name: takes_its_own_rows(place, name)))  # type: ignore[misc]
    checks.append(("a home of SQL", lambda: runs_no_sql(folder, folder / "written-by-sql")))
    checks.append(("a changed cache", lambda: keeps_the_cache(uri, folder / "cache", chance)))
    for number, (what, change) in enumerate(manifests(chance).items()):
        copy = changed(uri, folder / f"copy-{number}", change)
        checks.append((what, lambda copy=copy, what=what: "" if refused(copy, folder / "cache") else f"{what}: taken"))  # type: ignore[misc]
    chance.shuffle(checks)
    for what, check in checks:
        tally.tried += 1
        try:
            problem = check()
        except Exception as error:  # refused, but not with a message of this project
            tally.outages += 1
            tally.findings.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if problem:
            tally.accepted += 1
            tally.findings.append(problem)
        if digest_of(folder) != before:
            tally.executed += 1
            tally.findings.append(f"{what}: something outside was changed")
            before = digest_of(folder)

"""Prices and datasets that were made to be taken for others, to leave their folder, to run as SQL, or to fill disks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtrain_dagster.assets.checks import _samples_check
from dtrain_dagster.automation.retraining import prices_of
from dtrain_dagster.data import price_file
from dtrain_dagster.data.build_once import publish_dataset, verify_shards
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import iter_tickers, write_prices
from dtrain_dagster.data.sources import PriceFile
from tests.abuse import hostile_data
from trainer.data.shards import DatasetError, DataShardManager
from trainer.documents.places import PlaceError
from trainer.errors import DamagedError
from trainer.storage.open import default_cache_dir

STRANGER = 12_345


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in a folder whose name is full of signs that mean something elsewhere."""
    return hostile_data.dataset(tmp_path_factory.mktemp("built") / "-rf 'a\"b[1]*#ü::x;$HOME")


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


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


def test_a_price_file_is_read_alone_whatever_the_name_of_its_folder_and_of_the_home(tmp_path: Path) -> None:
    where = str(tmp_path / "written").replace("/", "'||chr(47)||'")
    for other in ("p1", "p2", "p", "pX"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "prices.csv").write_bytes(hostile_data.csv_of(900.0))
    for name in (*ODD_FOLDERS, f"x'; COPY (SELECT 42) TO ('{where}'); --"[:200]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prices.csv").write_bytes(hostile_data.csv_of(100.0))
        home = tmp_path / "homes" / name.replace("?", "q")  # no home has a "?" in its name: it is refused
        ref = write_prices(PriceFile(str(tmp_path / name / "prices.csv")), str(home))
        assert hostile_data.first_close(ref) == 100.0, name
    assert not (tmp_path / "written").exists()


def test_a_wrong_manifest_is_refused_and_touches_nothing_outside(copy: Path, tmp_path: Path) -> None:
    manifest = (copy / "manifest.json").read_text()
    photos = tmp_path / "photos" / "1.jpg"
    photos.parent.mkdir()
    photos.write_text("a picture")
    for what, change in hostile_data.manifests().items():
        changed = json.loads(manifest)
        change(changed)
        (copy / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(DatasetError):  # noqa: PT012 - some are noticed where rows are read
            shards = DataShardManager(str(copy), tmp_path / "cache")
            shards.gather(shards.end_rows("train", np.arange(shards.count("train"))))
            pytest.fail(f"{what}: it was taken")
    assert photos.read_text() == "a picture"


@pytest.mark.parametrize("name", ["features.npy", "target.npy"])
def test_what_was_changed_in_the_cache_is_not_trained_on(copy: Path, tmp_path: Path, name: str) -> None:
    """At the same size and time."""
    shards = DataShardManager(str(copy), tmp_path / "cache")
    rows = shards.end_rows("train", np.arange(5))
    before = [tensor.clone() for tensor in shards.gather(rows)]
    array = shards.folder / name
    found = os.stat(array)
    with open(array, "r+b") as file:
        file.seek(128)
        file.write(np.full((found.st_size - 128) // 4, 7.5, dtype=np.float32).tobytes())
    os.utime(array, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = DataShardManager(str(copy), tmp_path / "cache").gather(rows)
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))


def test_a_remote_file_is_read_alone_whatever_its_name(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for folder, close in (("p1", 900.0), ("p[1]", 100.0)):
        memory.pipe_file(f"/odd/{folder}/prices.csv", hostile_data.csv_of(close))
    try:
        ref = write_prices(PriceFile("memory://odd/p[1]/prices.csv"), str(tmp_path))
    finally:
        memory.rm("/odd", recursive=True)
    assert hostile_data.first_close(ref) == 100.0


def test_the_engine_can_open_nothing_but_the_one_file(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_bytes(hostile_data.csv_of(1.0))
    with (
        price_file.opened(tmp_path / "prices.csv", "prices") as given,
        price_file.opened_database(given, tmp_path) as database,
    ):
        assert database.execute(f"SELECT count(*) FROM read_csv('{given.engine_path}')").fetchone() == (6,)
        for statement in (
            "SELECT * FROM read_csv('/etc/passwd')",
            "SELECT * FROM read_text('/etc/*')",
            "SELECT * FROM glob('/etc/*')",
            f"ATTACH '{tmp_path}/other.db'",
            f"COPY (SELECT 1) TO '{tmp_path}/written.csv'",
            "INSTALL httpfs",
            "LOAD httpfs",
            "SELECT * FROM 'https://127.0.0.1:9/x.parquet'",
            "SET enable_external_access=true",
        ):
            with pytest.raises(duckdb.Error, match=r"disabled|[Cc]annot"):
                database.execute(statement).fetchall()
    assert not (tmp_path / "written.csv").exists()


def test_names_of_columns_and_tickers_are_data(tmp_path: Path) -> None:
    names = ['A"; DROP TABLE raw; --', "B'); COPY (SELECT 1) TO 'x'; --", "$\\frac{", "<script>"]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    (tmp_path / "wide.csv").write_text(f"date,{','.join(quoted)}\n2020-01-02,1,2,3,4\n2020-01-03,2,3,4,5\n")
    ref = write_prices(PriceFile(str(tmp_path / "wide.csv")), str(tmp_path))
    assert sorted(ticker for ticker, _ in iter_tickers(ref)) == sorted(names)
    for bad in ("x" * 65, "A\x1b[31m"):
        (tmp_path / "bad.csv").write_text(f"date,ticker,adj_close\n2020-01-02,{bad},1\n")
        with pytest.raises(DataError, match=r"ticker holds .*, not a name of 64 letters at most, on one line"):
            write_prices(PriceFile(str(tmp_path / "bad.csv")), str(tmp_path))


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(hostile_data.csv_of(1.0))
    with price_file.opened(path, "p.csv") as given:
        given.refuse_changed()
        path.write_bytes(hostile_data.csv_of(2.0, days=4))
        with pytest.raises(DataError, match="was written while it was read"):
            given.refuse_changed()


def test_a_pipe_or_a_device_is_no_price_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path / "pipe.csv", "/dev/zero", tmp_path):
        with pytest.raises(DataError, match=r"is n(o|either)"):
            write_prices(PriceFile(str(path)), str(tmp_path))


HOSTILE = ("", "[]", "{", "NaN", '{"source": 7}', '{"source": {}, "source": {}}', "[" * 9000, "pipe", "gone")
READERS: dict[str, Callable[[Path], object]] = {
    "a training": lambda folder: DataShardManager(str(folder), folder.parent / "cache"),
    "a check of shards": lambda folder: verify_shards(str(folder)),
    "publishing": lambda folder: publish_dataset(str(folder), folder.name, str(folder.parent / "shared")),
    "prices of a training": lambda folder: prices_of(str(folder.parent), folder.name),
    "samples of a training": lambda folder: _samples_check({"consumed": [], "epochs": 0}, _plan(folder)),
}


def _plan(folder: Path) -> Any:
    """What a plan or a job says of its data."""
    place = SimpleNamespace(uri=str(folder), dataset_id=None, factory=None)
    return SimpleNamespace(job={"dataset": {"uri": str(folder)}}, dataset=place)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_a_manifest_says_what_is_wrong_with_it(copy: Path, reader: str) -> None:
    (copy.parent / "datasets").symlink_to(copy.parent)
    for text in HOSTILE:
        _put(copy / "manifest.json", text)
        if text == "gone" and reader == "prices of a training":
            assert READERS[reader](copy) is None
            continue
        with pytest.raises((DatasetError, DataError, DamagedError), match="copy"):
            READERS[reader](copy)


def _put(manifest: Path, text: str) -> None:
    manifest.unlink(missing_ok=True)
    if text == "pipe":
        os.mkfifo(manifest)
    elif text != "gone":
        manifest.write_text(text)


@pytest.mark.parametrize(("damage", "message"), [("changed", "does not match its manifest"), ("gone", "is missing")])
def test_a_shard_that_is_not_the_manifest_s_is_not_published(copy: Path, damage: str, message: str) -> None:
    shard = next((copy / "data").iterdir())
    content = shard.read_bytes()
    shard.unlink()
    if damage == "changed":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=rf"{shard.name} {message}; delete .* and rebuild"):
        publish_dataset(
            str(copy), json.loads((copy / "manifest.json").read_text())["dataset_id"], str(copy.parent / "s")
        )
    assert not list(copy.parent.glob("s/datasets/*/manifest.json"))


@pytest.mark.timeout(30)
def test_a_manifest_of_prices_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(hostile_data.csv_of(100.0))
    ref = write_prices(PriceFile(str(tmp_path / "mine.csv")), str(tmp_path))
    for text in HOSTILE:
        _put(Path(ref.uri, "manifest.json"), text)
        with pytest.raises((DataError, DamagedError), match=re.escape(ref.uri)):
            ref.manifest()


@pytest.mark.parametrize("path", ["/etc/passwd", "data/../../x"])
def test_nothing_reads_or_copies_what_a_manifest_names_outside(copy: Path, path: str, tmp_path: Path) -> None:
    bad = hostile_data.changed(copy, tmp_path / "bad", hostile_data.with_value("shards", 0, "path", path))
    for use in (
        lambda: verify_shards(str(bad)),
        lambda: publish_dataset(str(bad), "abc", str(tmp_path / "shared")),
        lambda: DataShardManager(str(bad), tmp_path / "cache"),
    ):
        with pytest.raises((DataError, DatasetError, PlaceError), match="not a relative path of plain names"):
            use()
    with pytest.raises(DataError, match="dataset_id"):
        publish_dataset(str(copy), "../photos", str(tmp_path / "shared"))
    assert not (tmp_path / "shared" / "photos").exists()


def test_a_shard_that_is_a_link_is_not_followed_out_of_the_dataset(copy: Path, tmp_path: Path) -> None:
    shard = next((copy / "data").iterdir())
    shard.rename(tmp_path / "elsewhere.parquet")
    shard.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(DatasetError, match="a link out of"):
        DataShardManager(str(copy), tmp_path / "cache")


def test_another_dataset_of_the_same_id_gets_arrays_of_its_own(copy: Path, tmp_path: Path) -> None:
    """Wrong data with the right digest: the id alone does not say what is in the cache."""
    first = DataShardManager(str(copy), tmp_path / "cache").column("adj_close", np.arange(5)).copy()
    other = hostile_data.dataset(tmp_path / "other")
    manifest_id = copy.name
    bad = hostile_data.changed(other, tmp_path / "bad", lambda manifest: manifest.update(dataset_id=manifest_id))
    hostile_data.changed(copy, tmp_path / "good", lambda manifest: manifest.update(dataset_id=manifest_id))
    shutil.copytree(bad, tmp_path / "x")
    _double_prices(tmp_path / "x")
    doubled = DataShardManager(str(tmp_path / "x"), tmp_path / "cache").column("adj_close", np.arange(5)).copy()
    again = DataShardManager(str(tmp_path / "good"), tmp_path / "cache").column("adj_close", np.arange(5))
    assert np.allclose(doubled, 2 * first)
    assert np.array_equal(again, first)


def _double_prices(folder: Path) -> None:
    """Other prices in the first shard, with a manifest that says so."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = manifest["shards"][0]
    path = folder / shard["path"]
    table = pq.read_table(path)
    place = table.schema.get_field_index("adj_close")
    doubled = pa.array(table["adj_close"].to_numpy() * 2)
    pq.write_table(table.set_column(place, table.schema.field(place), doubled), path, row_group_size=10**6)
    shard["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_what_the_cache_holds_is_its_users_alone(copy: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = DataShardManager(str(copy), tmp_path / "cache").folder
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.parent, folder, *folder.iterdir())}
    assert {mode for name, mode in modes.items() if name in (folder.name, "cache")} == {0o700}
    assert {mode for name, mode in modes.items() if name not in (folder.name, "cache")} == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("how", ["folder", "link", "entry", "array"])
def test_a_cache_of_another_user_is_not_read(copy: Path, tmp_path: Path, how: str) -> None:
    cache, photos = tmp_path / "cache", tmp_path / "photos"
    photos.mkdir()
    (photos / "1.jpg").write_text("x")
    if how == "folder":
        cache.mkdir(mode=0o777)
        os.chown(cache, STRANGER, STRANGER)
    elif how == "link":
        cache.symlink_to(photos)
        os.lchown(cache, STRANGER, STRANGER)
    else:
        folder = DataShardManager(str(copy), cache).folder
        os.chown(folder if how == "entry" else folder / "features.npy", STRANGER, STRANGER)
        DataShardManager(str(copy), cache)
        assert {os.stat(path).st_uid for path in (folder, *folder.iterdir())} == {os.geteuid()}, "built anew"
        return
    with pytest.raises(DatasetError, match=rf"another user \(uid {STRANGER}\).*DTRAIN_CACHE"):
        DataShardManager(str(copy), cache)
    assert [path.name for path in photos.iterdir()] == ["1.jpg"]


@pytest.mark.parametrize(("name", "mode"), [(".", 0o002), ("features.npy", 0o020)])
def test_a_cache_entry_that_others_may_write_is_not_read(copy: Path, tmp_path: Path, name: str, mode: int) -> None:
    folder = DataShardManager(str(copy), tmp_path / "cache").folder
    (folder / name).chmod((folder / name).stat().st_mode | mode)
    DataShardManager(str(copy), tmp_path / "cache")
    assert not any(path.stat().st_mode & 0o022 for path in (folder, *folder.iterdir())), "built anew"


def test_the_default_cache_has_the_users_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir().name == f"dtrain-cache-{os.geteuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "dtrain"

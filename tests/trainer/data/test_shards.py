from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from harness.worlds import Forked
from trainer.data.shards import DatasetError, DataShardManager

BUILD = """
import sys, trainer.data.shards
convert = trainer.data.shards.DataShardManager._convert
def counted(self, folder):
    print("converting", flush=True)
    return convert(self, folder)
trainer.data.shards.DataShardManager._convert = counted
print("ready", flush=True)
sys.stdin.readline()
print(trainer.data.shards.DataShardManager(sys.argv[1], sys.argv[2]).count("train"))
"""


@pytest.fixture
def shards(dataset: Path, cache: Path) -> DataShardManager:
    return DataShardManager(str(dataset), cache)


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def stored(dataset: Path) -> dict[str, np.ndarray]:
    """All rows of the dataset, as pyarrow reads them."""
    manifest = json.loads((dataset / "manifest.json").read_text())
    tables = [pq.read_table(dataset / shard["path"]) for shard in manifest["shards"]]
    return {
        name: np.concatenate([table.column(name).to_numpy() for table in tables]) for name in tables[0].column_names
    }


def test_windows_and_targets_are_those_of_the_parquet_files(shards: DataShardManager, dataset: Path) -> None:
    columns, spec = stored(dataset), shards.spec
    rows = shards.end_rows("train", np.arange(shards.count("train")))[::97]
    windows, targets = shards.gather(rows)
    assert windows.shape == (len(rows), spec.window, len(spec.features))
    for window, row in zip(windows.numpy(), rows, strict=True):
        for number, name in enumerate(spec.features):
            assert np.array_equal(window[:, number], columns[name][row - spec.window + 1 : row + 1])
    assert np.array_equal(targets.numpy(), columns["target_return"][rows])
    assert np.array_equal(shards.column("adj_close", rows), columns["adj_close"][rows])
    assert np.array_equal(shards.column("log_rv_5", rows), columns["log_rv_5"][rows])
    assert np.array_equal(shards.dates(rows), columns["date"][rows].astype("datetime64[D]"))
    assert [shards.tickers_by_code[code] for code in shards.tickers(rows)] == columns["ticker"][rows].tolist()


def test_a_second_target_is_stacked_to_the_first(shards: DataShardManager, dataset: Path) -> None:
    columns = stored(dataset)
    rows = shards.end_rows("train", np.arange(shards.count("train")))[::97]
    windows, alone = shards.gather(rows)
    before = shards.sample_bytes
    shards.add_target("target_log_rv")
    assert shards.targets == ("target_return", "target_log_rv")
    assert shards.sample_bytes == before + 4 * shards.rows
    same, both = shards.gather(rows)
    assert torch.equal(both[:, 0], alone)
    assert np.array_equal(both[:, 1].numpy(), columns["target_log_rv"][rows])
    assert torch.equal(same, windows)


def test_a_second_target_that_is_not_stored_is_refused(shards: DataShardManager) -> None:
    with pytest.raises(DatasetError, match=r"no column volume, which the loss needs .* such as student_t"):
        shards.add_target("volume")


def test_no_window_crosses_a_ticker_or_its_split(shards: DataShardManager) -> None:
    splits = shards.manifest["splits"]
    for split in ("train", "valid", "test"):
        rows = shards.end_rows(split, np.arange(shards.count(split)))
        assert len(set(rows.tolist())) == len(rows) == shards.manifest["samples"][split]
        first, last = rows - shards.spec.window + 1, rows + shards.spec.horizon
        assert np.array_equal(shards.tickers(first), shards.tickers(last))
        days = (np.datetime64(splits[split]["first"]), np.datetime64(splits[split]["last"]))
        assert shards.dates(rows).min() >= days[0]
        assert shards.dates(last).max() <= days[1]


def test_the_order_of_positions_does_not_matter(shards: DataShardManager) -> None:
    positions = np.array([5, 3, 900, 3])
    rows = shards.end_rows("train", positions)
    assert np.array_equal(rows, shards.end_rows("train", np.arange(901))[positions])
    windows, _ = shards.gather(rows)
    assert torch.equal(windows[1], windows[3])


@pytest.mark.slow
def test_processes_that_come_together_build_the_cache_once(dataset: Path, tmp_path: Path) -> None:
    with Forked(BUILD, str(dataset), str(tmp_path)) as one, Forked(BUILD, str(dataset), str(tmp_path)) as other:
        assert one.stdout.readline() == other.stdout.readline() == "ready\n"
        one.say("")
        other.say("")
        said = [one.communicate(), other.communicate()]
    assert sum("converting" in text for text in said) == 1
    assert len({text.split()[-1] for text in said}) == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("fault", ["array cut short", "other bytes", "no list", "empty list", "array missing"])
def test_a_damaged_cache_is_built_anew(dataset: Path, tmp_path: Path, fault: str) -> None:
    whole = DataShardManager(str(dataset), tmp_path)
    expected, _ = whole.gather(np.array([100]))
    expected = expected.clone()
    if fault == "array cut short":
        os.truncate(whole.folder / "features.npy", 5000)
    elif fault == "other bytes":
        path = whole.folder / "features.npy"
        content = bytearray(path.read_bytes())
        content[1000:] = bytes(len(content) - 1000)  # zeros behind the header
        path.write_bytes(content)
    elif fault == "array missing":
        (whole.folder / "target.npy").unlink()
    elif fault == "no list":
        (whole.folder / "complete.json").unlink()
    else:
        (whole.folder / "complete.json").write_text("")
    again = DataShardManager(str(dataset), tmp_path)
    assert torch.equal(again.gather(np.array([100]))[0], expected)


def test_what_a_killed_builder_left_is_cleared_away(dataset: Path, tmp_path: Path) -> None:
    name = DataShardManager(str(dataset), tmp_path).folder.name
    shutil.rmtree(tmp_path / name)
    (tmp_path / f"{name}-killed").mkdir()
    DataShardManager(str(dataset), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [name]


def test_a_damaged_shard_is_refused_by_name_and_leaves_no_cache(copy: Path, tmp_path: Path) -> None:
    [_, shard] = sorted((copy / "data").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=rf"{shard.name} has sha256 .*damaged or was changed"):
        DataShardManager(str(copy), tmp_path / "cache")
    shard.unlink()
    with pytest.raises(DatasetError, match=rf"{shard.name} is missing; rebuild the dataset"):
        DataShardManager(str(copy), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_another_dataset_than_asked_for_is_refused(dataset: Path, cache: Path) -> None:
    with pytest.raises(DatasetError, match=r"dataset.dataset_id = 'other', but .* holds .*point dataset.uri"):
        DataShardManager(str(dataset), cache, expected_id="other")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "holds no manifest.json.*interrupted"),
        ("{", "manifest.json is not valid JSON"),
        ("[]", "does not describe a dataset"),
        ('{"schema_version": 9, "dataset_id": "x"}', "schema version 9, this trainer reads 1"),
    ],
)
def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path, manifest: str | None, message: str) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(DatasetError, match=message):
        DataShardManager(str(tmp_path), tmp_path / "cache")


def test_a_remote_dataset_is_fetched_and_read_alike(dataset: Path, cache: Path, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(dataset), "/remote-dataset", recursive=True)
    remote = DataShardManager("memory://remote-dataset", tmp_path)
    local = DataShardManager(str(dataset), cache)
    rows = local.end_rows("test", np.arange(50))
    assert torch.equal(remote.gather(rows)[0], local.gather(rows)[0])
    fsspec.filesystem("memory").rm("/remote-dataset", recursive=True)


def test_a_full_disk_is_an_error_and_not_a_killed_process(dataset: Path, tmp_path: Path) -> None:
    program = """
import resource, sys
from trainer.data.shards import DataShardManager
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
DataShardManager(sys.argv[1], sys.argv[2])
"""
    with Forked(program, str(dataset), str(tmp_path), errors=True) as process:
        assert "File too large" in process.communicate()
        assert process.wait() == 1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]

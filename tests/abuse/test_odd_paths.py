"""Homes of any name work or are refused in words, and nothing beside them is touched.

In homes of odd names prices are imported (`test_hostile_data.py`), and a job is trained, listed and read
(`test_run_directories.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.common import Refusal, run_dir
from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.settings.environment import SettingsError, load_settings
from trainer.documents.places import PlaceError, checked_id, checked_name, inside, own_folder
from trainer.storage.open import open_storage


@pytest.mark.parametrize("name", ["a?b", "a%41b", "a%b", "a\nb", "a\tb", "a\x1b[31mb", "a\x7fb", "a\udcffb"])
def test_a_home_that_databases_cannot_address_is_refused_by_name_and_nothing_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", f"{tmp_path}/{name}")
    with pytest.raises(SettingsError, match=r"DTRAIN_HOME.*choose another folder"):
        load_settings()
    done = CliRunner().invoke(main, ["jobs"])
    assert (done.exit_code, "DTRAIN_HOME" in done.output) == (2, True)
    assert not [character for character in done.output if character in "\x1b\x7f"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["a::b", "[1]", "a*", "a#b", "a?b", "a%41"])
def test_storage_takes_a_path_as_it_is(path: str, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / path))
    storage.write("data/x", b"1")
    assert (tmp_path / path / "data" / "x").read_bytes() == b"1"
    assert (storage.is_local, storage.list("data"), storage.read("data/x")) == (True, ["x"], b"1")
    storage.delete("data")
    assert [item.name for item in tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("job_id", ["../photos", "..", ".", "/etc", "a/b", "", "-rf", "a\n", "x" * 300])
def test_an_id_of_a_job_cannot_leave_its_folder(job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    with pytest.raises(Refusal, match="the job is"):
        run_dir(load_settings(), job_id)
    cluster = LocalClusterManager(tmp_path)
    for ask in (cluster.job_status, cluster.cancel_job, cluster.node_usage):
        with pytest.raises(ClusterError, match="the id of the job is"):
            ask(job_id)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "", ".", "a//b", "a/../b", "a\\b", "-x", "a\0", "~", ".hidden", 7, None]
)
def test_a_name_that_could_leave_its_folder_is_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(PlaceError):
        checked_name(name, "a shard")
    with pytest.raises(PlaceError):
        inside(tmp_path, name, "a shard")


def test_a_link_out_of_a_folder_is_refused_and_one_within_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "within").write_text("y")
    (folder / "in").symlink_to(folder / "within")
    with pytest.raises(PlaceError, match="a link out of"):
        inside(folder, "out", "a shard")
    assert inside(folder, "in", "a shard").read_text() == "y"
    assert checked_id("train-1.a_b", "a job") == "train-1.a_b"


def test_a_folder_that_is_open_to_all_is_closed_or_refused(tmp_path: Path) -> None:
    fresh = own_folder(tmp_path / "a" / "fresh", "choose another")
    assert fresh.stat().st_mode & 0o777 == 0o700
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose").chmod(0o777)
    assert own_folder(tmp_path / "loose", "choose another").stat().st_mode & 0o777 == 0o755
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    with pytest.raises(PlaceError, match=r"shared by all users.*choose another"):
        own_folder(tmp_path / "sticky", "choose another")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceError, match="is not a folder"):
        own_folder(tmp_path / "file", "choose another")

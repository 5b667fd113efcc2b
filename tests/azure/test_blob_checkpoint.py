"""Checkpoints on Blob: what counts, what is refused, who wins, and what happens while storage is away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.azure.azurite import Azurite
from harness.azure.blob_proxy import BlobProxy, Fault
from harness.waiting import until
from trainer.checkpoint import async_writer
from trainer.checkpoint.manager import BEST, LATEST, CheckpointError, CheckpointManager
from trainer.rundir import RunDir
from trainer.storage import azure_account, azure_blob

Container = Callable[[], str]


class Watched:
    """A manager of a run directory on Blob, and what it reported."""

    def __init__(self, uri: str) -> None:
        self.rundir = RunDir(uri)
        self.storage = self.rundir.storage
        self.reports: list[dict[str, Any]] = []
        self.manager = CheckpointManager(
            self.rundir, 2, "this", lambda kind, **fields: self.reports.append({"kind": kind, **fields})
        )

    def save(self, step: int, is_best: bool = False) -> str:
        """Save a state and wait until it counts; its folder."""
        weights = torch.full((30_000,), float(step))
        assert self.manager.save({"model": {"weight": weights}}, step, 1, is_best)
        assert self.manager.wait(60)
        assert self.reports[-1]["kind"] == "checkpoint", self.reports
        return f"checkpoints/g0001-s{step:09d}"

    def loaded(self) -> tuple[str, float]:
        """Folder and content of the one that counts."""
        folder, state = self.manager.load_latest() or ("", {})
        [value] = state["model"]["weight"].unique().tolist()
        return folder, value


@pytest.fixture
def proxy(azurite: Azurite, container: Container, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobProxy]:
    hasty = replace(azure_account.RETRIES, first_pause_seconds=0.01, longest_pause_seconds=0.01, max_attempts=4)
    monkeypatch.setattr(azure_account, "RETRIES", hasty)
    monkeypatch.setattr(async_writer, "RETRIES", replace(async_writer.RETRIES, first_pause_seconds=0.05))
    with BlobProxy(azurite.url) as between:
        for name, value in between.environment.items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.fixture
def watched(container: Container, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(azure_blob, "BLOCK_BYTES", 50_000)  # several blocks for each state
    made = Watched(f"{container()}/jobs/one")
    yield made
    made.manager.close(10)


def test_what_is_saved_comes_back_and_old_ones_go(watched: Watched) -> None:
    folders = [watched.save(step, is_best=step == 2) for step in range(1, 6)]
    assert watched.loaded() == (folders[4], 5.0)
    assert watched.manager.load_best()[0] == folders[1]
    assert watched.manager.folders() == [folders[4], folders[3], folders[1]], "two are kept, and the best"
    manifest = json.loads(watched.storage.read(f"{folders[4]}/manifest.json"))
    assert set(manifest["files"]["state.pt"]) == {"bytes", "sha256"}, "this account names no versions"
    assert "manifest_version_id" not in json.loads(watched.storage.read(LATEST))


def test_versions_are_recorded_where_the_account_names_them(proxy: BlobProxy, watched: Watched) -> None:
    proxy.versions = True
    folder = watched.save(1, is_best=True)
    manifest = json.loads(watched.storage.read(f"{folder}/manifest.json"))
    assert manifest["files"]["state.pt"]["version_id"] == "v1"
    for name in (LATEST, BEST):
        assert json.loads(watched.storage.read(name))["manifest_version_id"] == "v2"
    proxy.versions = False
    watched.save(2)
    assert "manifest_version_id" not in json.loads(watched.storage.read(LATEST)), "nor that of the one before"


def test_while_storage_is_away_training_goes_on_and_the_save_counts_afterwards(
    proxy: BlobProxy, watched: Watched
) -> None:
    watched.save(1)
    proxy.faults = [Fault("drop", times=1_000_000)]
    assert watched.manager.save({"model": {"weight": torch.full((30_000,), 2.0)}}, 2, 1), "taken, and written later"
    until(lambda: any(item["kind"] == "checkpoint_failed" for item in watched.reports), "the failed save", pause=0.05)
    proxy.faults.clear()
    assert watched.manager.wait(60)
    assert watched.loaded() == ("checkpoints/g0001-s000000002", 2.0)


def test_no_single_failure_of_the_network_spoils_a_save(proxy: BlobProxy, watched: Watched) -> None:
    """Each request of a save once: the blocks, their commit, the manifest, LATEST, BEST, the deletion of old ones."""
    watched.save(1)
    for step, holds in enumerate(("comp=block&", "comp=blocklist", "manifest.json", "LATEST.json", "BEST.json"), 2):
        proxy.faults = [Fault("lost answer", "PUT", holds)]
        folder = watched.save(step, is_best=True)
        assert watched.loaded() == (folder, float(step))
        assert watched.manager.load_best()[0] == folder
    assert proxy.injected == ["lost answer"] * 5
    assert not [item for item in watched.reports if item["kind"] == "checkpoint_failed"]
    assert len(watched.manager.folders()) == 2


def test_storage_that_lets_nobody_in_is_not_taken_for_empty(proxy: BlobProxy, watched: Watched) -> None:
    """It would be taken for a reason to start over, and to delete what «has no manifest»."""
    folder = watched.save(1)
    proxy.faults = [Fault("busy", "GET", "manifest.json", times=1_000_000, status=403)]
    with pytest.raises(CheckpointError, match=r"no checkpoint .* can be read: .*denies access"):
        watched.manager.load_latest()
    proxy.faults.clear()
    assert watched.loaded() == (folder, 1.0)

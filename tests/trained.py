"""What a training leaves behind, in a Dagster instance and in storage, for tests of what is decided from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import dagster as dg

from trainer.storage.open import open_storage


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record_prices(instance: dg.DagsterInstance, content: str, last_date: str) -> None:
    metadata = {"sha256": content, "last_date": last_date}
    instance.report_runless_asset_event(dg.AssetMaterialization("stock_prices", metadata=metadata))


def record_training(
    instance: dg.DagsterInstance,
    shared_uri: str,
    content: str,
    last_date: str,
    version: str = "1",
    alias: str = "champion",
) -> None:
    """A model of prices with this sha256, registered just now."""
    dataset_id = f"dataset{content[:8]}"
    manifest = {"dataset_id": dataset_id, "source": {"sha256": content, "last_date": last_date}}
    open_storage(f"{shared_uri}/datasets/{dataset_id}").write("manifest.json", json.dumps(manifest).encode())
    record_prices(instance, content, last_date)
    model = {"version": version, "alias": alias, "tags": dg.JsonMetadataValue({"dataset_id": dataset_id})}
    for asset, metadata in (("trained_checkpoint", {"dataset_id": dataset_id}), ("registered_model", model)):
        instance.report_runless_asset_event(dg.AssetMaterialization(asset, metadata=metadata))

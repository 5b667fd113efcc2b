"""The asset `sharded_dataset` of a graph whose dataset was made elsewhere: a folder, or what another asset returns."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import LaunchpadOptions, refusing_mistakes
from dtrain_dagster.assets.dataset import dataset_head
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.data.publish import publish_dataset
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.resources import ProjectResource, project_resource
from dtrain_dagster.support.page_entries import fit_page
from trainer.data.manifest import NoDatasetError, read_dataset_manifest
from trainer.storage.open import open_storage


class FolderConfig(LaunchpadOptions):
    """The choice of the dataset in the launchpad of `sharded_dataset`."""

    folder: str
    """A dataset's folder (a path or an address of storage), or the id of one under DTRAIN_HOME."""


def build_given_dataset(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `sharded_dataset` of a graph that trains on a folder or on what an asset returns."""
    return _of_asset(pipeline) if pipeline.upstream else _of_folder(pipeline)


def _of_folder(pipeline: Pipeline) -> dg.AssetsDefinition:
    names, options = pipeline.names, pipeline.options("sharded_dataset", FolderConfig)

    @dg.asset(
        **pipeline.asset("sharded_dataset", "data"),
        deps=list(pipeline.deps),
        required_resource_keys={names.project},
        description="A dataset that was made elsewhere: its manifest is read and checked.",
    )
    def sharded_dataset(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
    ):  # no annotation, see assets.common
        """Take the dataset of a folder, and publish it to the storage that the nodes read."""
        return take_dataset(context, project_resource(context, names), config.folder)  # type: ignore[attr-defined]

    return sharded_dataset


def _of_asset(pipeline: Pipeline) -> dg.AssetsDefinition:
    names = pipeline.names
    arguments = pipeline.asset("sharded_dataset", "data")

    @dg.asset(
        **arguments | {"ins": {"upstream": dg.AssetIn(key=pipeline.upstream)}},
        deps=list(pipeline.deps),
        required_resource_keys={names.project},
        description="The dataset that the upstream asset has made: its manifest is read and checked.",
    )
    def sharded_dataset(context: dg.AssetExecutionContext, upstream: Any):  # no annotation, see assets.common
        """Take the dataset whose folder an asset has returned, and publish it to the storage that the nodes read."""
        return take_dataset(context, project_resource(context, names), folder_of(upstream))

    return sharded_dataset


def folder_of(value: object) -> str:
    """Return the folder that an upstream asset's value names. Raise `dagster.Failure` for a value that names none."""
    if isinstance(value, BuiltDataset):
        return value.uri
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise dg.Failure(
        f"the upstream asset returned a {type(value).__name__}: return the dataset's folder as a string or a Path",
        allow_retries=False,
    )


def take_dataset(context: dg.AssetExecutionContext, project: ProjectResource, folder: str) -> dg.MaterializeResult:
    """Return the dataset of a folder, where the nodes read it. Raise `dagster.Failure` where there is none."""
    with refusing_mistakes():
        taken = publish(read_dataset(folder, project), project)
    manifest = taken.manifest()
    context.log.info(f"dataset {taken.dataset_id} in {taken.uri}: samples {taken.samples}")
    return dg.MaterializeResult(
        value=taken,
        data_version=dg.DataVersion(taken.dataset_id),
        metadata=fit_page(
            {
                **dataset_head(taken, f"; a dataset of {manifest.get('kind', 'windows')}"),
                **({"dagster/row_count": taken.rows} if taken.rows else {}),
                "dataset_id": taken.dataset_id,
                "kind": manifest.get("kind", "windows"),
                "dataset_folder": dg.MetadataValue.path(taken.uri),
                "read_by_nodes_at": taken.shared_uri,
            }
        ),
    )


def read_dataset(folder: str, project: ProjectResource) -> BuiltDataset:
    """Return a reference to the dataset of a folder, or of an id below the project's home. Raise `DatasetError` where
    there is none or it cannot be used."""
    home = dict.fromkeys(f"{uri}/datasets/{folder}" for uri in (project.storage_uri, project.shared_uri))
    named = [folder] if "://" in folder else [str(Path(folder).expanduser().absolute()), *home]
    for uri in named:
        storage = open_storage(uri)
        if storage.exists("manifest.json"):
            manifest = read_dataset_manifest(storage)
            rows = sum(shard["rows"] for shard in manifest.get("shards", ()) if "rows" in shard)
            return BuiltDataset(
                uri=uri,
                dataset_id=manifest["dataset_id"],
                rows=rows,
                samples=manifest["samples"],
                excluded=manifest.get("excluded", {}),
                built=False,
            )
    raise NoDatasetError(
        f"no manifest.json in {' or '.join(named)}: give the folder of a dataset, or the id of one (launchpad of "
        "sharded_dataset, or the argument dataset of the pipeline)"
    )


def publish(taken: BuiltDataset, project: ProjectResource) -> BuiltDataset:
    """Return the dataset where nodes read it: in place, or copied where this machine's folders are out of reach."""

    if open_storage(project.shared_uri).is_local or not open_storage(taken.uri).is_local:
        return replace(taken, shared_uri=taken.uri)
    shared_uri, _ = publish_dataset(taken.uri, taken.dataset_id, project.shared_uri)
    return replace(taken, shared_uri=shared_uri)

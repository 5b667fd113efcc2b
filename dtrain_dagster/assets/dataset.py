"""The data assets: checked prices, and the shards that every node reads: made from prices, or elsewhere (a folder, or
what another asset returns)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.common import (
    MOST_ROWS,
    LaunchpadOptions,
    best_rows,
    head_of_page,
    refusing_mistakes,
    sentences,
)
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.data.build_once import BuiltDataset, publish_dataset
from dtrain_dagster.data.engines import DUCKDB, DataEngine, opened_ray_engine
from dtrain_dagster.data.prices import PricesRef, write_prices
from dtrain_dagster.data.sharding import LEAST, DatasetParams, build_dataset
from dtrain_dagster.data.sources import known_findings, price_source
from dtrain_dagster.data.validation import CHECKS, CheckResult, validate_prices
from dtrain_dagster.reports.small_pictures import small_bar
from dtrain_dagster.resources import ProjectResource, project_resource
from dtrain_dagster.settings.environment import load_settings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.support.page_entries import fit_page
from trainer.data.manifest import NoDatasetError, read_dataset_manifest
from trainer.storage.open import open_storage


class PricesConfig(LaunchpadOptions):
    """The choice of prices in the launchpad of `stock_prices`."""

    source: str | None = None
    """sp500_panel, or the address of a file; unset: DTRAIN_PRICES."""


class DatasetConfig(LaunchpadOptions):
    """The form of a sample and the split of the days, in the launchpad of `sharded_dataset`."""

    window: int = Field(default=DatasetParams().window, ge=LEAST["window"])
    """The number of past days in a sample."""
    horizon: int = Field(default=DatasetParams().horizon, ge=LEAST["horizon"])
    """The number of days from a sample's last day to its target."""
    train_last: str | None = None
    """Last day of training labels; unset: 2009-12-31 for the panel, else after 70 % of the days."""
    valid_last: str | None = None
    """Last day of validation labels; unset: 2013-12-31 for the panel, else after 85 % of the days."""
    shards: int = Field(default=DatasetParams().shards, ge=LEAST["shards"])
    """The number of files that the rows are divided into."""


def build_stock_prices(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `stock_prices` of a graph."""
    names, options = pipeline.names, pipeline.options("stock_prices", PricesConfig)
    key = names.key("stock_prices")

    @dg.asset(
        **pipeline.asset("stock_prices", "data"),
        kinds={"parquet", "duckdb"},
        required_resource_keys={names.project},
        description="Checked daily prices in one format, from the bundled panel, your own file or a download.",
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, description=description, blocking=severity == "error")
            for name, (severity, description) in CHECKS.items()
        ],
    )
    def stock_prices(context: dg.AssetExecutionContext, config: options):  # type: ignore[valid-type]
        """Read prices from their source into one shape, validate them, and return them with their checks."""
        with refusing_mistakes():
            return read_prices(context, config, project_resource(context, names))

    return stock_prices


def read_prices(
    context: dg.AssetExecutionContext, config: PricesConfig, project: ProjectResource
) -> dg.MaterializeResult:
    """Return the prices that the launchpad or DTRAIN_PRICES names, with their checks."""
    settings = load_settings()
    with opened_engine(settings.data_engine) as engine:
        given = price_source(config.source or settings.prices)
        ref = write_prices(given, project.storage_uri, engine=engine)
    source = ref.manifest()["source"]
    context.log.info(f"{ref.rows:,} rows of {ref.tickers} tickers, {ref.first_date} to {ref.last_date}")
    validation = validate_prices(ref, settings.calendar)
    masks = [dg.TableRecord(asdict(mask)) for mask in validation.masks]
    if validation.masks:
        one = validation.masks[0]
        context.log.warning(f"{len(masks)} masked, the first {one.ticker}, {one.first} to {one.last}: {one.reason}")
    known = known_findings(source["sha256"])
    checks = [_asset_check(check, known.get(check.name, 0)) for check in validation.checks]
    failed = sum(not check.passed for check in checks)
    metadata: dict[str, Any] = {
        **head_of_page(
            f"{ref.rows:,} daily prices of {ref.tickers} tickers, {ref.first_date} to {ref.last_date}; "
            f"{len(masks) or 'no'} stretches are masked; "
            f"{failed or 'none'} of {len(checks)} checks found something new",
            "",
            {"tickers": ref.tickers, "first_date": ref.first_date, "last_date": ref.last_date},
        ),
        **({"masked": best_rows([mask.data for mask in masks])} if masks else {}),
        "dagster/row_count": ref.rows,
        "title": source["title"],
        "licence": source["licence"],
        "notes": source["notes"],
        "sha256": f"{source['sha256'][:16]}…, the full hash is in the manifest",
        "prices_folder": dg.MetadataValue.path(str(ref.path.parent)),
    }
    if len(masks) > MOST_ROWS:
        metadata["masked_in_all"] = dg.JsonMetadataValue([dict(mask.data) for mask in masks])
    return dg.MaterializeResult(
        value=ref,
        data_version=dg.DataVersion(ref.prices_id),
        metadata=fit_page(metadata),
        check_results=checks,
    )


def _asset_check(check: CheckResult, known: int) -> dg.AssetCheckResult:
    """Return a check's result. ``known``: how often it finds something in these prices, as is known of them."""
    severity = dg.AssetCheckSeverity.ERROR if check.severity == "error" else dg.AssetCheckSeverity.WARN
    metadata = {"found": check.metadata["found"], "examples": sentences(check.metadata["examples"])}
    if is_known := not check.passed and check.metadata["found"] == known:
        metadata["known"] = "These prices are bundled with dtrain, and this finding is known, so it is not a failure."
    passed = check.passed or is_known
    return dg.AssetCheckResult(check_name=check.name, passed=passed, severity=severity, metadata=metadata)


def build_sharded_dataset(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `sharded_dataset` of a graph that is made from prices; else `build_given_dataset`."""
    names, options = pipeline.names, pipeline.options("sharded_dataset", DatasetConfig)

    @dg.asset(
        **pipeline.asset("sharded_dataset", "data", inputs=("stock_prices",)),
        kinds={"parquet"},
        required_resource_keys={names.project},
        description="Parquet shards of features and targets, and a manifest. They are named after their content and "
        "never built twice.",
    )
    def sharded_dataset(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        stock_prices: PricesRef,
    ):  # no annotation, see assets.common
        """Build the dataset of the prices, unless it exists, and publish it to the storage that the nodes read."""
        with refusing_mistakes():
            return shard_prices(context, config, project_resource(context, names), stock_prices)

    return sharded_dataset


def shard_prices(
    context: dg.AssetExecutionContext, config: DatasetConfig, project: ProjectResource, stock_prices: PricesRef
) -> dg.MaterializeResult:
    """Return the dataset of these prices, where the nodes read it."""
    settings = load_settings()
    calendar = settings.calendar
    params = DatasetParams(**config.model_dump())
    validation = validate_prices(stock_prices, calendar)
    with opened_engine(settings.data_engine) as engine:
        built = build_dataset(stock_prices, validation, project.storage_uri, params, calendar, engine)
    context.log.info(
        f"dataset {built.dataset_id}: {built.rows:,} rows, samples {built.samples}"
        + ("" if built.built else "; it already existed, so nothing was rebuilt")
    )
    shared_uri, copied = publish_dataset(built.uri, built.dataset_id, project.shared_uri)
    built = replace(built, shared_uri=shared_uri)
    if copied:
        context.log.info(f"copied {copied / 1e6:.1f} MB to {shared_uri}, where the nodes read it")
    for ticker, reason in built.excluded.items():
        context.log.warning(f"{ticker} is left out: {reason}")
    manifest = built.manifest()
    columns = [dg.TableColumn(c["name"], c["type"], f"{c['description']} ({c['role']})") for c in manifest["columns"]]
    facts = {
        "dagster/column_schema": dg.TableSchema(columns),
        "splits": dg.JsonMetadataValue(manifest["splits"]),
        "shards": len(manifest["shards"]),
        "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
        "excluded_tickers": dg.JsonMetadataValue(built.excluded),
        "rebuilt": built.built,
        "data_engine": settings.data_engine if built.built else "not asked: it already existed",
    }
    return _page_of(built, "" if built.built else "; it already existed", facts)


def _page_of(dataset: BuiltDataset, note: str, facts: dict[str, Any]) -> dg.MaterializeResult:
    """Return a dataset as an asset. ``note``: the end of the verdict; ``facts``: what its page says besides."""
    counts = ", ".join(f"{count:,} of {split}" for split, count in dataset.samples.items())
    head = head_of_page(
        f"{f'{dataset.rows:,} rows give samples' if dataset.rows else 'Samples'}: {counts}{note}",
        small_bar({split: float(count) for split, count in dataset.samples.items()}),
        {f"{split}_samples": count for split, count in dataset.samples.items()},
    )
    places = {"dataset_folder": dg.MetadataValue.path(dataset.uri), "read_by_nodes_at": dataset.shared_uri}
    rows = {"dagster/row_count": dataset.rows} if dataset.rows else {}
    return dg.MaterializeResult(
        value=dataset,
        data_version=dg.DataVersion(dataset.dataset_id),
        metadata=fit_page({**head, **facts, **rows, "dataset_id": dataset.dataset_id, **places}),
    )


@contextmanager
def opened_engine(name: str) -> Iterator[DataEngine]:
    """Yield the engine of data of this name. Raise `SettingsError` where its settings cannot be used."""
    if name == "duckdb":
        yield DUCKDB
        return
    with opened_ray_engine(RaySettings.read().address) as engine:
        yield engine


class FolderConfig(LaunchpadOptions):
    """The choice of the dataset in the launchpad of `sharded_dataset`."""

    folder: str
    """A dataset's folder (a path or an address of storage), or the id of one under DTRAIN_HOME."""


def build_given_dataset(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `sharded_dataset` of a graph that trains on a folder or on what an asset returns."""
    names, options = pipeline.names, pipeline.options("sharded_dataset", FolderConfig)
    arguments = pipeline.asset("sharded_dataset", "data") | {
        "deps": list(pipeline.deps),
        "required_resource_keys": {names.project},
    }
    if pipeline.upstream is not None:

        @dg.asset(
            **arguments | {"ins": {"upstream": dg.AssetIn(key=pipeline.upstream)}},
            description="The dataset that the upstream asset has made: its manifest is read and checked.",
        )
        def of_asset(context: dg.AssetExecutionContext, upstream: Any):  # no annotation, see assets.common
            """Take the dataset whose folder an asset has returned, and publish it to what the nodes read."""
            return take_dataset(context, project_resource(context, names), folder_of(upstream))

        return of_asset

    @dg.asset(**arguments, description="A dataset that was made elsewhere: its manifest is read and checked.")
    def of_folder(context: dg.AssetExecutionContext, config: options):  # type: ignore[valid-type]
        """Take the dataset of a folder, and publish it to what the nodes read."""
        return take_dataset(context, project_resource(context, names), config.folder)  # type: ignore[attr-defined]

    return of_folder


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
    kind = taken.manifest().get("kind", "windows")
    context.log.info(f"dataset {taken.dataset_id} in {taken.uri}: samples {taken.samples}")
    return _page_of(taken, f"; a dataset of {kind}", {"kind": kind})


def read_dataset(folder: str, project: ProjectResource) -> BuiltDataset:
    """Return a reference to the dataset of a folder, or of an id below the project's home. Raise `DatasetError` where
    there is none or it cannot be used."""
    home = dict.fromkeys(f"{uri}/datasets/{folder}" for uri in (project.storage_uri, project.shared_uri))
    named = [folder] if "://" in folder else [str(Path(folder).expanduser().absolute()), *home]
    for uri in named:
        storage = open_storage(uri)
        if storage.exists("manifest.json"):
            return BuiltDataset.of(uri, read_dataset_manifest(storage))
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

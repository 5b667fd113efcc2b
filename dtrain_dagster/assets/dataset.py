"""The data assets: checked prices, and the shards that every node reads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.common import (
    MOST_ROWS,
    LaunchpadOptions,
    best_rows,
    charts,
    head_of_page,
    refusing_mistakes,
    sentences,
)
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.data.engines import DUCKDB, DataEngine, opened_ray_engine
from dtrain_dagster.data.preview import dataset_picture, median_prices, preview_rows
from dtrain_dagster.data.prices import PricesRef, write_prices
from dtrain_dagster.data.publish import publish_dataset
from dtrain_dagster.data.sharding import LEAST, BuiltDataset, DatasetParams, build_dataset
from dtrain_dagster.data.sources import known_findings, price_source
from dtrain_dagster.data.validation import CHECKS, CheckResult, validated
from dtrain_dagster.jobs.progress import code_version
from dtrain_dagster.reports.small_pictures import small_bar, small_curves
from dtrain_dagster.resources import ProjectResource, project_resource
from dtrain_dagster.settings.environment import load_settings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.support.page_entries import fit_page
from trainer.storage.open import open_storage

LEAKAGE_CHECK_SECONDS = 300
MOST_COLUMNS = 5
"""The columns of a dataset's preview."""


class PricesConfig(LaunchpadOptions):
    """The choice of prices in the launchpad of `stock_prices`."""

    source: str | None = None
    """sp500_panel, us_ohlcv, yfinance:AAPL,MSFT, or the address of a file; unset: DTRAIN_PRICES."""


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
        ref = write_prices(given, project.storage_uri, engine=engine, calendar=settings.calendar)
    manifest = ref.manifest()
    source, notes = manifest["source"], manifest.get("columns", [])  # older ones have no notes
    for note in notes:
        context.log.warning(note)
    context.log.info(f"{ref.rows:,} rows of {ref.tickers} tickers, {ref.first_date} to {ref.last_date}")
    validation = validated(ref, settings.calendar)
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
            small_curves({"median price": median_prices(str(ref.path))}),
            {"tickers": ref.tickers, "first_date": ref.first_date, "last_date": ref.last_date},
        ),
        **({"masked": best_rows([mask.data for mask in masks])} if masks else {}),
        "dagster/row_count": ref.rows,
        "title": source["title"],
        "licence": source["licence"],
        "notes": source["notes"],
        **({"columns": sentences(notes)} if notes else {}),
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
    """Return the asset `sharded_dataset` of a graph that is made from prices. Others are
    `dtrain_dagster.assets.given_dataset`."""
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
    validation = validated(stock_prices, calendar)
    with opened_engine(settings.data_engine) as engine:
        built = build_dataset(stock_prices, validation, project.storage_uri, params, calendar, engine)
    return show_dataset(context, project, built, settings.data_engine)


def show_dataset(
    context: dg.AssetExecutionContext, project: ProjectResource, built: BuiltDataset, engine: str
) -> dg.MaterializeResult:
    """Return a dataset as an asset, once it is where the nodes read it."""
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
    rows = preview_rows(built.uri)
    return dg.MaterializeResult(
        value=built,
        data_version=dg.DataVersion(built.dataset_id),
        metadata=fit_page(
            {
                **dataset_head(built, "" if built.built else "; it already existed"),
                "preview": _preview(rows),
                "charts": charts({"Prices and splits": dataset_picture(built.uri)}),
                "dagster/row_count": built.rows,
                "dagster/column_schema": dg.TableSchema(
                    [
                        dg.TableColumn(c["name"], c["type"], f"{c['description']} ({c['role']})")
                        for c in manifest["columns"]
                    ]
                ),
                "dataset_id": built.dataset_id,
                "splits": dg.JsonMetadataValue(manifest["splits"]),
                "shards": len(manifest["shards"]),
                "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
                "excluded_tickers": dg.JsonMetadataValue(built.excluded),
                "rebuilt": built.built,
                "data_engine": engine if built.built else "not asked: it already existed",
                "dataset_folder": dg.MetadataValue.path(built.uri),
                "read_by_nodes_at": shared_uri,
            }
        ),
    )


def dataset_head(built: BuiltDataset, note: str) -> dict[str, Any]:
    """Return what the page of a dataset begins with. ``note``: the end of the verdict."""
    counts = ", ".join(f"{count:,} of {split}" for split, count in built.samples.items())
    return head_of_page(
        f"{f'{built.rows:,} rows give samples' if built.rows else 'Samples'}: {counts}{note}",
        small_bar({split: float(count) for split, count in built.samples.items()}),
        {f"{split}_samples": count for split, count in built.samples.items()},
    )


@contextmanager
def opened_engine(name: str) -> Iterator[DataEngine]:
    """Yield the engine of data of this name. Raise `SettingsError` where its settings cannot be used."""
    if name == "duckdb":
        yield DUCKDB
        return
    with opened_ray_engine(RaySettings.read().address) as engine:
        yield engine


def _preview(rows: list[dict[str, Any]]) -> dg.TableMetadataValue:
    """Return the first rows with a few of their columns; the page lists all columns above it."""
    names = list(rows[0]) if rows else []
    return best_rows(rows, names if len(names) <= MOST_COLUMNS else [*names[: MOST_COLUMNS - 1], names[-1]])


def build_leakage_checks(pipeline: Pipeline) -> dg.AssetChecksDefinition:
    """Return the leakage checks of a graph's `sharded_dataset`."""
    names, key = pipeline.names, pipeline.names.key("sharded_dataset")

    @dg.multi_asset_check(
        name=names.unique("leakage_checks"),
        required_resource_keys={names.project},
        ins={"sharded_dataset": dg.AssetIn(key=key)},
        specs=[
            dg.AssetCheckSpec(
                "shuffled_labels_teach_nothing",
                asset=key,
                blocking=True,
                description="A model trained on labels of other windows is no better than the unconditional "
                "distribution.",
            ),
            dg.AssetCheckSpec(
                "planted_leak_is_caught",
                asset=key,
                blocking=True,
                description="With the label among the features the leak alarm goes off; without it, it stays silent.",
            ),
        ],
    )
    def leakage_checks(
        context: dg.AssetCheckExecutionContext, sharded_dataset: BuiltDataset
    ) -> Iterable[dg.AssetCheckResult]:
        """Run the leakage checks: three short trainings (about 10 s), once per dataset and version of the trainer."""
        project = project_resource(context, names)
        kind = sharded_dataset.manifest().get("kind", "windows")
        if kind != "windows":
            why = f"not judged: these checks are for windows of prices, and this is a dataset of {kind}"
            checks = ("shuffled_labels_teach_nothing", "planted_leak_is_caught")
            yield from (
                dg.AssetCheckResult(check_name=name, asset_key=key, passed=True, metadata={"why": why})
                for name in checks
            )
            return
        # A given folder may be read-only, or another project's: only what is built here is written to.
        own = f"{project.storage_uri}/leakage_checks/{sharded_dataset.dataset_id}"
        yield from check_leakage(project, sharded_dataset.uri, sharded_dataset.uri if is_built(pipeline) else own, key)

    return leakage_checks


def is_built(pipeline: Pipeline) -> bool:
    """Return whether the graph builds its dataset itself, and so may write into its folder."""
    return pipeline.source == "prices"


def check_leakage(project: ProjectResource, uri: str, kept_at: str, key: dg.AssetKey) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of a dataset's leakage checks, whose report is in the folder ``kept_at``."""
    storage = open_storage(kept_at)
    name = f"canaries-{code_version()}.json"  # the name of older datasets too
    if not storage.exists(name):
        storage.write(name, _run_leakage_checks(project, uri))
    report = json.loads(storage.read(name))
    figures = {f"{trial}_nll": result["nll"] for trial, result in report["trials"].items()}
    for check, reasons in report["checks"].items():
        metadata: dict[str, Any] = {"reasons": sentences(reasons), "constant_nll": report["constant_nll"], **figures}
        metadata["seconds"] = report["seconds"]
        yield dg.AssetCheckResult(check_name=check, asset_key=key, passed=not reasons, metadata=metadata)


def _run_leakage_checks(project: ProjectResource, uri: str) -> bytes:
    """Return the JSON report of the leakage checks, which run in a process of their own: torch stays out of this
    one."""
    command = [sys.executable, "-m", "dtrain_dagster.data.leakage_check", "--dataset", uri]
    environment = os.environ | project.trainer_env()
    done = subprocess.run(command, capture_output=True, timeout=LEAKAGE_CHECK_SECONDS, env=environment, check=False)
    if done.returncode != 0:
        raise dg.Failure(f"the leakage checks could not be run: {done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout.splitlines()[-1]

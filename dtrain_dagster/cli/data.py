"""`dtrain data`: datasets of rows, built from files of one's own.

Datasets of windows of prices are built by the asset `sharded_dataset`.
"""

from __future__ import annotations

from typing import Any

import click

from dtrain_dagster.cli.common import json_option, print_json, read_settings, refuses, say
from dtrain_dagster.data.rows import RowParams, build_rows

VALID, TEST = "Share of the validation split.", "Share of the test split."
SEED = "The same seed divides in the same way."


@click.command()
@click.argument("source", metavar="SOURCE", type=click.Path())
@click.option("--target", required=True, metavar="COLUMN", help="The column to predict.")
@click.option(
    "--task",
    type=click.Choice(["regression", "binary", "multiclass"]),
    help="What kind of prediction it is.  [default: by the target]",
)
@click.option("--drop", multiple=True, metavar="COLUMN", help="A column that is left out. May be repeated.")
@click.option(
    "--split-by", metavar="COLUMN", help="A column that names splits (train, valid, test), or whose rows stay together."
)
@click.option("--valid-fraction", type=float, default=0.1, show_default=True, metavar="SHARE", help=VALID)
@click.option("--test-fraction", type=float, default=0.1, show_default=True, metavar="SHARE", help=TEST)
@click.option(
    "--missing",
    type=click.Choice(["refuse", "mean"]),
    default="refuse",
    show_default=True,
    help="Missing numbers: refuse them, or take the mean and add an input that says so.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help=SEED)
@json_option()
@refuses
def data(source: str, target: str, drop: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Build a dataset of rows from Parquet or CSV files.

    SOURCE is a file, or a folder whose Parquet files, or else CSV files, are all read. The dataset is named after its
    content and its settings, so the same one is built only once. It is stored in the home
    (DTRAIN_HOME/storage/datasets), and `dtrain train --dataset ID` trains on it.

    Columns of numbers, of dates and of text are features. A date counts as days. Text is a category: a missing one, or
    one that the training split does not have, sets no input.

    \b
    Examples:
      dtrain data houses.parquet --target price
      dtrain data visits.parquet --target bought --split-by customer \\
        --drop visit_id --missing mean
    """
    made = build_rows(source, read_settings().storage_uri, RowParams(target=target, drop=drop, **options))
    manifest = made.manifest()
    columns = [column for column in manifest["columns"] if column["role"] == "feature"]
    names = manifest["classes"]
    told = f"{manifest['task']} of {target}" + (f", {len(names)} classes" if names else "")
    samples = made.samples
    if as_json:
        print_json({"dataset_id": made.dataset_id, "built": made.built, "samples": samples, "folder": made.uri})
    else:
        counts = ", ".join(f"{split} {count:,}" for split, count in samples.items())
        was_there = "" if made.built else "; it was there already"
        say(f"{made.dataset_id}  {told} by {len(columns)} columns; samples: {counts}{was_there}")
        say(f"dtrain train --dataset {made.dataset_id}", err=True)
    for name, why in made.excluded.items():
        say(f"note: {name} is left out: it {why}", err=True)
    for note in manifest.get("notes", ()):
        say(f"note: {note}", err=True)

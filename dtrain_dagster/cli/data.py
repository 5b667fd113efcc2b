"""`dtrain data`: datasets of rows and of tokens, built from files of one's own.

Datasets of windows of prices are built by the asset `sharded_dataset`. Added to `dtrain` by `dtrain_dagster.cli.main`.
Each command imports what it needs, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import read_settings, refuses, say
from dtrain_dagster.cli.job_names import complete_files
from dtrain_dagster.cli.json_fields import DATASET
from dtrain_dagster.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from dtrain_dagster.data.build_once import FinishedDataset

VALID, TEST = "Share of the validation split.", "Share of the test split."
SEED = "The same seed divides in the same way."


@click.group()
def data() -> None:
    """Build datasets of rows and of tokens from files of your own.

    A dataset is named after its content and its settings, so the same dataset is built only once. It is stored in the
    home (DTRAIN_HOME/storage/datasets), and `dtrain train --dataset ID` trains on it.
    """


@data.command()
@click.argument("source", metavar="SOURCE", shell_complete=complete_files)
@click.option("--target", required=True, metavar="COLUMN", help="The column to predict.")
@click.option("--task", type=click.Choice(["regression", "binary", "multiclass"]),
              help="What kind of prediction it is.  [default: by the target]")  # fmt: skip
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
@json_option(DATASET)
@refuses
def rows(source: str, target: str, drop: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Build a dataset of rows from Parquet or CSV files.

    SOURCE is a file, or a folder whose Parquet files, or else CSV files, are all read.

    Columns of numbers, of dates and of text are features. A date counts as days. Text is a category: a missing one, or
    one that the training split does not have, sets no input.

    \b
    Examples:
      dtrain data rows houses.parquet --target price
      dtrain data rows visits.parquet --target bought --split-by customer \\
        --drop visit_id --missing mean
    """
    from dtrain_dagster.data.rows import RowParams, build_rows

    made = build_rows(source, read_settings().storage_uri, RowParams(target=target, drop=drop, **options))
    columns = [column for column in made.manifest["columns"] if column["role"] == "feature"]
    names = made.manifest["classes"]
    told = f"{made.manifest['task']} of {target}" + (f", {len(names)} classes" if names else "")
    _say_what_was_built(made, f"{told} by {len(columns)} columns", as_json)
    for name, why in made.manifest["excluded"].items():
        say(f"note: {name} is left out: it {why}", err=True)
    for note in made.manifest.get("notes", ()):
        say(f"note: {note}", err=True)


@data.command()
@click.argument("source", metavar="SOURCE", shell_complete=complete_files)
@click.option(
    "--pattern",
    default="**/*.txt",
    show_default=True,
    metavar="GLOB",
    help="Which files are documents; **/ is any folder.",
)
@click.option(
    "--context", type=click.IntRange(min=1), default=256, show_default=True, metavar="N", help="Tokens in one sample."
)
@click.option("--encode", metavar="PACKAGE.MODULE:FUNCTION", help="A tokenizer of your own.  [default: bytes]")
@click.option("--vocabulary", type=click.IntRange(min=2), metavar="N", help="The number of its ids.")
@click.option("--valid-fraction", type=float, default=0.05, show_default=True, metavar="SHARE", help=VALID)
@click.option("--test-fraction", type=float, default=0.05, show_default=True, metavar="SHARE", help=TEST)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help=SEED)
@json_option(DATASET)
@refuses
def tokens(
    source: str, pattern: str, encode: str | None, vocabulary: int | None, as_json: bool, **options: Any
) -> None:
    """Build a dataset of tokens from documents.

    SOURCE is a file, or a folder in which each file is a document.

    By default a token is a byte. A tokenizer of your own is a function that returns the ids of a document (bytes); its
    module is allowed by DTRAIN_FACTORY_MODULES.

    \b
    Examples:
      dtrain data tokens my_texts
      dtrain data tokens my_texts --pattern '**/*.md' --context 1024
      dtrain data tokens my_texts --encode my_tokens:encode --vocabulary 50257
    """
    from dtrain_dagster.data.tokens import BYTE_VOCABULARY, BYTES, TokenParams, build_tokens

    if (encode is None) != (vocabulary is None):
        raise click.UsageError("--encode and --vocabulary must be given together", click.get_current_context())
    params = TokenParams(encoding=encode or BYTES, vocabulary=vocabulary or BYTE_VOCABULARY, **options)
    made = build_tokens(source, read_settings().storage_uri, params, pattern)
    found = made.manifest["source"]
    total = sum(shard["rows"] for shard in made.manifest["shards"])
    _say_what_was_built(made, f"{total:,} tokens of {found['documents']} documents, {params.context} a sample", as_json)


def _say_what_was_built(made: FinishedDataset, what: str, as_json: bool) -> None:
    """Print the dataset's id, and what it holds."""
    samples = made.manifest["samples"]
    if as_json:
        print_json({"dataset_id": made.dataset_id, "built": made.built, "samples": dict(samples), "folder": made.uri})
        return
    counts = ", ".join(f"{split} {count:,}" for split, count in samples.items())
    say(f"{made.dataset_id}  {what}; samples: {counts}" + ("" if made.built else "; it already existed"))
    say(f"dtrain train --dataset {made.dataset_id}", err=True)

"""`dtrain init`: a project of one's own, with a training graph that runs as it is. Its files are in
`dtrain_dagster.cli.new_project`."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

import click

from dtrain_dagster.cli.common import Refusal, refuses, say
from dtrain_dagster.cli.job_names import complete_files
from dtrain_dagster.cli.new_project import (
    EXAMPLE_TABLE,
    EXAMPLE_TARGET,
    NewProject,
    Requirement,
    Table,
    files_of,
    name_of,
    refuse_taken,
    requirement_of,
)
from dtrain_dagster.data.table_file import files_of as files_of_table
from dtrain_dagster.data.table_file import open_table
from dtrain_dagster.settings.home import make_home
from dtrain_dagster.settings.home_search import DEFAULT
from dtrain_dagster.support.graph_names import checked_names
from trainer.runtime.scratch import scratch_folder

EXAMPLE = "example"


@click.command()
@click.argument("folder", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", help="Of the package and of the graph.  [default: the folder's name]")
@click.option("--own-model", is_flag=True, help="Begin with a file for a model of your own.")
@click.option(
    "--table", metavar="FILE|example", shell_complete=complete_files,
    help="Train on a Parquet or CSV file (or a folder of them) with a column to predict; example: on a small one that "
    "comes with the project.  [default: the bundled stock prices]",
)  # fmt: skip
@click.option("--target", metavar="COLUMN", help="The column of FILE to predict.")
@refuses
def init(folder: Path, name: str | None, own_model: bool, table: str | None, target: str | None) -> None:
    """Make a project of your own in FOLDER, by default in this one.

    It has a graph that runs as it is, a workflow for CI, and a README. Nothing is overwritten.

    \b
    Examples:
      dtrain init my-project
      dtrain init houses --table houses.parquet --target price --own-model
    """
    folder = folder.absolute()
    try:
        chosen = checked_names(name or name_of(folder.name)).pipeline
        refuse_taken(chosen)
    except ValueError as error:
        raise Refusal(f"{error}" if name else f"{error} (the folder's name; --name gives another)") from None
    project = NewProject(
        name=chosen, requirement=_installed(), table=_table_of(folder, table, target), own_model=own_model
    )
    files = files_of(project)
    _write_project(folder, project, files)
    make_home(folder / DEFAULT)  # its own, though a folder above may have one: two projects must not share a home
    _say_what_is_next(folder, project, files)


def _installed() -> Requirement:
    """Return how to ask for the dtrain that runs here."""
    found = metadata.distribution("dtrain")
    origin = found.read_text("direct_url.json")
    return requirement_of(found.version, json.loads(origin) if origin else None)


def _table_of(folder: Path, table: str | None, target: str | None) -> Table | None:
    """Return the table that the options name, which is there and has the column. Raise `Refusal` otherwise."""
    if table is None or table == EXAMPLE:
        if target is not None:
            raise click.UsageError("--target needs --table FILE", click.get_current_context())
        return Table(path=Path(EXAMPLE_TABLE), target=EXAMPLE_TARGET) if table else None
    if target is None:
        raise click.UsageError("--table FILE needs --target COLUMN", click.get_current_context())
    path = Path(table).expanduser().absolute()
    columns = _columns_of(path)
    if target not in columns:
        raise Refusal(f"--target {target}: {path} has no such column; it has {', '.join(columns)}")
    return Table(path=path.relative_to(folder) if path.is_relative_to(folder) else path, target=target)


def _columns_of(path: Path) -> list[str]:
    """Return the names of a table's columns. Raise `DataError` for what is no table."""
    with scratch_folder("table") as scratch:
        return list(open_table(files_of_table(path), scratch).kinds)


def _write_project(folder: Path, project: NewProject, files: dict[str, str]) -> None:
    """Write the files. Raise `Refusal` if one of them is there already; then none was written."""
    shipped = project.table.shipped if project.table else ""
    if there := [path for path in (*files, *([shipped] if shipped else [])) if (folder / path).exists()]:
        raise Refusal(f"{folder} has {', '.join(there)} already, which would be overwritten; name another folder")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / path, "x", encoding="utf-8") as file:
            file.write(text)
    if shipped:
        (folder / shipped).parent.mkdir(exist_ok=True)
        _write_example(folder / shipped)


def _write_example(path: Path) -> None:
    """Write scikit-learn's measurements of breast tumours, with one of them as a category beside it."""
    import pandas as pd
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer(as_frame=True)
    table = found.data.copy()
    table["size"] = pd.cut(table["mean radius"], [0, 12, 16, 100], labels=["small", "middle", "large"]).astype(str)
    table["diagnosis"] = found.target_names[found.target]
    table.to_parquet(path)


def _say_what_is_next(folder: Path, project: NewProject, files: dict[str, str]) -> None:
    """Print what was made, and the commands that go on from there."""
    say(f"{folder}: a project with the graph {project.name}")
    for path in sorted(files):
        say(f"  {path}")
    say("\nnext:")
    if folder != Path.cwd():
        say(f"  cd {shlex.quote(str(folder))}")
    select = f"-m {project.name}.definitions --select 'group:{project.name}' --config run.yaml"
    say(f"  python -m dtrain_dagster work dagster asset materialize {select}")
    say("  dtrain ui")
    if project.requirement.is_from_file:
        say("\ndtrain was installed from a file: CI and other machines need its wheel, too (README.md says where)")

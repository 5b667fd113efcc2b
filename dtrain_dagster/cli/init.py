"""`dtrain init`: a project of one's own, with a training graph that runs as it is. The templates of its
files are in the folder new_project_files."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import click

from dtrain_dagster.cli.common import Refusal, refuses, say
from dtrain_dagster.data.table_file import files_of as files_of_table
from dtrain_dagster.data.table_file import open_table
from dtrain_dagster.settings.home import DEFAULT, make_home
from dtrain_dagster.support.graph_names import checked_names
from trainer.runtime.scratch import scratch_folder

EXAMPLE = "example"
EXAMPLE_TABLE, EXAMPLE_TARGET = "data/tumours.parquet", "diagnosis"
"""Where the table that comes with a project lies in it, and its column to predict."""
SMALL_TABLE, SMALL_BATCH = 20_000, 16
"""Rows of a table below which a project begins with small batches, and the rows of these."""
OURS = ("trainer", "dtrain_dagster", "dagster", "dtrain")
"""Names of packages that a project cannot have."""


@click.command()
@click.argument("folder", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", help="Of the package and of the graph.  [default: the folder's name]")
@click.option("--own-model", is_flag=True, help="Begin with a file for a model of your own.")
@click.option(
    "--table",
    metavar="FILE|example",
    type=click.Path(),
    help="Train on a Parquet or CSV file (or a folder of them) with a column to predict; example: on a small one that "
    "comes with the project.  [default: the bundled stock prices]",
)
@click.option("--target", metavar="COLUMN", help="The column of FILE to predict.")
@click.option("--drop", multiple=True, metavar="COLUMN", help="A column of FILE that is left out. May be repeated.")
@refuses
def init(
    folder: Path, name: str | None, own_model: bool, table: str | None, target: str | None, drop: tuple[str, ...]
) -> None:
    """Make a project of your own in FOLDER, by default in this one.

    It has a graph that runs as it is, a workflow for CI, and a README. Nothing is overwritten. Of a table of your own,
    missing numbers count as the mean, with an input that says so; the definitions have that.

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
    found = metadata.distribution("dtrain")
    requirement, is_from_file = requirement_of(found.version, json.loads(found.read_text("direct_url.json") or "null"))
    trained = _table_of(folder, table, target, drop)
    files = files_of(chosen, requirement, is_from_file, trained, own_model)
    _write_project(folder, files, trained["shipped"] if trained else "")
    make_home(folder / DEFAULT)  # its own, though a folder above may have one: two projects must not share a home
    say(f"{folder}: a project with the graph {chosen}")
    for path in sorted(files):
        say(f"  {path}")
    say("\nnext:")
    if folder != Path.cwd():
        say(f"  cd {shlex.quote(str(folder))}")
    select = f"-m {chosen}.definitions --select 'group:{chosen}' --config run.yaml"
    say(f"  python -m dtrain_dagster work dagster asset materialize {select}")
    say("  dtrain ui")
    if is_from_file:
        say("\ndtrain was installed from a file: CI and other machines need its wheel, too (README.md says where)")


def _table_of(folder: Path, given: str | None, target: str | None, drop: tuple[str, ...]) -> dict[str, Any] | None:
    """Return what templates say of the table that the options name. Raise `Refusal` for one that has no such columns,
    and `DataError` for what is no table."""
    if given is None or given == EXAMPLE:
        for option, value in (("--target", target), ("--drop", drop)):
            if value:
                raise click.UsageError(f"{option} needs --table FILE", click.get_current_context())
        own = {"expression": in_project(EXAMPLE_TABLE), "target": EXAMPLE_TARGET, "params": "", "batch": SMALL_BATCH}
        return {**own, "shipped": EXAMPLE_TABLE} if given else None
    if target is None:
        raise click.UsageError("--table FILE needs --target COLUMN", click.get_current_context())
    path = Path(given).expanduser().absolute()
    with scratch_folder("table") as scratch:
        found = open_table(files_of_table(path), scratch)
    for option, names in {"--target": (target,), "--drop": drop}.items():
        if missing := [name for name in names if name not in found.kinds]:
            raise Refusal(f"{option} {missing[0]}: {path} has no such column; it has {', '.join(found.kinds)}")
    left_out = ", ".join(map(json.dumps, drop)) + ("," if len(drop) == 1 else "")
    is_inside = path.is_relative_to(folder)
    return {
        "expression": in_project(str(path.relative_to(folder))) if is_inside else f"Path({json.dumps(str(path))})",
        "target": target,
        "params": (f", drop=({left_out})" if drop else "") + ', missing="mean"',
        "batch": SMALL_BATCH if found.rows < SMALL_TABLE else 256,  # of a table of many, epochs would take long
        "shipped": "",
    }


def in_project(path: str) -> str:
    """Return a path in the project's folder as code in the module of the definitions, in a folder of it."""
    return f"Path(__file__).parents[1] / {json.dumps(path)}"


def _write_project(folder: Path, files: dict[str, str], shipped: str) -> None:
    """Write the files, and the table that comes with a project. Raise `Refusal` if one of them is there already; then
    none was written."""
    if there := [path for path in filter(None, (*files, shipped)) if (folder / path).exists()]:
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


def name_of(folder: str) -> str:
    """Return the package's name for a folder's name, such as my_project for My-Project."""
    return re.sub(r"[^a-z0-9]+", "_", folder.lower()).strip("_")


def refuse_taken(name: str) -> None:
    """Raise ValueError for a name by which Python already knows another package."""
    if name in OURS or name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ValueError(f"name = {name!r}: there is already a Python package of that name; choose another with --name")


def requirement_of(version: str, direct_url: Mapping[str, Any] | None) -> tuple[str, bool]:
    """Return how a project asks for the dtrain that is installed here, as `pip` reads it, and whether that was
    installed from a file of this machine, where no other machine finds it. ``direct_url``: the record of where pip had
    it from (PEP 610); None where it was an index. Until version 1 a minor version may change the public API."""
    major, minor = version.split(".")[:2]
    upper = f"0.{int(minor) + 1}" if major == "0" else f"{int(major) + 1}"
    url, vcs = (direct_url or {}).get("url", ""), (direct_url or {}).get("vcs_info")
    if vcs:
        return f"dtrain @ {vcs['vcs']}+{url}@{vcs['commit_id']}", False
    if url and not url.startswith("file:"):
        return f"dtrain @ {url}", False
    return f"dtrain>={version},<{upper}", bool(url)


def files_of(
    name: str, requirement: str, wheels: bool, table: dict[str, Any] | None, own_model: bool
) -> dict[str, str]:
    """Return the text files of a project: path in its folder → content. ``wheels``: whether it needs a wheel of dtrain
    beside it; ``table``: None for the bundled stock prices."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["python"] = json.dumps  # of a text, the same as Python's own
    folder = resources.files("dtrain_dagster.cli") / "new_project_files"
    values = {"name": name, "table": table, "own_model": own_model, "requirement": requirement, "wheels": wheels}
    templates = {
        "README.md": "README.md",
        "pyproject.toml": "pyproject.toml",
        "run.yaml": "run.yaml",
        "workspace.yaml": "workspace.yaml",
        ".gitignore": "gitignore",
        ".github/workflows/train.yml": "train.yml",
        f"{name}/__init__.py": "init.py",
        f"{name}/definitions.py": "definitions.py",
    }
    if own_model:
        templates[f"{name}_model.py"] = f"model_of_{'rows' if table else 'prices'}.py"
    return {
        path: environment.from_string((folder / f"{template}.jinja").read_text("utf-8")).render(values)
        for path, template in templates.items()
    }

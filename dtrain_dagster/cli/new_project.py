"""The files of a new project, as `dtrain init` writes them: pure, but for reading the templates of this package.

What a person is asked and told, and the writing, are in `dtrain_dagster.cli.init`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

EXAMPLE_TABLE, EXAMPLE_TARGET = "data/tumours.parquet", "diagnosis"
"""Where the table that comes with a project lies in it, and its column to predict."""
OURS = ("trainer", "dtrain_dagster", "dagster", "dtrain")
"""Names of packages that a project cannot have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table to train on."""

    path: PurePath
    """Of a Parquet file, or of a folder of them: seen from the project's folder if it lies there, absolute if not."""
    target: str
    """The column to predict."""

    @property
    def expression(self) -> str:
        """The path as code in the module of the definitions, a folder below the project's."""
        text = json.dumps(str(self.path))
        return f"Path({text})" if self.path.is_absolute() else f"Path(__file__).parents[1] / {text}"

    @property
    def shipped(self) -> str:
        """The path of the table that comes with the project; "" for a user's own."""
        return EXAMPLE_TABLE if str(self.path) == EXAMPLE_TABLE else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """How a project asks for dtrain."""

    text: str
    """As `pip` reads it."""
    is_from_file: bool
    """Whether dtrain was installed from a file or folder of this machine, where no other machine finds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewProject:
    """What a project begins with."""

    name: str
    """Of its package, of its graph, and the prefix of its assets."""
    requirement: Requirement
    table: Table | None = None
    """None: the bundled stock prices."""
    own_model: bool = False
    """Whether it has a file with a model of its own."""


def name_of(folder: str) -> str:
    """Return the package's name for a folder's name, such as my_project for My-Project."""
    return re.sub(r"[^a-z0-9]+", "_", folder.lower()).strip("_")


def refuse_taken(name: str) -> None:
    """Raise ValueError for a name by which Python already knows another package."""
    if name in OURS or name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ValueError(f"name = {name!r}: there is already a Python package of that name; choose another with --name")


def requirement_of(version: str, direct_url: Mapping[str, Any] | None) -> Requirement:
    """Return how to ask for the dtrain that is installed here. ``direct_url``: the record of where pip had it from
    (PEP 610); None where it was an index. Until version 1 a minor version may change the public API."""
    major, minor = version.split(".")[:2]
    upper = f"0.{int(minor) + 1}" if major == "0" else f"{int(major) + 1}"
    url, vcs = (direct_url or {}).get("url", ""), (direct_url or {}).get("vcs_info")
    if vcs:
        return Requirement(text=f"dtrain @ {vcs['vcs']}+{url}@{vcs['commit_id']}", is_from_file=False)
    if url and not url.startswith("file:"):
        return Requirement(text=f"dtrain @ {url}", is_from_file=False)
    return Requirement(text=f"dtrain>={version},<{upper}", is_from_file=bool(url))


def files_of(project: NewProject) -> dict[str, str]:
    """Return the text files of a project: path in its folder → content."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["python"] = json.dumps  # of a text, the same as Python's own
    folder = resources.files("dtrain_dagster.cli") / "new_project_files"
    values = {
        "name": project.name,
        "table": project.table,
        "own_model": project.own_model,
        "requirement": project.requirement.text,
        "wheels": project.requirement.is_from_file,
    }
    templates = {
        "README.md": "README.md",
        "pyproject.toml": "pyproject.toml",
        "run.yaml": "run.yaml",
        "workspace.yaml": "workspace.yaml",
        ".gitignore": "gitignore",
        ".github/workflows/train.yml": "train.yml",
        f"{project.name}/__init__.py": "init.py",
        f"{project.name}/definitions.py": "definitions.py",
    }
    if project.own_model:
        templates[f"{project.name}_model.py"] = f"model_of_{'rows' if project.table else 'prices'}.py"
    return {
        path: environment.from_string((folder / f"{template}.jinja").read_text("utf-8")).render(values)
        for path, template in templates.items()
    }

"""The wheel of this project, built and installed as a user has it, and an environment without this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from .conftest import ROOT


def plain_environment() -> dict[str, str]:
    """This process's environment without what would let a child find this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("DTRAIN_", "DAGSTER_", "PYTHON"))}


def build_wheel(folder: Path) -> Path:
    """The wheel of this project, built from a copy: a build leaves files beside what it builds."""
    source = folder / "source"
    for name in ("trainer", "dtrain_dagster"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(folder)], check=True, env=plain_environment())
    [wheel] = folder.glob("dtrain-*.whl")
    return wheel


def layered_environment(folder: Path, wheel: Path, *further: Path) -> Path:
    """Make an environment that has the wheel, and sees the packages of this one, and the ``further`` folders, beside
    it; return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    [site] = (folder / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join([*others, *map(str, further)]))
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True, env=plain_environment())
    return python

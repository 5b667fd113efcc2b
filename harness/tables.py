"""MLflow's tables, made once on a machine and copied: each new database costs seconds of migrations otherwise.

That they are made, and made anew, is shown by `tests/abuse/test_kills.py` and by the runs in a home of their own.
"""

from __future__ import annotations

import functools
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from trainer.observability.mlflow_sqlite import ARTIFACTS, make_tables


@functools.cache
def template() -> Path:
    """An empty database of this version of MLflow, in ``TEST_CACHE`` or ``~/.cache``; not to be opened."""
    cache = Path(os.environ.get("TEST_CACHE") or Path.home() / ".cache" / "dtrain-tests")
    path = cache / f"mlflow-{version('mlflow')}.db"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "mlflow.db"
            make_tables(f"sqlite:///{made}")
            os.replace(made, path)
    return path


def copy_tables(path: Path, artifacts: str | None = None) -> None:
    """What `make_tables` makes at this path. ``artifacts``: the root of artifacts, instead of the folder beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(template(), path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE experiments SET artifact_location = ?", (f"{artifacts or path.parent / ARTIFACTS}/0",))

"""MLflow's store in a SQLite file: where an experiment keeps its files, and which process creates its tables.

MLflow creates them in dozens of steps, and a file that is left in between never works again. So they are created in
another file, which takes its place when it is complete.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from trainer.runtime.file_lock import hold_lock
from trainer.secrets.resolve import resolve

_SQLITE = "sqlite:///"
_log = logging.getLogger(__name__)
ARTIFACTS = "mlartifacts"
PATIENCE_SECONDS = 120.0
"""MLflow makes its tables within seconds; on a machine that is used up, within a minute."""
QUIET_SECONDS = 10.0
"""A process that creates tables writes more often than this."""
_HOLDING = ("experiments", "runs", "registered_models", "model_versions")
"""Tables of which one row is reason enough to leave a database alone."""


def authorised(tracking_uri: str) -> str:
    """Return the address behind ``tracking.mlflow_tracking_uri``, which may be a reference, without the user and
    password of a server: they go into MLflow's own variables, since MLflow prints its address and puts it into errors.
    Raise `SecretError` if the reference cannot be resolved."""
    address = resolve(tracking_uri)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or parts.password is None:
        return address
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def artifact_location(tracking_uri: str) -> str | None:
    """Return the artifact folder for a new experiment: ``mlartifacts`` beside a SQLite file; None leaves the choice to
    the tracking server.

    Without it MLflow takes ``./mlruns`` of the process that happens to create the experiment.
    """
    if not tracking_uri.startswith(_SQLITE):
        return None
    return str(_file(tracking_uri).parent / ARTIFACTS)


@contextmanager
def opening(tracking_uri: str) -> Iterator[None]:
    """Create MLflow's tables in this SQLite file if it has none, and let no other process open it within the context.

    Two processes that open a new file at once would leave it broken. A tracking server sees to that by itself. A
    process that holds the lock for too long is frozen, and is not waited for.
    """
    if not tracking_uri.startswith(_SQLITE):
        yield
        return
    path = _file(tracking_uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(f"{path}.lock", PATIENCE_SECONDS) as is_alone:
        make_tables(path, is_alone)
        yield


def make_tables(path: Path, is_alone: bool = True) -> None:
    """Create MLflow's database if there is none, whole or not at all.

    A file that was left without its tables, and holds nothing, is moved aside first, never deleted. A file that holds
    anything, or is no database, is left as it is, and MLflow reports what is wrong with it. ``is_alone``: whether no
    other process creates one at the same time, so that half-made files of others can be removed.
    """
    if _is_settled(path):
        return
    _wait_for_others(path)
    if _is_settled(path):
        return
    if is_alone:
        for left in path.parent.glob(f"{path.name}.new-*"):
            left.unlink(missing_ok=True)
    _move_aside(path)
    new = path.with_name(f"{path.name}.new-{uuid.uuid4().hex[:8]}")
    try:
        _make(new)
        os.link(new, path)  # unlike a rename it does not replace what somebody else was quicker to make
    except FileExistsError:
        return
    finally:
        for part in path.parent.glob(f"{new.name}*"):
            part.unlink(missing_ok=True)


def _make(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(f"{_SQLITE}{path}", str(path.parent / ARTIFACTS))
    store.engine.dispose()


def _is_settled(path: Path) -> bool:
    """Return whether the database is complete or not ours to touch. The first experiment is written after the last
    table."""
    if not path.exists():
        return False
    if not path.stat().st_size:
        return False
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=30.0)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables - {"alembic_version"} and "experiments" not in tables:
                return True  # something else than MLflow's: it makes this one first of all
            holding = [name for name in _HOLDING if name in tables]
            return any(database.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in holding)
    except sqlite3.Error:
        return True


def _wait_for_others(path: Path) -> None:
    """Wait as long as the file changes: a process that does not know of the lock, such as ``mlflow ui``, may be
    creating the tables."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while path.exists() and path.stat().st_size and time.monotonic() < deadline:
        if abs(time.time() - path.stat().st_mtime) > QUIET_SECONDS or _is_settled(path):
            return
        time.sleep(0.2)


def _move_aside(path: Path) -> None:
    """The journal goes along: SQLite would play it back into the next file of that name."""
    name = f"{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    for suffix in ("", "-journal", "-wal", "-shm"):
        old = path.with_name(f"{path.name}{suffix}")
        if old.exists():
            old.rename(path.with_name(f"{name}{suffix}"))
            if not suffix:
                _log.warning("%s was left without MLflow's tables and holds nothing: it is now %s", path, name)


def _file(tracking_uri: str) -> Path:
    return Path(tracking_uri.removeprefix(_SQLITE)).absolute()

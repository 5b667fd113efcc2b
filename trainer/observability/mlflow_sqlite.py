"""MLflow's store: its address without a password, and the tables of a SQLite file, which are there whole or not at all.

MLflow creates its tables in dozens of steps, one process at a time, and a file that a kill leaves in between never
works again. So they are created in another file, which takes its place when it is complete.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from trainer.runtime.file_lock import hold_lock
from trainer.secrets.resolve import resolve

_SQLITE = "sqlite:///"
ARTIFACTS = "mlartifacts"
PATIENCE_SECONDS = 120.0
"""MLflow makes its tables within seconds; on a machine that is used up, within a minute."""


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


def make_tables(tracking_uri: str) -> None:
    """Create MLflow's database in this SQLite file if there is no file, whole or not at all. Of a file that is there,
    MLflow says what is wrong with it."""
    path = _file(tracking_uri)
    if not tracking_uri.startswith(_SQLITE) or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(f"{path}.lock", PATIENCE_SECONDS) as is_alone:
        for left in path.parent.glob(f"{path.name}.new-*") if is_alone else ():
            left.unlink(missing_ok=True)
        new = path.with_name(f"{path.name}.new-{uuid.uuid4().hex[:8]}")
        try:
            if not path.exists():
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


def _file(tracking_uri: str) -> Path:
    return Path(tracking_uri.removeprefix(_SQLITE)).absolute()

"""An MLflow that is a SQLite file: where an experiment keeps its files, and who opens it first."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SQLITE = "sqlite:///"
_log = logging.getLogger(__name__)
PATIENCE_SECONDS = 120.0
"""MLflow makes its tables within seconds; on a machine that is used up, within a minute."""


def artifact_location(tracking_uri: str) -> str | None:
    """The artifact folder of an experiment that is made anew: ``mlartifacts`` beside a SQLite file; None leaves the
    choice to the tracking server.

    Without it MLflow takes ``./mlruns`` of whatever process happens to create the experiment.
    """
    if not tracking_uri.startswith(_SQLITE):
        return None
    return str(_file(tracking_uri).parent / "mlartifacts")


@contextmanager
def opening(tracking_uri: str) -> Iterator[None]:
    """Within, no other process opens this SQLite file. Who opens it first makes MLflow's tables, and two at once leave
    a file that nobody can open any more. A tracking server sees to that by itself. Whoever holds it for too long is
    frozen, and not waited for."""
    if not tracking_uri.startswith(_SQLITE):
        yield
        return
    import fcntl

    path, deadline = _file(tracking_uri), time.monotonic() + PATIENCE_SECONDS
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError as error:  # a file system without locks, as some of NFS are
                _log.warning("%s cannot be locked (%s): going on without", lock.name, error)
                break
        yield


def _file(tracking_uri: str) -> Path:
    return Path(tracking_uri.removeprefix(_SQLITE)).absolute()

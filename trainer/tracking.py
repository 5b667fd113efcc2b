"""Where an MLflow experiment keeps its files."""

from __future__ import annotations

from pathlib import Path

_SQLITE = "sqlite:///"


def artifact_location(tracking_uri: str) -> str | None:
    """The artifact folder of an experiment that is made anew: ``mlartifacts`` beside a SQLite file; None leaves the
    choice to the tracking server.

    Without it MLflow takes ``./mlruns`` of whatever process happens to create the experiment.
    """
    if not tracking_uri.startswith(_SQLITE):
        return None
    return str(Path(tracking_uri.removeprefix(_SQLITE)).absolute().parent / "mlartifacts")

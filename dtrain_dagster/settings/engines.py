"""The settings of the engines behind kinds of clusters. Each is read by its own module only."""

from __future__ import annotations

from typing import Any

from dtrain_dagster.settings.environment import EnvironmentSettings, Settings
from dtrain_dagster.settings.kubernetes import KubernetesSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings

ENGINE_SETTINGS: dict[str, type[EnvironmentSettings]] = {
    "slurm": SlurmSettings,
    "kubernetes": KubernetesSettings,
    "ray": RaySettings,
}
"""Kind of cluster → the settings of its engine."""


def read_engine_options(kind: str) -> dict[str, Any]:
    """Return the options of the engine of this kind of cluster, in JSON's types. Raise `SettingsError` for missing or
    unusable values."""
    return ENGINE_SETTINGS[kind].read().options()


def engine_gpus(settings: Settings) -> int | None:
    """Return the GPUs that an engine is asked for with each node; None where no engine runs nodes. Raise as
    `read_engine_options` does."""
    return read_engine_options(settings.cluster).get("gpus", 0) if settings.kind.has_engine else None

"""The options of the engine behind a kind of cluster, as the environment gives them."""

from __future__ import annotations

from typing import Any

from dtrain_dagster.settings.environment import SettingsError


def read_engine_options(kind: str) -> dict[str, Any]:
    """Return the options of the engine of this kind of cluster, in JSON's types. Raise `SettingsError` for missing or
    unusable values."""
    if kind == "kubernetes":
        from dtrain_dagster.settings.kubernetes import read_kubernetes_options

        return read_kubernetes_options()
    if kind == "slurm":
        from dtrain_dagster.settings.slurm import read_slurm_options

        return read_slurm_options()
    if kind == "ray":
        from dtrain_dagster.settings.ray import read_ray_options

        return read_ray_options()
    raise SettingsError(f"DTRAIN_CLUSTER={kind} has no engine: set slurm, kubernetes or ray")

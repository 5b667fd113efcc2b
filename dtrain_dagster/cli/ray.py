"""`dtrain ray`: what concerns the Ray cluster rather than a training. Added to `dtrain` by `dtrain_dagster.cli.main`.

Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import click

from dtrain_dagster.cli.common import refuses, say


@click.group()
def ray() -> None:
    """Look at a Ray cluster."""


@ray.command()
@refuses
def check() -> None:
    """Tell whether the cluster of DTRAIN_RAY_* answers; create nothing.

    \b
    Examples:
      dtrain ray check
    """
    from pathlib import Path

    from dtrain_dagster.clusters.ray.engine import RayEngine
    from dtrain_dagster.clusters.ray.options import RayOptions
    from dtrain_dagster.settings.ray import read_ray_options

    engine = RayEngine(RayOptions(**read_ray_options()), Path(), lambda launch, node_id, incarnation: ())
    try:
        say(f"{engine.check()} machine(s) of the Ray cluster answer")
    finally:
        engine.close()

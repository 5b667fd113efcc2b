"""`dtrain ray`: what concerns the Ray cluster rather than a training. Added to `dtrain` by `dtrain_dagster.cli.main`.

Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

from typing import Any

import click

from dtrain_dagster.cli.cluster_check import tell_check
from dtrain_dagster.cli.common import refuses
from dtrain_dagster.cli.json_fields import RAY_CHECK
from dtrain_dagster.cli.json_output import json_option


@click.group()
def ray() -> None:
    """Look at a Ray cluster."""


@ray.command()
@json_option(RAY_CHECK)
@refuses
def check(as_json: bool) -> None:
    """Tell whether the cluster of DTRAIN_RAY_* answers; create nothing.

    \b
    Examples:
      dtrain ray check
      dtrain ray check --json | jq .usable
    """
    from pathlib import Path

    from dtrain_dagster.clusters.ray.engine import RayEngine
    from dtrain_dagster.clusters.ray.options import RayOptions
    from dtrain_dagster.settings.ray import read_ray_options

    def look() -> tuple[str, dict[str, Any]]:
        engine = RayEngine(RayOptions(**read_ray_options()), Path(), lambda launch, node_id, incarnation: ())
        try:
            machines = engine.check()
        finally:
            engine.close()
        return f"{machines} machine(s) of the Ray cluster answer", {"machines": machines}

    tell_check(look, RAY_CHECK, as_json)

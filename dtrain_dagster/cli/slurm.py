"""`dtrain slurm`: what concerns the cluster rather than a training. Added to `dtrain` by `dtrain_dagster.cli.main`.

Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import click

from dtrain_dagster.cli.common import refuses, say


@click.group()
def slurm() -> None:
    """Look at a SLURM cluster, and compare its accounting with ours."""


@slurm.command()
@refuses
def check() -> None:
    """Tell whether SLURM's commands answer; submit nothing."""
    from pathlib import Path

    from dtrain_dagster.clusters.slurm.engine import SlurmEngine
    from dtrain_dagster.clusters.slurm.options import SlurmOptions
    from dtrain_dagster.settings.slurm import read_slurm_options

    options = SlurmOptions.read(read_slurm_options())
    version = SlurmEngine(options, Path(), lambda launch, node_id, incarnation: ()).check()
    say(f"{version} answers{f' on {options.host}' if options.host else ''}")

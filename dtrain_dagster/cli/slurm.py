"""`dtrain slurm`: what concerns the cluster rather than a training. Added to `dtrain` by `dtrain_dagster.cli.main`.

Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

from typing import Any

import click

from dtrain_dagster.cli.cluster_check import tell_check
from dtrain_dagster.cli.common import refuses, say
from dtrain_dagster.cli.job_names import find_job, job_argument
from dtrain_dagster.cli.json_fields import ACCOUNT, SLURM_CHECK
from dtrain_dagster.cli.json_output import json_option, print_json


@click.group()
def slurm() -> None:
    """Look at a SLURM cluster and at its account of a job."""


@slurm.command()
@json_option(SLURM_CHECK)
@refuses
def check(as_json: bool) -> None:
    """Tell whether SLURM's commands answer; submit nothing.

    \b
    Examples:
      dtrain slurm check
      dtrain slurm check --json | jq .usable
    """
    from pathlib import Path

    from dtrain_dagster.clusters.slurm.engine import SlurmEngine
    from dtrain_dagster.clusters.slurm.options import SlurmOptions
    from dtrain_dagster.settings.slurm import read_slurm_options

    def look() -> tuple[str, dict[str, Any]]:
        options = SlurmOptions.read(read_slurm_options())
        version = SlurmEngine(options, Path(), lambda launch, node_id, incarnation: ()).check()
        where = f" on {options.host}" if options.host else ""
        return f"{version} answers{where}", {"version": version, "host": options.host}

    tell_check(look, SLURM_CHECK, as_json)


@slurm.command()
@job_argument()
@json_option(ACCOUNT)
@refuses
def account(job_id: str, as_json: bool) -> None:
    """Compare the nodes' own presence with SLURM's accounting.

    Costs are computed from presence. Where the cluster keeps an account (slurmdbd), this shows how far the two differ,
    node by node, and with DTRAIN_SLURM_PRICES what the site charges.

    \b
    Examples:
      dtrain slurm account latest
    """
    import time

    from dtrain_dagster.cli.common import read_settings, run_dir
    from dtrain_dagster.clusters.slurm.accounting import describe_accounts, describe_price
    from dtrain_dagster.clusters.slurm.job_account import account_nodes
    from dtrain_dagster.settings.slurm import read_partition_prices, read_slurm_options

    settings, prices = read_settings(), read_partition_prices()
    job_id = find_job(settings, job_id)
    accounted = account_nodes(read_slurm_options(), run_dir(settings, job_id), time.time())
    lines = [*describe_accounts(accounted), *([describe_price(accounted, prices)] if prices else [])]
    if as_json:
        print_json({"job": job_id, "lines": lines})
        return
    for line in lines:
        say(line)

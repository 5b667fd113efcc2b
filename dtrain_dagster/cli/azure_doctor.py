"""`dtrain azure`: what concerns the subscription rather than a training. Added to `dtrain` by
`dtrain_dagster.cli.main`. Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import ranks_of, read_settings, refuses, say
from dtrain_dagster.cli.json_fields import DOCTOR
from dtrain_dagster.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from dtrain_dagster.clusters.azure_ml.doctor import DoctorLine


@click.group()
def azure() -> None:
    """Look at the subscription of Azure."""


@azure.command()
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes of a training.  [default: DTRAIN_NODES]")
@json_option(DOCTOR)
@refuses
def doctor(nodes: int | None, as_json: bool) -> None:
    """Tell what a training still lacks; buy nothing.

    It walks through identity, workspace, roles, storage, sizes, quotas, prices, images and subnet, as the settings name
    them (DTRAIN_CLUSTER=azure_ml, see docs/azure.md). Each line says ok, warning or missing, what was seen, and how to
    fix it. It only reads, but for one small blob, which it writes and deletes.

    The exit code is 1 if something is missing.

    \b
    Examples:
      dtrain azure doctor
      dtrain azure doctor --nodes 8 --json
    """
    from dtrain_dagster.clusters.azure_ml.doctor import doctor_document, doctor_text, exit_code_of

    lines = _examine(nodes)
    if as_json:
        print_json(doctor_document(lines))
    else:
        say(doctor_text(lines))
    sys.exit(exit_code_of(lines))


def _examine(nodes: int | None) -> list[DoctorLine]:
    """Return all lines; a single one where the settings do not say what to look at."""
    from dtrain_dagster.clusters.azure_ml.client import Service
    from dtrain_dagster.clusters.azure_ml.doctor import DoctorLine
    from dtrain_dagster.clusters.azure_ml.doctor_reader import Walk
    from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
    from dtrain_dagster.clusters.base import ClusterError
    from dtrain_dagster.costs.prices import PriceError
    from dtrain_dagster.settings.azure import read_azure_options
    from dtrain_dagster.settings.environment import SettingsError

    try:
        settings = read_settings(nodes=nodes)
        if settings.cluster != "azure_ml":
            raise SettingsError(f"DTRAIN_CLUSTER is {settings.cluster}, which does not use Azure")
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in read_azure_options(settings).items()
        }
        try:
            ranks = ranks_of(settings)
        except PriceError:  # of the size's GPUs nothing is known; the line about its price says so
            ranks = settings.processes_per_node or 1
        options = AzureMLOptions(
            **own, cluster_name=settings.cluster_name, storage_uri=settings.shared_uri, processes_per_node=ranks
        )
    except (SettingsError, ClusterError) as error:
        remedy = "set the variables of docs/azure.md; the deployment's outputs have their values"
        command = "az deployment group show --name <name> --resource-group <group> --query properties.outputs"
        return [DoctorLine("settings", "missing", str(error), remedy, command)]
    try:
        import azure.ai.ml
        import azure.identity  # noqa: F401
    except ImportError as error:
        return [DoctorLine("settings", "missing", str(error), "install it", "pip install 'dtrain[azure]'")]
    walk = Walk(Service(options), settings.home, settings.region, settings.gpu_type, settings.nodes, ranks)
    return walk.all_lines()

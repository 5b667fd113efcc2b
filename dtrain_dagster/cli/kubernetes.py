"""`dtrain kubernetes`: what concerns the cluster of pods rather than a training. Added to `dtrain` by
`dtrain_dagster.cli.main`. Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dtrain_dagster.cli.cluster_check import tell_check
from dtrain_dagster.cli.common import refuses
from dtrain_dagster.cli.job_names import complete_files
from dtrain_dagster.cli.json_fields import KUBERNETES_CHECK
from dtrain_dagster.cli.json_output import json_option


@click.group()
def kubernetes() -> None:
    """Look at a cluster of Kubernetes, or hand a job to Kubeflow."""


@kubernetes.command()
@json_option(KUBERNETES_CHECK)
@refuses
def check(as_json: bool) -> None:
    """Tell whether this cluster takes nodes; create nothing.

    It asks the cluster of DTRAIN_KUBERNETES_* whether it answers, has the namespace, and lets this identity start,
    follow and end nodes there. The first right that is missing is named.

    \b
    Examples:
      dtrain kubernetes check
      dtrain kubernetes check --json | jq .usable
    """
    from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
    from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
    from dtrain_dagster.settings.kubernetes import read_kubernetes_options

    def look() -> tuple[str, dict[str, Any]]:
        options = KubernetesOptions.read(read_kubernetes_options())
        KubernetesEngine(options, "", lambda launch, node_id, incarnation: ()).check()
        return f"namespace {options.namespace} takes nodes from this identity", {"namespace": options.namespace}

    tell_check(look, KUBERNETES_CHECK, as_json)


@kubernetes.command("train-job")
@click.argument("config", metavar="JOB.JSON", shell_complete=complete_files)
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes.  [default: DTRAIN_NODES]")
@click.option("--ranks", type=click.IntRange(min=1), metavar="R", help="Ranks per node.  [default: one per GPU]")
@refuses
def train_job(config: str, nodes: int | None, ranks: int | None) -> None:
    """Print a job as a TrainJob of Kubeflow, with its runtime.

    JOB.JSON is what `python -m trainer --config` takes, on a volume of DTRAIN_KUBERNETES_VOLUMES at the same path here
    as in the pods.

    \b
    Examples:
      dtrain kubernetes train-job /data/job.json --nodes 2 | kubectl apply -f -
    """
    import yaml

    from dtrain_dagster.cli.common import read_settings
    from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
    from dtrain_dagster.clusters.kubernetes.train_job import train_job
    from dtrain_dagster.settings.kubernetes import read_kubernetes_options
    from trainer.config import parse_job

    settings, options = read_settings(nodes=nodes), KubernetesOptions.read(read_kubernetes_options())
    job = parse_job(Path(config).read_text(), source=config)
    made = train_job(options, job.job_id, config, settings.nodes, ranks or max(1, options.gpus))
    click.echo(yaml.safe_dump_all(made, sort_keys=False), nl=False)

"""`dtrain kubernetes`: what concerns the cluster of pods rather than a training. Added to `dtrain` by
`dtrain_dagster.cli.main`. Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path

import click

from dtrain_dagster.cli.common import refuses, say


@click.group()
def kubernetes() -> None:
    """Look at a cluster of Kubernetes, or hand a job to Kubeflow."""


@kubernetes.command()
@refuses
def check() -> None:
    """Tell whether this cluster takes nodes; create nothing.

    It asks the cluster of DTRAIN_KUBERNETES_* whether it answers, has the namespace, and lets this identity start and
    end nodes there.

    \b
    Examples:
      dtrain kubernetes check
    """
    from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
    from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
    from dtrain_dagster.settings.kubernetes import read_kubernetes_options

    options = KubernetesOptions.read(read_kubernetes_options())
    KubernetesEngine(options, "", lambda launch, node_id, incarnation: ()).check()
    say(f"namespace {options.namespace} takes nodes from this identity")


@kubernetes.command("train-job")
@click.argument("config", metavar="JOB.JSON")
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

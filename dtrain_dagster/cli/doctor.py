"""What is seen before a job costs anything. `dtrain doctor`: whether the cluster that the settings name can be used.
`--dry-run`: what a start would ask the cluster for, with its price and what is in its way; nothing is asked for.

What a dry run prints on standard output is made by the functions that make the real requests
(`GPUClusterManager.describe_submission`), so that it can go into a file, and to the tool that takes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click

from dtrain_dagster.cli.ceilings import book_of, ceiling_lines
from dtrain_dagster.cli.common import (
    EXIT_UNUSABLE,
    TROUBLE,
    json_option,
    manager_of,
    print_json,
    ranks_of,
    read_settings,
    refuses,
    say,
)
from dtrain_dagster.clusters.azure_ml.client import Service
from dtrain_dagster.clusters.azure_ml.doctor import Doctor, DoctorLine
from dtrain_dagster.clusters.azure_ml.sku_chain import default_chain
from dtrain_dagster.clusters.base import ClusterError, ClusterHealth, GPUClusterManager, JobSpec
from dtrain_dagster.clusters.managers import open_engine
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.settings.azure import AzureMLOptions, read_azure_options
from dtrain_dagster.settings.engines import read_engine_options
from dtrain_dagster.settings.environment import Settings, SettingsError
from dtrain_dagster.settings.home import HomeError
from trainer.config import JobConfig


@click.command()
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes of a training.  [default: DTRAIN_NODES]")
@json_option()
@refuses
def doctor(nodes: int | None, as_json: bool) -> None:
    """Tell whether the cluster can train; buy nothing.

    It looks at the cluster of DTRAIN_CLUSTER, and says how many nodes are there and what runs. Of SLURM, Kubernetes
    and Ray it asks whether they answer; of Kubernetes also for the namespace, and for each right that starting,
    following and ending nodes needs. Nothing is submitted or created.

    On Azure ML it walks through identity, workspace, roles, storage, sizes with their quotas and prices, image and
    network, as the settings name them (docs/azure.md). It only reads, but for one small blob, which it writes and
    deletes.

    Each line says ok, warning or missing, what was seen, and how to fix it. The exit code is 1 if something is missing.

    \b
    Examples:
      dtrain doctor
      dtrain doctor --nodes 8 --json
    """
    settings = None
    try:
        settings = read_settings(nodes=nodes)
        lines = examine(settings)
    except SettingsError as error:
        lines = [_of_settings(error)]
    missing = {line.check for line in lines if line.verdict == "missing"}
    if settings and not missing & {settings.cluster, "settings", "identity", "workspace"}:
        try:
            lines = [*lines, line_of_health(manager_of(settings).monitor_health())]
        except TROUBLE as error:
            lines = [*lines, DoctorLine("nodes", "warning", str(error), "`dtrain status --nodes` asks again")]
    if as_json:
        print_json(lines_document(lines))
    else:
        say(lines_text(lines))
    sys.exit(int(bool(missing)))


def examine(settings: Settings, writes: bool = True) -> list[DoctorLine]:
    """Return what is seen of the settings' cluster, which costs nothing. ``writes``: whether storage is tried by a
    blob."""
    if settings.cluster == "azure_ml":
        return _examine_azure(settings, writes)
    if not settings.kind.has_engine:
        return [DoctorLine(settings.cluster, "ok", "nodes are processes of this machine")]
    try:
        with closing(open_engine(settings.cluster, read_engine_options(settings.cluster), ".", "")) as engine:
            return [DoctorLine(settings.cluster, "ok", engine.check())]
    except TROUBLE as error:
        return [DoctorLine(settings.cluster, "missing", str(error))]


def _examine_azure(settings: Settings, writes: bool) -> list[DoctorLine]:
    """Return all lines; a single one where the settings do not say what to look at."""
    try:
        own = read_azure_options(settings)
        try:
            ranks = ranks_of(settings)
        except PriceError:  # of the size's GPUs nothing is known; the line about its price says so
            ranks = settings.processes_per_node or 1
        options = AzureMLOptions(
            **{"chain": default_chain(ranks, settings.tiers), **own},
            cluster_name=settings.cluster_name,
            storage_uri=settings.shared_uri,
            processes_per_node=ranks,
        )
    except SettingsError as error:
        return [_of_settings(error)]
    try:
        import azure.ai.ml
        import azure.identity  # noqa: F401
    except ImportError as error:
        return [DoctorLine("settings", "missing", str(error), "`pip install 'dtrain[azure]'`")]
    service, size = Service(options), settings.gpu_type
    return Doctor(service, settings.home, settings.region, size, settings.nodes, ranks, writes).examine()


def line_of_health(health: ClusterHealth) -> DoctorLine:
    """Return what the nodes of a cluster do, or what is wrong with them. Pure."""
    unwell = [f"node {node.node_id}: {node.message}" for node in health.nodes if not node.healthy]
    if unwell or not health.healthy:
        seen = "; ".join(filter(None, (health.message, *unwell)))
        return DoctorLine("nodes", "warning", seen, "`dtrain status --nodes` and `dtrain logs JOB` tell more")
    there = f"{len(health.nodes)} node(s), which are well" if health.nodes else ""
    running = f"running: {', '.join(health.running_jobs)}" if health.running_jobs else ""
    return DoctorLine("nodes", "ok", "; ".join(filter(None, (health.message, there, running))) or "none: it is at rest")


def _of_settings(error: Exception) -> DoctorLine:
    remedy = "set the variables of docs/azure.md or docs/installing.md; a deployment on Azure has them as outputs"
    return DoctorLine("settings", "missing", str(error), remedy)


def lines_document(lines: Sequence[DoctorLine]) -> dict[str, Any]:
    """Return the lines for JSON. Pure."""
    counts = {name: sum(line.verdict == name for line in lines) for name in ("ok", "warning", "missing")}
    return {"counts": counts, "lines": [asdict(line) for line in lines]}


def lines_text(lines: Sequence[DoctorLine]) -> str:
    """Return the lines for a terminal: verdict, check and what was seen; below it the remedy. Pure."""
    texts = []
    for line in lines:
        texts.append(f"{line.verdict:<8}{line.check:<11} {line.seen}")
        texts += [f"{'':20}→ {line.remedy}"] if line.remedy else []
    counts = lines_document(lines)["counts"]
    return "\n".join([*texts, f"{counts['missing']} missing, {counts['warning']} warnings. Nothing was bought."])


NOTHING = "dry run: nothing was bought, submitted or written"


def show_dry_run(
    settings: Settings,
    manager: GPUClusterManager,
    spec: JobSpec,
    sku: str,
    wanted: Wanted,
    job: JobConfig | None = None,
) -> None:
    """Print how much of the ceiling is used, what the doctor sees, and each request of a start; then end the command,
    with the code of a refusal where the start would be refused. ``sku``: of the nodes that are asked for first."""
    problems = []
    if stand := book_of(settings).judge(wanted):
        say(*ceiling_lines(stand, wanted), err=True)
        problems += [stand.refusal] if stand.refusal else []
    for check in examine(settings.model_copy(update={"nodes": spec.node_count}), writes=False):
        say(f"{check.verdict}: {check.check}: {check.seen}" + (f" → {check.remedy}" if check.remedy else ""), err=True)
        if check.verdict == "missing":
            problems.append(f"{check.check}: {check.seen}")
    try:
        document = None if job is None else json.loads(job.to_json())
        for request in manager.describe_submission(spec, sku, document):
            say(request.written())
    except (ClusterError, HomeError) as error:
        if str(error) not in "".join(problems):
            problems.append(str(error))
    for problem in problems:
        say(f"refused: {problem}", err=True)
    say(NOTHING, err=True)
    sys.exit(EXIT_UNUSABLE if problems else 0)

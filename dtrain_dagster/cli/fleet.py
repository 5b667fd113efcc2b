"""`dtrain fleet`: many jobs under one budget, from a file. `dtrain cancel`, `status` and `cost` take its name.

The jobs of the file become orders, which are checked and have their data where nodes read it before anything is bought.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.ceilings import promising, tell_ceilings
from dtrain_dagster.cli.common import cluster_of, console, ranks_of, read_settings, refuses, say
from dtrain_dagster.cli.follow import fleet_screen, fleet_table, headline, warn
from dtrain_dagster.cli.job_options import (
    Asked,
    order_script,
    read_file,
    say_what_is_wrong,
    with_reachable_data,
)
from dtrain_dagster.cli.plan_lines import past_forecasts
from dtrain_dagster.cli.screen import name_some
from dtrain_dagster.cli.start import ended_by_signals, say_that_jobs_go_on, this_command
from dtrain_dagster.cli.tracking import FLEET_TAG, record_fleet, track
from dtrain_dagster.clusters.azure_ml.sku_chain import chain
from dtrain_dagster.clusters.notices import FLEET
from dtrain_dagster.costs.estimate import Forecast
from dtrain_dagster.costs.money import usd
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.runner import FleetRunner
from dtrain_dagster.fleet.scheduling import LEAST_WORK_SECONDS
from dtrain_dagster.fleet.source import FleetFile, JobEntry, JobSource, ListedJobs, parse_fleet
from dtrain_dagster.fleet.view import FleetWatch
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.planning.projection import count_nodes
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.user_sources import ensure_importable
from trainer.config import PARTS, ConfigError, JobConfig
from trainer.runtime.launch import with_order

if TYPE_CHECKING:
    from dtrain_dagster.configuration import ClusterConfiguration, ProjectConfiguration
    from dtrain_dagster.settings.environment import Settings

GUESSED_SECONDS, GUESSED_SPREAD = 1800.0, 1.0
"""The most that is guessed of what nobody knows, and its standard deviation as a fraction of it."""
STARTUP_SECONDS = 20.0
BASIS = "basis"
"""The fact of a job that says where the figures of what it takes come from."""
EXIT_INCOMPLETE = 1


@click.command()
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--check", is_flag=True, help="Check the file and its jobs, and start nothing.")
@refuses
def fleet(file: str, check: bool) -> None:
    """Train many models under one budget.

    FILE names the jobs, the dollars that all of them together may cost, and when they must have ended. Jobs of higher
    priority come first. It is YAML or JSON, see docs/many-trainings.md. The exit
    code is 1 where a job has not succeeded.

    Ctrl-C leaves the jobs running, each up to the dollars that it was promised; the same command goes on with them,
    also after a crash. `dtrain status`, `cancel` and `cost` take the name of the fleet.

    Each job is a run of MLflow, below a run of the fleet (`dtrain ui mlflow`). DTRAIN_OPTIONS=command_tracking=off
    keeps a start of the fleet out of it, `set: {tracking.mlflow_tracking_uri: null}` a job.

    \b
    Examples:
      dtrain fleet night.yaml --check
      dtrain fleet night.yaml
      dtrain status night
      dtrain cost night
      dtrain cancel night
    """
    wanted = parse_fleet(read_file(file, file, "the file"), file)
    settings = read_settings()
    records = FleetRecords(settings.home, wanted.name)
    began_at = records.began_at(time.time())
    cluster, project = cluster_of(settings)
    limits = limits_of(wanted, settings, cluster, began_at)
    expected = jobs_of(wanted, settings, limits, began_at)
    given = {standing.job_id: standing.job for standing in records.standings()}
    tell_what_is_asked(expected, given, limits)
    start = Wanted(wanted.name, limits.budget_usd, is_group=True)
    if check:
        tell_ceilings(settings, start)
        return
    expected = tracked_jobs(wanted, expected, settings, cluster, project)
    ensure_importable()
    with records.sole_orchestrator(), promising(settings, start):
        if records.is_cancelled():
            say(f"fleet {wanted.name} was cancelled before: jobs that had not begun will not run", err=True)
            records.forget_cancellation()
        records.write_limits(limits, time.time())
        orchestrate(settings, records, ListedJobs(expected))
    if any(standing.state != "succeeded" for standing in records.standings()):
        sys.exit(EXIT_INCOMPLETE)


def orchestrate(settings: Settings, records: FleetRecords, source: JobSource) -> None:
    """Run a fleet to its end, and show it. It must be held by `FleetRecords.sole_orchestrator`."""
    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    if not records.is_cancelled():
        manager.provision_cluster(records.limits().nodes, cluster.sku)
    is_tracked = settings.command_tracking != "off"
    env = with_order(cluster.node_env(project), is_tracked=is_tracked, part_of=FLEET)
    tier = tier_of(cluster.first_tier)
    watch, shown = FleetWatch(records), console()
    tell = partial(warn, shown)

    def go_on() -> None:
        say_that_jobs_go_on(f"jobs of fleet {records.name}", records.name, this_command())

    with fleet_screen(shown, watch) as show, ended_by_signals(go_on):
        runner = FleetRunner(manager, records, source, tell, processes_per_node=ranks_of(settings), env=env, tier=tier)
        runner.run(show)
    for sentence in record_fleet(records, records.standings(), tier) if is_tracked else ():
        say(sentence, err=True)
    view = watch.view()
    shown.print(fleet_table(view, shown.width), highlight=False)
    say(headline(view))


def cancel_fleet(settings: Settings, name: str) -> None:
    """End a fleet: its jobs save a checkpoint and release their nodes, and no further job starts. Return when all nodes
    are released."""
    records = FleetRecords(settings.home, name)
    records.ask_to_cancel()
    while records.is_run():
        time.sleep(0.5)  # whoever runs it ends it
    with records.sole_orchestrator():
        orchestrate(settings, records, ListedJobs([standing.job for standing in records.standings()]))


def limits_of(fleet: FleetFile, settings: Settings, cluster: ClusterConfiguration, began_at: float) -> FleetLimits:
    """Return the limits of a fleet that began then. Its price is that of the dearest nodes that may be bought. Raise
    `PriceError` where a price is not known."""
    return FleetLimits(
        budget_usd=fleet.budget_usd,
        nodes=fleet.nodes or settings.nodes,
        usd_per_node_hour=dearest_usd_per_hour(cluster),
        deadline=began_at + 3600 * fleet.deadline_hours if fleet.deadline_hours else None,
        margin_seconds=fleet.margin_seconds,
    )


def dearest_usd_per_hour(cluster: ClusterConfiguration) -> float:
    """Return the highest price among the nodes that the cluster may take."""
    if cluster.kind != "azure_ml":
        return price_of(cluster.sku).usd_per_hour(tier_of(cluster.first_tier))
    options = cluster.azure_options()
    choices = chain(cluster.gpu_type, options.chain, options.tiers)
    return max(price_of(choice.sku).usd_per_hour(tier_of(choice.tier)) for choice in choices)


def jobs_of(fleet: FleetFile, settings: Settings, limits: FleetLimits, began_at: float) -> list[FleetJob]:
    """Return the jobs of a fleet, each of which was checked. Raise `FleetError`, which names the job and its field, for
    one that cannot be trained."""
    rehearsed: set[str] = set()
    past = past_forecasts(settings)
    found = []
    for number, entry in enumerate(fleet.jobs):
        try:
            job_id = f"{fleet.name}-{entry.name}"
            config, command = _order_of(entry, settings, job_id, rehearsed)
            refuse_misfit(entry, config, limits, ranks_of(settings))
            known = None if entry.script or entry.expected_node_minutes else past(config)
            takes = expect(entry, known, limits, len(fleet.jobs))
            deadline = began_at + 3600 * entry.deadline_hours if entry.deadline_hours else None
            found.append(
                FleetJob(
                    job_id=job_id, priority=entry.priority, nodes=entry.nodes, deadline=deadline, config=config,
                    command=command, **takes,
                )
            )  # fmt: skip
        except (ConfigError, FleetError) as error:
            raise FleetError(f"jobs.{number} ({entry.name}): {error}") from None
    return found


def refuse_misfit(entry: JobEntry, config: JobConfig, limits: FleetLimits, ranks_of_node: int) -> None:
    """Raise `FleetError` for a job that does not go with its fleet, or with its own nodes. Pure."""
    if entry.nodes > limits.nodes:
        raise FleetError(f"nodes is {entry.nodes}, but the fleet has {limits.nodes}")
    if config.training.max_node_seconds is not None:
        raise FleetError("set.training.max_node_seconds: the fleet's budget_usd takes its place")
    if config.training.micro_batches < entry.nodes * ranks_of_node:
        raise FleetError(
            f"nodes is {entry.nodes}, and its global batch is {config.training.micro_batches} micro-batches, fewer "
            "than there would be ranks: plan it for more (training.world_size)"
        )


def expect(entry: JobEntry, known: Forecast | None, limits: FleetLimits, jobs: int) -> dict[str, Any]:
    """Return what a job, one of so many in its fleet, is expected to take, as fields of a `FleetJob`: as its file says,
    else as past runs tell, else by a first guess: half an hour, or less where the budget has less for each job. So it
    begins, and tells its speed. Pure."""
    nodes, startup, spread = entry.nodes, STARTUP_SECONDS, GUESSED_SPREAD
    if entry.expected_node_minutes is not None:
        work, spread, basis = 60 * entry.expected_node_minutes, 0.3, "given"
    elif known is not None:
        parts, seconds = known.parts(nodes), known.seconds_at(nodes)
        work, startup, basis = nodes * (parts.total - parts.startup), parts.startup, known.basis_words
        spread = math.log(seconds.high / seconds.expected)
    else:
        share = limits.seconds_of(limits.budget_units) / jobs / nodes - startup - limits.margin_seconds
        work = nodes * min(GUESSED_SECONDS, max(LEAST_WORK_SECONDS, share / (1 + spread)))
        basis = "a first guess: no past run of the same model, data and batch on this SKU is known here"
    startup = startup if entry.startup_seconds is None else entry.startup_seconds
    return {"node_seconds": work, "spread": spread, "startup_seconds": startup, "facts": {BASIS: basis}}


def _order_of(
    entry: JobEntry, settings: Settings, job_id: str, rehearsed: set[str]
) -> tuple[JobConfig, tuple[str, ...] | None]:
    """Return a job whose batches are planned for its nodes, and the command of its script."""
    own = tuple(f"{key}={json.dumps(value)}" for key, value in entry.set.items())
    asked = Asked(
        config=entry.config,
        dataset=entry.dataset,
        model=entry.model,
        loss=entry.loss,
        epochs=entry.epochs,
        overrides=own,
        nodes=entry.nodes,
    )
    if entry.script is not None:
        ordered = order_script(settings, entry.script, entry.arguments, asked.fields(), entry.nodes, job_id)
        return ordered.job, ordered.command
    try:
        job, _ = asked.job(settings, asked.fields(), job_id)
    except ConfigError as error:
        raise ConfigError(str(error).replace("the command line: ", "").replace("--", "")) from None
    whole = asdict(job)
    parts = json.dumps([job.dataset.uri, *(whole[part] for part in PARTS)])
    say_what_is_wrong(job, entry.nodes, settings, rehearses=parts not in rehearsed)
    rehearsed.add(parts)  # the same model and loss on the same data build each time
    return replace(with_reachable_data(job, settings), run_dir=job.run_dir), None


def tracked_jobs(
    fleet: FleetFile,
    jobs: Sequence[FleetJob],
    settings: Settings,
    cluster: ClusterConfiguration,
    project: ProjectConfiguration,
) -> list[FleetJob]:
    """Return the jobs of a fleet's file, tracked as `dtrain train` tracks a training; ``set`` of a job may switch it
    off."""
    found = []
    for entry, job in zip(fleet.jobs, jobs, strict=True):
        source = "dtrain fleet" if entry.script is None else os.path.basename(entry.script)
        asked = [f"{name}=" for name in entry.set]
        tracked = track(job.trained, asked, settings, cluster, project, source, {FLEET_TAG: fleet.name})
        found.append(replace(job, config=tracked.job))
    return found


def tell_what_is_asked(expected: Sequence[FleetJob], given: Mapping[str, FleetJob], limits: FleetLimits) -> None:
    """Print what the jobs are expected to need, where each figure comes from, and warn where that is more than the
    budget. ``given``: jobs that the fleet was given before, by id, which are not changed."""
    jobs = [given.get(job.job_id, job) for job in expected]
    alike: dict[str, list[str]] = {}
    for job in jobs:
        basis = "as it was when the fleet was given it" if job.job_id in given else job.facts[BASIS]
        takes = f"{format_duration(job.node_seconds / job.nodes)} on {count_nodes(job.nodes)}"
        alike.setdefault(f"{takes}: {basis}", []).append(job.job_id)
    for figure, names in alike.items():
        say(f"{name_some(names)}: {figure}", err=True)
    needed = usd(sum(limits.units_of(job.paid_seconds) for job in jobs))
    words = f"{len(jobs)} job{'s' if len(jobs) > 1 else ''}, expected to need {dollars(needed)}"
    say(f"{words}; the budget is {dollars(limits.budget_usd)}", err=True)
    if needed > limits.budget_usd:
        say("note: that is more than the budget: the jobs of the lowest rank will not be started", err=True)

"""`dtrain fleet`: many jobs under one budget, from a file. Each command imports what it needs, so that ``--help``
answers at once."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from dtrain_dagster.cli.common import (
    cluster_of,
    console,
    ranks_of,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.going_on import command_again, typed_arguments
from dtrain_dagster.cli.job_life import ended_by_signals
from dtrain_dagster.cli.job_names import complete_files, complete_fleets, find_fleet
from dtrain_dagster.cli.json_fields import FLEET, FLEET_COST
from dtrain_dagster.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from dtrain_dagster.fleet.ledger import JobBill
    from dtrain_dagster.fleet.records import FleetRecords
    from dtrain_dagster.fleet.source import JobSource
    from dtrain_dagster.settings.environment import Settings

EXIT_INCOMPLETE = 1


@click.group()
def fleet() -> None:
    """Train many models under one budget.

    A file names the jobs, the dollars that all of them together may cost, and when they must have ended. Jobs of higher
    priority come first; each gets as many nodes as pay. See docs/fleet.md.
    """


@fleet.command()
@click.argument("file", metavar="FILE", shell_complete=complete_files)
@click.option("--check", is_flag=True, help="Check the file and its jobs, and start nothing.")
@refuses
def run(file: str, check: bool) -> None:
    """Run the fleet of FILE until its last job is over.

    FILE is YAML or JSON, see docs/fleet.md. The exit code is 1 where a job has not succeeded.

    Ctrl-C leaves the jobs running, each up to the dollars that it was promised; the same command goes on with them,
    also after a crash. `dtrain fleet cancel` ends them.

    Each job is a run of MLflow, below a run of the fleet (`dtrain mlflow`). DTRAIN_COMMAND_TRACKING=off keeps a start
    of the fleet out of it, `set: {tracking.mlflow_tracking_uri: null}` a job.

    \b
    Examples:
      dtrain fleet run night.yaml --check
      dtrain fleet run night.yaml
    """
    from dtrain_dagster.cli.fleet_orders import jobs_of, limits_of, tell_what_is_asked
    from dtrain_dagster.cli.fleet_tracking import tracked_jobs
    from dtrain_dagster.cli.job_options import read_file
    from dtrain_dagster.fleet.records import FleetRecords
    from dtrain_dagster.fleet.source import ListedJobs
    from dtrain_dagster.fleet.spec import parse_fleet
    from dtrain_dagster.support.user_sources import ensure_importable

    wanted = parse_fleet(read_file(file, file, "the file"), file)
    settings = read_settings()
    records = FleetRecords(settings.home, wanted.name)
    began_at = records.began_at(time.time())
    cluster, project = cluster_of(settings)
    limits = limits_of(wanted, settings, cluster, began_at)
    expected = jobs_of(wanted, settings, limits, began_at)
    given = {entry.job.job_id: entry.job for entry in records.entries()} if records.is_there() else {}
    tell_what_is_asked(expected, given, limits)
    if check:
        return
    expected = tracked_jobs(wanted, expected, settings, cluster, project)
    ensure_importable()
    with records.sole_orchestrator():
        if records.is_cancelled():
            say(f"fleet {wanted.name} was cancelled before: jobs that had not begun will not run", err=True)
            records.forget_cancellation()
        records.write_limits(limits, time.time())
        orchestrate(settings, records, ListedJobs([item.job for item in expected]))
    if any(entry.kept.state != "succeeded" for entry in records.entries()):
        sys.exit(EXIT_INCOMPLETE)


def orchestrate(settings: Settings, records: FleetRecords, source: JobSource) -> None:
    """Run a fleet to its end, and show it. It must be held by `FleetRecords.sole_orchestrator`."""
    from dtrain_dagster.cli.fleet_screen import FleetScreen, headline, print_fleet
    from dtrain_dagster.cli.fleet_tracking import FleetTracker
    from dtrain_dagster.clusters.notice_text import FLEET, PART_OF
    from dtrain_dagster.fleet.runner import FleetRunner, LaunchTerms
    from dtrain_dagster.fleet.view import FleetWatch
    from dtrain_dagster.settings.tiers import tier_of
    from trainer.observability.reporter import OFF, TRACKING_OF_LAUNCH

    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    if not records.is_cancelled():
        manager.provision_cluster(records.limits().nodes, cluster.sku)
    is_tracked = settings.command_tracking != OFF
    kept_out = {} if is_tracked else {TRACKING_OF_LAUNCH: OFF}
    env = cluster.node_env(project) | kept_out | {PART_OF: FLEET}
    terms = LaunchTerms(processes_per_node=ranks_of(settings), env=env, tier=tier_of(cluster.first_tier))
    watch = FleetWatch(records)
    with FleetScreen(console(), watch) as screen, ended_by_signals(lambda: _say_that_jobs_go_on(records.name)):
        runner = FleetRunner(manager, records, source, terms, screen.tell)
        tracker = FleetTracker(records, terms.tier, screen.tell) if is_tracked else None

        def update() -> None:
            screen.update()
            if tracker is not None:
                tracker.update(list(runner.entries.values()))

        runner.run(update)
    for sentence in tracker.finish() if tracker is not None else ():
        say(sentence, err=True)
    view = watch.view()
    print_fleet(console(), view)
    say(headline(view))


def _say_that_jobs_go_on(name: str) -> None:
    say(
        f"the running jobs of fleet {name} continue, each up to the dollars that it was promised: "
        f"`dtrain fleet status {name}` shows them, `dtrain fleet cancel {name}` ends them",
        err=True,
    )
    say(f"go on: {command_again(typed_arguments())}", err=True)


@fleet.command()
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_fleets)
@json_option(FLEET, "Print one JSON document: of NAME, or a list of those of all fleets.")
@refuses
def status(name: str | None, as_json: bool) -> None:
    """Show all fleets, or the state of one.

    For one fleet it shows the jobs, their nodes, progress and cost. NAME may be `latest`, or the beginning of a name.

    \b
    Examples:
      dtrain fleet status
      dtrain fleet status night --json
    """
    from dtrain_dagster.cli.fleet_screen import headline, print_fleet
    from dtrain_dagster.fleet.records import FleetRecords, fleet_names
    from dtrain_dagster.fleet.view import FleetWatch

    settings = read_settings()
    names = [find_fleet(settings, name)] if name else fleet_names(settings.home)
    views = [FleetWatch(FleetRecords(settings.home, each)).view() for each in names]
    if as_json:
        documents = [view.document() for view in views]
        print_json(documents[0] if name else documents)
        return
    if not views:
        say("no fleets yet: `dtrain fleet run FILE` begins one")
    for view in views:
        say(headline(view))
        if name:
            print_fleet(console(), view)


@fleet.command()
@click.argument("name", metavar="NAME", shell_complete=complete_fleets)
@refuses
def cancel(name: str) -> None:
    """End a fleet.

    Its jobs save a checkpoint and release their nodes, and no further job starts. The command returns when all nodes
    are released.

    \b
    Examples:
      dtrain fleet cancel night
    """
    from dtrain_dagster.fleet.records import FleetRecords
    from dtrain_dagster.fleet.source import ListedJobs

    settings = read_settings()
    name = find_fleet(settings, name)
    records = FleetRecords(settings.home, name)
    records.ask_to_cancel()
    while records.is_run():
        time.sleep(0.5)  # whoever runs it ends it
    with records.sole_orchestrator():
        orchestrate(settings, records, ListedJobs([entry.job for entry in records.entries()]))


@fleet.command()
@click.argument("name", metavar="NAME", shell_complete=complete_fleets)
@json_option(FLEET_COST)
@refuses
def cost(name: str, as_json: bool) -> None:
    """Show what all jobs of a fleet have cost together.

    The cost is shown by cause and by job; both add up to the same total.

    \b
    Examples:
      dtrain fleet cost latest
    """
    from dtrain_dagster.cli.fleet_screen import ledger_table
    from dtrain_dagster.fleet.ledger import add_ledgers
    from dtrain_dagster.fleet.records import FleetRecords

    settings = read_settings()
    name = find_fleet(settings, name)
    records = FleetRecords(settings.home, name)
    budget_usd = records.limits().budget_usd
    begun = [entry for entry in records.entries() if entry.kept.launches]
    found = add_ledgers({entry.job.job_id: bill_of(settings, entry.job.job_id) for entry in begun})
    if as_json:
        from dtrain_dagster.costs.money import usd

        document = {
            "node_seconds": found.microseconds / 1e6,
            "usd": usd(found.units),
            "budget_usd": budget_usd,
            "causes": {
                cause.value: {"node_seconds": row.seconds, "usd": row.usd} for cause, row in found.causes().items()
            },
            "jobs": {job_id: {"node_seconds": row.seconds, "usd": row.usd} for job_id, row in found.by_job().items()},
        }
        print_json(document)
        return
    console().print(ledger_table(found), highlight=False)


def bill_of(settings: Settings, job_id: str) -> JobBill:
    """Return what a job has cost, and what for."""
    from dtrain_dagster.costs.ledger import ledger
    from dtrain_dagster.costs.tracker import CostTracker
    from dtrain_dagster.fleet.ledger import JobBill
    from dtrain_dagster.settings.tiers import tier_of
    from trainer.rundir import JOB

    manager = cluster_of(settings)[0].manager()
    rundir = run_dir(settings, job_id)
    running = not manager.job_status(job_id).state.is_final
    tracker = CostTracker(settings.cluster_name, manager.node_usage(job_id), tier_of(settings.tiers[0]))
    found = ledger(tracker.nodes, rundir.events(strict=True), running, is_script=not rundir.storage.exists(JOB))
    return JobBill(tracker=tracker, ledger=found)

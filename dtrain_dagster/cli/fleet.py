"""`dtrain fleet`: many jobs under one budget, from a file. `dtrain cancel`, `status` and `cost` take its name."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import cluster_of, console, ranks_of, read_settings, refuses, run_dir, say
from dtrain_dagster.cli.fleet_orders import jobs_of, limits_of, tell_what_is_asked, tracked_jobs
from dtrain_dagster.cli.fleet_screen import fleet_screen, fleet_table, headline
from dtrain_dagster.cli.follow import warn
from dtrain_dagster.cli.job_names import complete_files
from dtrain_dagster.cli.job_options import read_file
from dtrain_dagster.cli.start import ended_by_signals, say_that_jobs_go_on, this_command_again
from dtrain_dagster.cli.tracking import FleetTracker
from dtrain_dagster.clusters.notice_text import FLEET, PART_OF
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.money import usd
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.fleet.ledger import add_ledgers
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.runner import FleetRunner, LaunchTerms
from dtrain_dagster.fleet.source import ListedJobs
from dtrain_dagster.fleet.spec import parse_fleet
from dtrain_dagster.fleet.view import FleetWatch
from dtrain_dagster.settings.tiers import tier_of
from dtrain_dagster.support.user_sources import ensure_importable
from trainer.observability.reporter import OFF, TRACKING_OF_LAUNCH
from trainer.rundir import JOB

if TYPE_CHECKING:
    from dtrain_dagster.costs.ledger import Ledger
    from dtrain_dagster.costs.tracker import CostTracker
    from dtrain_dagster.fleet.ledger import FleetLedger
    from dtrain_dagster.fleet.records import FleetRecords
    from dtrain_dagster.fleet.source import JobSource
    from dtrain_dagster.settings.environment import Settings

EXIT_INCOMPLETE = 1


@click.command()
@click.argument("file", metavar="FILE", shell_complete=complete_files)
@click.option("--check", is_flag=True, help="Check the file and its jobs, and start nothing.")
@refuses
def fleet(file: str, check: bool) -> None:
    """Train many models under one budget.

    FILE names the jobs, the dollars that all of them together may cost, and when they must have ended. Jobs of higher
    priority come first; each gets as many nodes as pay. It is YAML or JSON, see docs/many-trainings.md. The exit
    code is 1 where a job has not succeeded.

    Ctrl-C leaves the jobs running, each up to the dollars that it was promised; the same command goes on with them,
    also after a crash. `dtrain status`, `cancel` and `cost` take the name of the fleet.

    Each job is a run of MLflow, below a run of the fleet (`dtrain ui mlflow`). DTRAIN_COMMAND_TRACKING=off keeps a
    start of the fleet out of it, `set: {tracking.mlflow_tracking_uri: null}` a job.

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

    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    if not records.is_cancelled():
        manager.provision_cluster(records.limits().nodes, cluster.sku)
    is_tracked = settings.command_tracking != OFF
    kept_out = {} if is_tracked else {TRACKING_OF_LAUNCH: OFF}
    env = cluster.node_env(project) | kept_out | {PART_OF: FLEET}
    terms = LaunchTerms(processes_per_node=ranks_of(settings), env=env, tier=tier_of(cluster.first_tier))
    watch, shown = FleetWatch(records), console()
    tell = partial(warn, shown)

    def go_on() -> None:
        say_that_jobs_go_on(f"jobs of fleet {records.name}", records.name, this_command_again())

    with fleet_screen(shown, watch) as show, ended_by_signals(go_on):
        runner = FleetRunner(manager, records, source, terms, tell)
        tracker = FleetTracker(records, terms.tier, tell) if is_tracked else None

        def update() -> None:
            show()
            if tracker is not None:
                tracker.update(list(runner.entries.values()))

        runner.run(update)
    for sentence in tracker.finish() if tracker is not None else ():
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
        orchestrate(settings, records, ListedJobs([entry.job for entry in records.entries()]))


def bill_of_fleet(settings: Settings, name: str) -> tuple[FleetLedger, float]:
    """Return what all jobs of a fleet have cost together, and its budget in dollars."""

    records = FleetRecords(settings.home, name)
    begun = [entry.job.job_id for entry in records.entries() if entry.kept.launches]
    return add_ledgers({job_id: bill_of(settings, job_id) for job_id in begun}), records.limits().budget_usd


def bill_document(found: FleetLedger, budget_usd: float) -> dict[str, Any]:
    """Return the cost of a fleet for JSON, with the fields of `dtrain_dagster.cli.json_fields.FLEET_COST`. Pure."""

    return {
        "node_seconds": found.microseconds / 1e6,
        "usd": usd(found.units),
        "budget_usd": budget_usd,
        "causes": {name.value: {"node_seconds": row.seconds, "usd": row.usd} for name, row in found.causes.items()},
        "jobs": {job_id: {"node_seconds": row.seconds, "usd": row.usd} for job_id, row in found.jobs.items()},
    }


def bill_of(settings: Settings, job_id: str) -> tuple[CostTracker, Ledger]:
    """Return what a job has cost, and what for."""

    manager = cluster_of(settings)[0].manager()
    rundir = run_dir(settings, job_id)
    running = not manager.job_status(job_id).state.is_final
    tracker = CostTracker(settings.cluster_name, manager.node_usage(job_id), tier_of(settings.tiers[0]))
    found = ledger(tracker.nodes, rundir.events(strict=True), running, is_script=not rundir.storage.exists(JOB))
    return tracker, found

"""`dtrain tune`: it measures the settings with which a training is fastest on this cluster and writes them to a file.

`trainer.tuning.search` and `trainer.tuning.tuner` decide what is tried and how it is compared.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from dtrain_dagster.cli.ceilings import promising
from dtrain_dagster.cli.common import Refusal, cluster_of, console, ranks_of, refuses, run_dir, say
from dtrain_dagster.cli.follow import Bar, in_place
from dtrain_dagster.cli.job_options import Asked, say_what_is_wrong, training_options, with_reachable_data
from dtrain_dagster.cli.plan_lines import expect_nodes
from dtrain_dagster.cli.screen import plain_table
from dtrain_dagster.cli.start import finish, new_job_id, provision, start_and_follow, this_command
from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobSpec, JobStatus
from dtrain_dagster.costs.prices import price_words
from dtrain_dagster.jobs.progress import follow_job
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.jobs.totals import sum_launches
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.user_sources import ensure_importable
from trainer.documents.events import TuneEvent, read_events
from trainer.rundir import TUNED, RunDir
from trainer.storage.open import open_storage
from trainer.tuning.search import LEAST_SECONDS, NO_TIME
from trainer.tuning.verdict import CONFIDENCE, UNTOLD

ENDED_EARLY = "ended early: this is the best so far, not compared with the untuned settings; it may be no faster"


@click.command()
@training_options
@click.option(
    "--seconds",
    type=float,
    metavar="SECONDS",
    default=300.0,
    show_default=True,
    help="Seconds for measuring, after start-up; with less than 300, compiling is hardly tried.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("tuned.json"),
    show_default=True,
    metavar="FILE",
    help="File to write the settings to.",
)
@click.option("--name", metavar="JOB", help="Name of the job.  [default: made from the time]")
@refuses
def tune(asked: Asked, seconds: float, out: Path, name: str | None) -> None:
    """Measure which settings train this model fastest.

    One job tries micro-batch and accumulation (of the same global batch), precision, threads, input, communication and
    compiling, side by side and in whole real steps. A setting that changes results is taken only if the model learns as
    much. FILE is for `dtrain train --settings`. Ctrl-C ends the job and keeps the best so far.

    \b
    Examples:
      dtrain tune --dataset latest --nodes 3
      dtrain tune --config job.json --seconds 600 --out fast.json
      dtrain train --config job.json --settings fast.json
    """
    if not LEAST_SECONDS <= seconds < math.inf:
        raise Refusal(f"--seconds {seconds:g}: settings cannot be compared in less than {LEAST_SECONDS:g} s; try 300")
    _refuse_unwritable(out)
    settings = asked.settings()
    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    job_id = new_job_id(name, "tune")
    with asked.in_its_words():
        job, node_count = asked.job(settings, asked.fields(), job_id)
        say_what_is_wrong(job, node_count, settings)
    rundir = run_dir(settings, job_id)
    if rundir.storage.exists("job.json"):
        raise Refusal(f"job {job_id} is there already: choose another --name")
    job = with_reachable_data(job, settings)
    ensure_importable()
    hourly = expect_nodes(settings, node_count).usd_per_hour
    with promising(settings, Wanted(job_id, hourly * seconds / 3600)):
        provision(manager, node_count, cluster.sku)
        rundir.write_job(job)
        spec = JobSpec(
            job_id=job_id,
            run_dir=job.run_dir,
            command=(
                *(manager.python, "-m", "trainer.tuning", "--config", f"{job.run_dir}/job.json"),
                *("--seconds", f"{seconds:g}"),
            ),
            node_count=node_count,
            processes_per_node=ranks_of(settings),
            env=cluster.node_env(project),
            master_port=job.training.master_port,
        )
        begin, watch = partial(manager.submit_job, spec), partial(_watch, manager, rundir, job_id)
        try:
            status = start_and_follow(settings, manager, job_id, begin, watch, f"tune again: {this_command()}")
        except SystemExit:  # of Ctrl-C
            _deliver(manager, rundir, job_id, out, settings, cluster.sku)
            raise
        _deliver(manager, rundir, job_id, out, settings, cluster.sku)
        assert status is not None  # None where a job is left running
        finish(settings, rundir, status)


def _refuse_unwritable(out: Path) -> None:
    """`Refusal`, before anything is started, where the result could not be written."""
    try:
        if out.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}-"):
            pass
    except OSError as error:
        raise Refusal(f"--out {out} cannot be written: {error}; choose another file") from None


def _watch(manager: GPUClusterManager, rundir: RunDir, job_id: str) -> JobStatus:
    """Tell each thing that is measured, and how much of the budget is gone, until the job has ended."""
    shown = console()
    bar, events = Bar(shown), list[dict[str, Any]]()
    with in_place(shown) as show:
        for now, _ in follow_job(manager, rundir, job_id, take=events.extend):
            status = now
            for item in read_events(TuneEvent, events):
                shown.print(_line(item), soft_wrap=True, highlight=False, markup=False)
                show(bar.at(f"{item.group}: {item.candidate}", item.elapsed_seconds, item.budget_seconds))
            events.clear()
    return status


def _line(item: TuneEvent) -> str:
    """One thing that was done, as a person reads it. Pure."""
    figures = ""
    if item.samples_per_second and item.gain:
        figures = f" {item.samples_per_second['median']:,.0f} samples/s, {_percent(item.gain)}"
    return f"{item.elapsed_seconds:5.0f} s  {item.group}: {item.candidate}: {item.doing}{figures}"


def _percent(gain: Mapping[str, float]) -> str:
    """``+27 % (+4 to +52 %)``: median and quartiles over rounds."""
    low, median, high = (f"{100 * (gain[name] - 1):+.0f}" for name in ("low", "median", "high"))
    return f"{median} % ({low} to {high} %)"


def _interval(row: Mapping[str, Any]) -> str:
    """``+27 % (95 % interval +20 to +33 %, 25 rounds)``: the gain of a row of the last comparison."""
    low, middle, high = (row["gain_interval"][name] for name in ("low", "middle", "high"))
    ends = f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %"
    return f"{100 * (middle - 1):+.1f} % ({100 * CONFIDENCE:.0f} % interval {ends}, {row['rounds']} rounds)"


def _deliver(manager: GPUClusterManager, rundir: RunDir, job_id: str, out: Path, settings: Settings, sku: str) -> None:
    """Show what was found, write it, and say what it cost. Of a search that was cut short only what has been found."""
    took, words = None, price_words(sku, settings.kind.buys_nodes)
    try:
        took = sum_launches(manager.node_usage(job_id), tier_of(settings.tiers[0]))
    except ClusterError as error:
        say(f"note: what it cost is not known: {error}", err=True)
    if (document := rundir.read_json(TUNED)) is not None:
        evidence = document["evidence"]
        console().print(candidates_table(evidence["candidates"]), highlight=False)
        if document["training"] or evidence["complete"]:
            if took is not None:
                evidence["cost"] = {"node_seconds": took.node_hours * 3600, "usd": took.usd, "price": words}
            text = json.dumps(document, indent=2, sort_keys=True)
            open_storage(str(out.parent.absolute())).write(out.name, text.encode())
            say(*summary(document, out))
        else:
            say(f"nothing was confirmed in this time: {out} is not written; give more --seconds", err=True)
    if took is not None:
        paid = "" if took.usd is None else f", {dollars(took.usd)} ({words})"
        say(f"tuning cost {took.node_hours * 3600:.0f} node-seconds{paid}", err=True)


def summary(document: Mapping[str, Any], out: Path) -> list[str]:
    """Return the result in sentences. Pure."""
    training, evidence = document["training"], document["evidence"]
    lines = [] if evidence["complete"] else [ENDED_EARLY]
    if short := sum(row["verdict"] in (UNTOLD, NO_TIME) for row in evidence["candidates"]):
        lines.append(f"{short} candidate(s) had too little time: a larger --seconds compares more of them")
    baseline, chosen = (evidence[name]["samples_per_second"] for name in ("baseline", "chosen"))
    if not training:
        pace = f" ({baseline['median']:,.0f} samples/s)" if baseline else ""
        return [*lines, f"keep the settings as configured{pace}: no change was faster beyond noise"]
    found = ", ".join(_changes(training))
    if baseline and chosen:
        found += f": {chosen['median']:,.0f} samples/s instead of {baseline['median']:,.0f}"
    confirmed = next((row for row in evidence["candidates"] if row["verdict"] == "confirmed"), None)
    if confirmed is not None and confirmed.get("gain_interval"):
        found += f", {_interval(confirmed)}, measured apart from the search"
    elif evidence["gain"]:
        found += f", {_percent(evidence['gain'])}"
    return [*lines, found, f"use it: dtrain train … --settings {out}"]


def _changes(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {value}" for name, value in settings.items()]


def candidates_table(rows: list[dict[str, Any]]) -> Table:
    """Return a row for each candidate, with the setting that it changes. Pure."""
    figures = ("SAMPLES/S", "GAIN (QUARTILES)", "LOSS")
    table = plain_table("GROUP", "CHANGE", *figures, "VERDICT", right=figures)
    for row in rows:
        pace, gain, loss = (row.get(name) for name in ("samples_per_second", "gain", "validation_loss"))
        difference = loss["candidate"] - loss["baseline"] if loss and loss["candidate"] is not None else None
        style = {"chosen": "green", "confirmed": "green"}.get(row["verdict"], "")
        table.add_row(
            row["group"],
            Text("\n".join(_changes(row["change"])) or "as configured"),
            f"{pace['median']:,.0f}" if pace else "–",
            _percent(gain) if gain else "–",
            f"{difference:+.5f}" if difference is not None else "",
            Text(row["verdict"], style=style),
        )
    return table

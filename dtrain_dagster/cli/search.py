"""`dtrain search`: trials of a space as jobs of the cluster, under one budget, and the settings of the best one.

`dtrain_dagster.search` decides what is tried and what goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.ceilings import promising
from dtrain_dagster.cli.common import (
    Refusal,
    cluster_of,
    console,
    json_option,
    print_json,
    ranks_of,
    read_settings,
    refuses,
    say,
)
from dtrain_dagster.cli.facts import price_of_cluster
from dtrain_dagster.cli.follow import fleet_screen
from dtrain_dagster.cli.job_names import LATEST, complete_searches, resolve_name
from dtrain_dagster.cli.job_options import (
    Asked,
    order_script,
    read_file,
    say_what_is_wrong,
    training_options,
    with_reachable_data,
)
from dtrain_dagster.cli.screen import plain_table
from dtrain_dagster.cli.start import ended_by_signals, new_job_id, provision, say_that_jobs_go_on, this_command
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.view import FleetWatch
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.planning.check_job import check_job, data_of
from dtrain_dagster.search.results import kept_result, search_names, summary
from dtrain_dagster.search.run import Measured, Search, SearchRequest, measure_trial, open_search
from dtrain_dagster.search.script import SearchedScript
from dtrain_dagster.search.space import check_space, parse_space, shown_values
from dtrain_dagster.search.tracking import SearchTracker
from dtrain_dagster.search.trials import MOST_TRIALS, Pruner, Sampler, SearchSettings
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.user_sources import ensure_importable

if TYPE_CHECKING:
    from rich.table import Table

    from dtrain_dagster.settings.environment import Settings
    from trainer.config import JobConfig, TrackingConfig


@click.command()
@training_options
@click.option(
    "--script",
    metavar="FILE.PY",
    type=click.Path(),
    help="A script that calls Trainer(…).fit(…), instead of --dataset; its arguments come after --.",
)
@click.option("--space", metavar="FILE", type=click.Path(), help="The space: a file of JSON, or JSON itself, as above.")
@click.option(
    "--show",
    metavar="SEARCH",
    shell_complete=complete_searches,
    help="Show the trials of a search: its name, the beginning of it, or latest.",
)
@click.option(
    "--trials",
    type=click.IntRange(1, MOST_TRIALS),
    metavar="N",
    default=32,
    show_default=True,
    help="The largest number of trials.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1),
    metavar="P",
    help="Trials that run at once.  [default: as many as there are nodes for]",
)
@click.option(
    "--nodes-per-trial",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="K",
    help="Nodes of one trial: its batches stay those of a training on all --nodes.",
)
@click.option(
    "--budget",
    type=float,
    metavar="USD",
    help="Dollars for the whole search.  [default: twice what all trials take to their ends]",
)
@click.option(
    "--sampler",
    type=click.Choice(["gp", "random"]),
    default="gp",
    show_default=True,
    help="gp (a Gaussian process) or random.",
)
@click.option(
    "--pruner",
    type=click.Choice(["asha", "none"]),
    default="asha",
    show_default=True,
    help="What ends trials early: asha (after 1, 3, 9, … evaluations a third goes on) or none.",
)
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    metavar="NAME",
    help="The metric of the validation split to compare: loss, or one of the task's.",
)
@click.option("--maximise", is_flag=True, help="A higher metric is better.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="The same seed gives the same trials.",
)
@click.option(
    "--name",
    metavar="SEARCH",
    shell_complete=complete_searches,
    help="Name of the search; an existing search continues.  [default: from the time]",
)
@click.option("--plan", "only_plan", is_flag=True, help="Measure one trial, say what the search would cost, and exit.")
@json_option("Print the result as one JSON document.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@refuses
def search(
    asked: Asked,
    script: str | None,
    space: str | None,
    show: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Search hyperparameters, on as many nodes as there are.

    The job that the options describe is varied over the space; each trial is a training on the cluster, which may lose
    nodes. Its validation score decides whether it goes on. Killed or interrupted, the same command with the same --name
    continues where it was. Ctrl-C leaves the trials running, each up to the dollars that it was promised; `dtrain
    cancel NAME` ends them, and `dtrain cost NAME` has the bill of each.

    `dtrain jobs --fleets` lists the searches of this home.

    \b
    A space has a range, or a list of choices, for each field that varies:
      {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
       "model.factory": ["tcn", "lstm"]}

    The space of a script has fields of training, and its arguments as args.NAME: a trial gets --NAME VALUE.

    \b
    Examples:
      dtrain search --dataset latest --space space.json --trials 40 --budget 5
      dtrain search --script train.py --space '{"args.width": [32, 64, 128]}' \\
        --budget 5 -- --data table.csv
      dtrain search --dataset latest --space space.json --plan
      dtrain search --config job.json --space space.json --nodes 8 \\
        --nodes-per-trial 2 --name wide
      dtrain train --config job.json --settings .dtrain/searches/wide/best.json
      dtrain search --show latest --json | jq -r .settings_file
    """
    if arguments and script is None:
        raise click.UsageError(f"arguments belong to a --script: {arguments[0]}", click.get_current_context())
    if space is not None:
        _search(asked, None if script is None else (script, arguments), space, as_json, **options)
    elif show is None or asked != Asked() or options["name"] or script:
        raise click.UsageError("give the --space that is searched", click.get_current_context())
    else:
        _show(show, as_json)


def _search(
    asked: Asked, script: tuple[str, tuple[str, ...]] | None, space: str, as_json: bool, *, parallel: int | None,
    nodes_per_trial: int, budget: float | None, sampler: str, pruner: str, name: str | None, only_plan: bool,
    **drawn: Any,
) -> None:  # fmt: skip
    settings = asked.settings()
    document, source = _space_of(space)
    parsed = parse_space(document, source)
    if nodes_per_trial > settings.nodes:
        raise Refusal(f"--nodes-per-trial {nodes_per_trial}: there are {settings.nodes} node(s) for all (--nodes)")
    wanted = SearchSettings(
        parallel=parallel or settings.nodes // nodes_per_trial,
        sampler=Sampler(sampler),
        pruner=Pruner(pruner),
        **drawn,
    )
    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    search_name = new_job_id(name, "search")
    of_script, samples = None, dict[str, int]()
    with asked.in_its_words():
        if script is not None:
            job, node_count, of_script, samples = _script(settings, asked, *script, search_name)
            check_space(parsed, job, source=source, make=of_script.job_of)
        else:
            job, node_count = asked.job(settings, asked.fields(), search_name)
            say_what_is_wrong(job, node_count, settings)
            ranks = nodes_per_trial * ranks_of(settings)
            say(*check_space(parsed, job, lambda trial: check_job(trial, ranks).sentences, source), err=True)
    ensure_importable()
    tracking, job = job.tracking, replace(job, tracking=replace(job.tracking, mlflow_tracking_uri=None))
    job, price = replace(job, tracking=replace(job.tracking, registered_model=None)), price_of(cluster.sku)
    if of_script is None:
        dataset_id = data_of(job).dataset_id  # a part of what is searched
        job = with_reachable_data(replace(job, dataset=replace(job.dataset, dataset_id=dataset_id)), settings)
        samples = dict(data_of(job).samples)
    request = SearchRequest(
        name=search_name, space=document, settings=wanted, base=job, samples=samples,
        budget_usd=budget, nodes=node_count, nodes_per_trial=nodes_per_trial,
        processes_per_node=ranks_of(settings), usd_per_node_hour=price.usd_per_hour(settings.tiers[0]),
        tier=settings.tiers[0], script=of_script,
    )  # fmt: skip
    tracker = None
    if tracking.mlflow_tracking_uri is not None and not only_plan:
        tracker = _open_tracker(tracking, search_name, wanted)  # before anything is bought
    start = Wanted(search_name, budget, request.at_once * request.usd_per_node_hour, is_group=True)
    with promising(settings, start):
        provision(manager, nodes_per_trial, cluster.sku)
        env = cluster.node_env(project)
        say(f"search {search_name}: the same command with --name {search_name} continues it", err=True)
        is_here = settings.kind.is_this_machine

        def measure() -> Measured:
            return measure_trial(manager, request, env, is_here, lambda sentence: say(sentence, err=True))

        again = this_command("" if name else search_name)

        def say_that_none_was_begun() -> None:
            say("the measurement was stopped, and no trial was started; `dtrain jobs` shows what it cost", err=True)
            say(f"go on: {again}", err=True)

        with ended_by_signals(say_that_none_was_begun):
            found = open_search(Path(settings.home), request, manager, env, measure)
        say(*found.plan.lines, f"dollars: {price_of_cluster(settings)}", err=True)
        if only_plan:
            if as_json:
                print_json({"name": search_name, "plan": asdict(found.plan)})
            return
        with promising(settings, replace(start, usd=found.budget_usd)):
            _run(found, settings, as_json, tracker, again)


def _script(
    settings: Settings, asked: Asked, script: str, arguments: tuple[str, ...], name: str
) -> tuple[JobConfig, int, SearchedScript, dict[str, int]]:
    """Return the training of a script that is varied, its nodes, the script, and the samples of its splits. Raise
    `Refusal` for options that do not go with it, and `ConfigError` as `order_script` does."""
    asked.refuse_beside_script()
    found = order_script(settings, script, arguments, asked.fields(), asked.nodes, name)
    if not found.samples["valid"]:
        raise Refusal(f"--script {script}: trials are compared on a validation split: call fit(train, valid)")
    searched = SearchedScript(
        path=found.command[1], arguments=arguments, overrides=tuple(asked.fields()), digest=found.digest
    )
    return found.job, asked.nodes or settings.nodes, searched, dict(found.samples)


def _open_tracker(tracking: TrackingConfig, name: str, wanted: SearchSettings) -> SearchTracker:
    """Return what writes the search to MLflow: the orchestrator, and not the nodes of each trial. Raise `Refusal` where
    MLflow cannot be reached."""
    from mlflow.exceptions import MlflowException

    assert tracking.mlflow_tracking_uri is not None
    try:
        return SearchTracker(tracking.mlflow_tracking_uri, tracking.mlflow_experiment, name, wanted.metric, wanted.sign)
    except (MlflowException, OSError) as error:
        raise Refusal(f"tracking.mlflow_tracking_uri cannot be used, so nothing was bought: {error}") from None


def _space_of(text: str) -> tuple[Any, str]:
    """Return the document of a space, and what messages call it. Raise `Refusal` for no JSON."""
    source = "--space"
    if not text.lstrip().startswith("{"):
        source, text = text, read_file(text, f"--space {text}", "the file of JSON")
    try:
        return json.loads(text), source
    except ValueError as error:
        raise Refusal(f"{source} is not JSON: {error}") from None


def _run(found: Search, settings: Settings, as_json: bool, tracker: SearchTracker | None, again: str) -> None:
    """Run a search, show how it stands, and print its result."""
    name, watch = found.request.name, FleetWatch(FleetRecords(settings.home, found.request.name))
    with (
        fleet_screen(console(), watch, is_shown=not as_json) as show,
        ended_by_signals(lambda: say_that_jobs_go_on("trials", name, again)),
    ):
        result = found.run(lambda sentence: say(sentence, err=True), show, tracker)
    _print_result(result, as_json)


def _print_result(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        console().print(trials_table(result["trials"], result["metric"]), highlight=False)
        say(*summary(result))


def trials_table(rows: Sequence[Mapping[str, Any]], metric: str) -> Table:
    """Return a row for each trial. Pure."""
    from rich.text import Text

    figures = (metric.upper(), "EVALUATIONS", "COST")
    table = plain_table("TRIAL", "STATE", *figures, "VALUES", right=("TRIAL", *figures))
    for row in rows:
        score = "–" if row["score"] is None else f"{row['score']:.6g}"
        values = Text(shown_values(row["values"]))
        table.add_row(str(row["trial"]), row["state"], score, row["evaluations"], dollars(row["usd"]), values)
    return table


def _show(given: str, as_json: bool) -> None:
    """Print the trials of one search."""
    settings = read_settings()
    names = search_names(settings.home)
    if given == LATEST and names and LATEST not in names:
        given = names[0]
    _print_result(kept_result(settings.home, resolve_name(given, names, "search", "dtrain jobs --fleets")), as_json)

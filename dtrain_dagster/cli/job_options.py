"""The conversion of the options of `dtrain` to the job that it runs, with its dataset where the nodes read it, and the
checks before nodes are bought. A script's training is found out by `dtrain_dagster.jobs.script_job`."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from dtrain_dagster.cli.common import Refusal, gathers, ranks_of, read_settings, say
from dtrain_dagster.cli.job_names import complete_datasets
from dtrain_dagster.cli.start import new_job_id
from dtrain_dagster.clusters.azure_ml.sku_chain import explain_retired
from dtrain_dagster.clusters.ranks import explain_idle_gpus, have_gpus, hosts_of
from dtrain_dagster.costs.prices import alternatives_to, price_of
from dtrain_dagster.data.build_once import publish_dataset, published_uri
from dtrain_dagster.jobs.orders import (
    ScriptOrder,
    environment_anywhere,
    keep_script,
    ordered_job,
    script_of,
    script_trouble,
)
from dtrain_dagster.jobs.program import describe_needs
from dtrain_dagster.jobs.script_job import ScriptJob, describe_script
from dtrain_dagster.planning.check_job import Checked, check_job, check_memory, check_strategy, data_of, room_of
from dtrain_dagster.planning.tuned_settings import read_tuned
from dtrain_dagster.settings.engines import engine_gpus
from dtrain_dagster.settings.environment import Settings
from trainer.checkpoint.manifest import read_position
from trainer.config import FACTORY, JOB_ID, ConfigError, JobConfig, parse_job
from trainer.data.manifest import kind_of, load_manifest
from trainer.data.sampler import steps_left
from trainer.differences import FIXED, describe_difference, list_differences, may_change
from trainer.model.allowed_factories import refuse_foreign_factories, usual_parts
from trainer.printable import visible
from trainer.rundir import LIMIT, RunDir, resolve_start
from trainer.storage.open import open_storage
from trainer.strategies import settings_of_backend

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A training as options describe it: its data, model, loss, fields and nodes."""

    config: str | None = None
    dataset: str | None = None
    model: str | None = None
    loss: str | None = None
    epochs: int | None = None
    overrides: tuple[str, ...] = ()
    nodes: int | None = None
    procs_per_node: int | None = None

    def settings(self) -> Settings:
        """Return the settings, in which these options come first."""
        return read_settings(self.procs_per_node, self.nodes)

    def fields(self, backend: str | None = None) -> list[str]:
        """Return the fields that are asked for, as ``--set`` takes them. Raise `ConfigError` for a backend that is
        unknown."""
        of_backend = {} if backend is None else settings_of_backend(backend)
        named = [f"training.{field}={json.dumps(value)}" for field, value in of_backend.items()]
        return [*as_overrides(self.model, self.loss, self.epochs), *named, *self.overrides]

    def job(
        self, settings: Settings, own: Sequence[str], job_id: str | None = None, settings_file: str | None = None
    ) -> tuple[JobConfig, int]:
        """Return the job that these options describe, with ``own`` fields, which come last, and the number of its
        nodes. ``settings_file``: what was tuned. Raise as `plan_job` does."""
        if (self.config is None) == (self.dataset is None):
            context = click.get_current_context()
            is_train = context.info_name == "train"
            others = "one of --dataset, --config and --script" if is_train else "either --config or --dataset"
            raise click.UsageError(f"give {others}", context)
        if self.config:
            text = read_file(self.config, f"--config {self.config}", "the job.json")
        else:
            has_own_model = any(field.startswith(("model=", "model.factory=")) for field in own)
            text = dataset_config(settings, self.dataset or "", has_own_model)
        source, given = self.config or "the command line", [*([f"job_id={json.dumps(job_id)}"] if job_id else []), *own]
        job, nodes = plan_job(text, source, given, self.nodes, settings)
        if settings_file:
            stated = {"threads_per_rank"} if settings.threads_per_rank else set()  # DTRAIN_THREADS_PER_RANK
            found = read_tuned(settings_file)
            tuned, words = found.settings_for(job, stated_fields(own) | stated)
            for sentence in words:
                say(f"note: {sentence}", err=True)
            given += [f"{part}={json.dumps(value)}" for part, value in found.parts_for(job).items()]
            given += [f"training.{field}={json.dumps(value)}" for field, value in tuned.items()]  # none is stated
            job, nodes = plan_job(text, source, given, self.nodes, settings)
        return job, nodes

    def refuse_beside_script(self, **more: str | None) -> None:
        """Raise `Refusal` for an option that says what a script says itself."""
        own = {"config": self.config, "dataset": self.dataset, "model": self.model, "loss": self.loss, **more}
        for option, value in own.items():
            if value is not None:
                what = "the script has its own model, loss, data and settings"
                raise Refusal(f"--{option} cannot be combined with --script: {what}")

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Let errors within the block name the options that were given instead of the fields of ``job.json`` that they
        stand for."""
        fields = {"--model": "model.factory", "--loss": "loss.factory", "--epochs": "training.epochs"}
        try:
            yield
        except ConfigError as error:
            text = str(error).removeprefix("the command line: ")
            for option, field in fields.items():
                if getattr(self, option.removeprefix("--")) is not None:
                    text = text.replace(field, option)
            raise ConfigError(text) from None


nodes_option = click.option(
    "--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes.  [default: DTRAIN_NODES, else 3]"
)
processes_option = click.option(
    "--procs-per-node",
    type=click.IntRange(min=1),
    metavar="P",
    help="Processes on each node.  [default: DTRAIN_PROCESSES_PER_NODE, else one per GPU]",
)
training_options = gathers(
    Asked,
    "asked",
    click.option("--config", metavar="JOB.JSON", type=click.Path(), help="A job.json, with any field of a job."),
    click.option(
        "--dataset",
        metavar="FOLDER|ID|latest|FUNCTION",
        shell_complete=complete_datasets,
        help="A dataset, or a function that makes one, instead of --config.",
    ),
    click.option(
        "--model", metavar="NAME", help="A stock model, such as tcn or mlp, or your own as package.module:factory."
    ),
    click.option(
        "--loss", metavar="NAME", help="A stock loss, or your own.  [default: the usual one of the kind of dataset]"
    ),
    click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Passes over the training data."),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any field, such as training.epochs=2. May be repeated.",
    ),
    nodes_option,
    processes_option,
)
"""The options that describe a training, which a command gets as ``asked``."""


def as_overrides(model: str | None, loss: str | None, epochs: int | None) -> list[str]:
    """Return the short options as ``--set`` takes them."""
    shortcuts = {"model.factory": model, "loss.factory": loss, "training.epochs": epochs}
    return [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]


def read_file(path: str, named: str, what: str) -> str:
    """Return the text of a file, here or in storage. Raise `ConfigError` where it cannot be read, with the file as it
    was ``named``; ``what``: the file that is to be named, if a folder was."""
    folder, _, file = path.rpartition("/")
    try:
        return open_storage(folder or ".").read(file).decode()
    except FileNotFoundError:
        raise ConfigError(f"{named}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{named} is a folder: name {what} in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{named} is not JSON: it is not text in UTF-8") from None


def dataset_config(settings: Settings, dataset: str, has_own_model: bool = False) -> str:
    """Return a job.json that trains on a dataset, given by its folder, its id, or as ``latest``: the one built last;
    or by the ``package.module:function`` that makes it. Model and loss are the usual ones for its kind.
    ``has_own_model``: whether another model will be set. What ``latest`` took is told."""
    if _FUNCTION.fullmatch(dataset):
        parts = {"model": {"factory": "(--model)"}, "loss": {"factory": "cross_entropy"}}
        return json.dumps({"dataset": {"uri": f"{FACTORY}:{dataset}"}, **parts})
    places = [f"{uri}/datasets" for uri in dict.fromkeys((settings.storage_uri, settings.shared_uri))]
    if dataset == "latest":
        dataset = _latest_dataset(places)
    named = [os.path.abspath(dataset), *(f"{place}/{dataset}" for place in places)]
    for uri in [dataset] if "://" in dataset else named:
        if open_storage(uri).exists("manifest.json"):
            manifest = load_manifest(open_storage(uri))
            try:
                model, loss = usual_parts(kind_of(manifest), manifest.get("task"), has_own_model)
            except ValueError as error:
                raise ConfigError(f"--dataset {uri}: {error}") from None
            return json.dumps({"dataset": {"uri": uri}, "model": {"factory": model}, "loss": {"factory": loss}})
    known = ", ".join(sorted({name for place in places for name in open_storage(place).list()}))
    raise ConfigError(
        f"--dataset {dataset}: neither a folder with a manifest.json nor the id of a dataset in {' or '.join(places)} "
        f"({known or 'none yet; `make run` builds one'})"
    )


def _latest_dataset(places: Sequence[str]) -> str:
    """Return the address of the dataset that was built last, and say what it is."""
    built = []
    for place in places:
        storage = open_storage(place)
        for name in storage.list():
            if storage.exists(f"{name}/manifest.json"):
                try:
                    manifest = load_manifest(open_storage(f"{place}/{name}"))
                    kind = " of ".join(filter(None, (manifest.get("task"), kind_of(manifest))))
                    built.append((datetime.fromisoformat(manifest["created_at"]), f"{place}/{name}", kind))
                except (KeyError, TypeError, ValueError) as error:  # one that is damaged hides no other
                    _log.warning("%s", visible(f"{place}/{name} is not a dataset that can be used: {error}"))
    if not built:
        raise ConfigError(f"--dataset latest: there is no dataset in {' or '.join(places)} yet; `make run` builds one")
    at, uri, kind = max(built)
    name = uri.rpartition("/")[2]
    say(f"--dataset latest: {name} ({kind}), built {at:%Y-%m-%d %H:%M} {at:%Z}", err=True)
    return uri


def with_reachable_data(job: JobConfig, settings: Settings, copies: bool = True) -> JobConfig:
    """Return the job with its dataset where the nodes read it. A dataset of this machine is copied there for nodes
    elsewhere, unless nothing is to be written (``copies``)."""
    if job.dataset.factory is not None:  # nodes must make the same
        return replace(job, dataset=replace(job.dataset, dataset_id=data_of(job).dataset_id))
    source = open_storage(job.dataset.uri)
    if open_storage(settings.shared_uri).is_local or not source.is_local:
        return job
    folder, dataset_id = str(source.local_path()), load_manifest(source)["dataset_id"]
    if copies:
        uri, _ = publish_dataset(folder, dataset_id, settings.shared_uri)
    else:
        uri = published_uri(folder, dataset_id, settings.shared_uri)
        say(f"dataset: {folder} would be copied to {uri}, unless it is there", err=True)
    return replace(job, dataset=replace(job.dataset, uri=uri))


def threads_of(settings: Settings, ranks: int) -> int | None:
    """Return the threads of each rank: nodes of this machine share its cores; of others the trainer finds out
    itself."""
    share = max(1, (os.cpu_count() or 1) // ranks) if settings.kind.is_this_machine else None
    return settings.threads_per_rank or share


def plan_job(
    text: str, source: str, overrides: Sequence[str], nodes: int | None, settings: Settings
) -> tuple[JobConfig, int]:
    """Return the job to run and the number of its nodes.

    The planned world size follows the nodes that are asked for; if none are, a world size that job.json states is kept.
    """
    processes_per_node = ranks_of(settings)
    first = parse_job(text, [*overrides, 'run_dir="(to be set)"'], source)
    refuse_foreign_factories(first)
    stated = "world_size" in json.loads(text).get("training", {})
    if nodes is None and stated:
        nodes, rest = divmod(first.training.world_size, processes_per_node)
        if rest:
            raise ConfigError(
                f"{source}: training.world_size = {first.training.world_size} is not a multiple of "
                f"{processes_per_node} processes per node; give --nodes and --procs-per-node"
            )
    nodes = nodes or settings.nodes
    ranks = nodes * processes_per_node
    own = any(override.startswith("training.world_size=") for override in overrides)
    training = replace(
        first.training,
        world_size=first.training.world_size if own else ranks,
        threads_per_rank=first.training.threads_per_rank or threads_of(settings, ranks),
    )
    job = replace(first, run_dir=f"{settings.jobs_uri}/{first.job_id}", training=training)
    return resolve_start(job), nodes


def stated_fields(asked: Sequence[str]) -> set[str]:
    """Return the fields of ``training`` that these overrides set, one by one or as a whole. Pure."""
    found: set[str] = set()
    for item in asked:
        key, _, value = item.partition("=")
        section, _, name = key.partition(".")
        if section == "training":
            found |= {name.partition(".")[0]} if name else set(json.loads(value))
    return found


def as_begun(job: JobConfig, runs: bool = False, changes: Sequence[str] = ()) -> JobConfig:
    """Return the job as it was planned if it exists already, with ``changes`` (``training.epochs=12``), and for as many
    nodes as are asked for now: its batches are divided again. A job that ``runs`` keeps its budget if no other is asked
    for. Raise `ConfigError`, which names what differs, if it was planned otherwise, and for a change that cannot be."""
    rundir, names = RunDir(job.run_dir), [change.partition("=")[0] for change in changes]
    if changes and (runs or not rundir.storage.exists("job.json")):
        remedy = "cancel it first" if runs else "give --set"
        raise ConfigError(f"--change {names[0]}: job {job.job_id} {'runs' if runs else 'was not begun'}: {remedy}")
    if not rundir.storage.exists("job.json"):
        return job
    before, asked = rundir.read_job(), job.training
    if fixed := next((name for name in names if not may_change(name)), None):
        raise ConfigError(
            f"--change {fixed}: only fields of training may change when a job continues, except {', '.join(FIXED)}: "
            "choose another --name"
        )
    same = replace(
        asked,
        world_size=before.training.world_size,
        threads_per_rank=before.training.threads_per_rank,
        max_node_seconds=before.training.max_node_seconds,
    )
    found = list_differences(json.loads(before.to_json()), json.loads(replace(job, training=same).to_json()))
    if others := {name: values for name, values in found.items() if name not in names}:
        remedies = [f"--change {name}={json.dumps(now)}" for name, (_, now) in others.items() if may_change(name)]
        differs = "; ".join(describe_difference(name, *values) for name, values in others.items())
        able = len(remedies) == len(others)
        raise ConfigError(
            f"job {job.job_id} was planned with another configuration: {differs}; "
            + (f"to continue with that, give {' '.join(remedies)}; else " if able else "")
            + "choose another --name, or repeat it as it was"
        )
    before = parse_job(before.to_json(), list(changes), "the job as it was planned", is_stored=True)
    is_named = "training.max_node_seconds" in names
    limit = before.training.max_node_seconds if is_named else asked.max_node_seconds
    if runs and limit is None:
        limit = (rundir.read_json(LIMIT) or {}).get("max_node_seconds", before.training.max_node_seconds)
    if changes and not before.is_of_script and (position := read_position(rundir)) is not None:
        samples, plan = data_of(before).samples["train"], before.training
        steps_left(samples, position[1] % samples, plan.global_batch_size, plan.micro_batches)
    return replace(before, training=replace(before.training, max_node_seconds=limit))


def runnable(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command as it will be run. Raise `ConfigError` if its program or script is missing."""
    program = command[0]
    is_python = Path(program).name.startswith("python")
    script = program if program.endswith(".py") else next(iter(command[1:]), "") if is_python else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r} in {os.getcwd()}")
    if program.endswith(".py"):
        return (sys.executable, *command)
    if shutil.which(program):
        return tuple(command)
    if program in ("python", "python3"):
        return (sys.executable, *command[1:])
    raise ConfigError(f"there is no program {program!r} on the PATH; to run a Python script: python {program}…")


def say_what_is_wrong(
    job: JobConfig, node_count: int, settings: Settings, rehearses: bool = True, script: ScriptJob | None = None
) -> None:
    """Check a training before nodes are bought, and print what could not be checked, which GPUs would be idle, and
    whether the size is retired. ``script``: what trains it, whose run up to its call of fit has checked the rest. Raise
    as `dtrain_dagster.planning.check_job.check_job` does."""
    hosts = hosts_of(settings.kind, node_count)
    has_gpus = have_gpus(settings.kind, settings.gpu_type, engine_gpus(settings))
    ranks, price = ranks_of(settings), price_of(settings.gpu_type)
    said = check_strategy(job.training, hosts, has_gpus, settings.kind.is_this_machine)
    room = room_of(settings.kind, price, node_count, ranks)
    if script is not None:
        checked = check_memory(Checked(model=script.model), job.training, room)
    else:
        others = alternatives_to(price.sku).values() if settings.kind.buys_nodes else ()
        checked = check_job(job, node_count * ranks, rehearses, hosts, has_gpus, room, others)
    say(*said, *checked.sentences, err=True)
    if settings.cluster == "azure_ml" and (retired := explain_retired(price.sku, datetime.now(UTC).date())):
        say(retired, err=True)
    hourly = node_count * price.usd_per_hour(settings.tiers[0])
    if settings.kind.buys_nodes and (idle := explain_idle_gpus(price, ranks, node_count, hourly, is_local=False)):
        say(f"in each hour: {idle}", err=True)


def script_to_go_on(settings: Settings, name: str | None) -> ScriptOrder | None:
    """Return how the job of this name was started, if a script trains it. The working directory becomes the script's
    while the command runs. Raise `Refusal` where it cannot be started again."""
    ordered = ordered_job(settings.home, name) if name and JOB_ID.fullmatch(name) else None
    if name is None or ordered is None or not ordered.is_of_script:
        return None
    order = script_of(settings.home, name)
    if order is None or script_trouble(order):
        raise Refusal(f"job {name}: {script_trouble(order)}")
    click.get_current_context().with_resource(chdir(order.folder))
    os.environ.update(environment_anywhere(os.environ, settings.home))
    return order


def order_script(
    settings: Settings,
    script: str,
    arguments: Sequence[str],
    overrides: Sequence[str],
    nodes: int | None,
    name: str | None,
) -> ScriptJob:
    """Return the training of a script on this many nodes. Raise `ConfigError` as `describe_script` does, and where its
    model does not fit into their memory."""
    if needs := describe_needs(settings.kind):
        say(f"note: {needs}", err=True)
    job_id = new_job_id(name, "train")
    ranks = (nodes or settings.nodes) * ranks_of(settings)
    threads = threads_of(settings, ranks)
    own = [f"training.world_size={ranks}", *([f"training.threads_per_rank={threads}"] if threads else [])]
    found = describe_script(
        script, arguments, [*own, *overrides], job_id, f"{settings.jobs_uri}/{job_id}", option="--script"
    )
    say_what_is_wrong(found.job, nodes or settings.nodes, settings, script=found)
    return found


def try_to_keep_script(
    settings: Settings, job_id: str, command: Sequence[str], fields: Sequence[str], nodes: int, processes_per_node: int
) -> None:
    """Keep the words with which the job's page starts it again. The nodes train already: where they cannot be kept, it
    is told."""
    _, script, *arguments = command
    order = ScriptOrder(
        script=script,
        folder=os.getcwd(),
        arguments=tuple(arguments),
        overrides=tuple(fields),
        nodes=nodes,
        processes_per_node=processes_per_node,
    )
    try:
        keep_script(settings.home, job_id, order)
    except OSError as error:
        say(f"the page of job {job_id} will not be able to resume it: {error}", err=True)

"""Write the reference pages below docs/reference from the code: ``python docs/generate_reference.py``.

The site's build and `make test` call it; the pages are not committed. Each is a pure function of the code. Prose about
a setting belongs into the docstring or description of its field; explanations of how things work belong into docs/.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import os
import re
import textwrap
import tomllib
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode

from dtrain_dagster.assets.dataset import DatasetConfig, FolderConfig, PricesConfig
from dtrain_dagster.assets.plan_options import ScriptOptions, TrainingOptions
from dtrain_dagster.assets.program import ProgramOptions
from dtrain_dagster.assets.search import SearchOptions
from dtrain_dagster.cli.main import EXIT_CODES, SECTIONS, load_command
from dtrain_dagster.cli.main import main as dtrain
from dtrain_dagster.dashboard import metrics
from dtrain_dagster.definitions import defs
from dtrain_dagster.settings.azure import AzureSettings
from dtrain_dagster.settings.environment import Settings, variable_of
from dtrain_dagster.settings.kubernetes import KubernetesSettings
from dtrain_dagster.settings.nodes import NODE, EngineSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings
from dtrain_dagster.settings.variables import OF_NODES
from trainer import config as job_config
from trainer import rundir
from trainer.documents import events

FOLDER = Path(__file__).parent / "reference"
HEADER = "<!-- Made by `python docs/generate_reference.py`; do not edit. -->\n\n"
"""The first line of each page that is made here."""
PROGRAM = "dtrain"
SETTINGS: tuple[tuple[str, str, type[BaseSettings]], ...] = (
    ("For every kind of cluster", "", Settings),
    ("Nodes of an engine", "Read with `DTRAIN_CLUSTER=slurm`, `kubernetes` and `ray`.", EngineSettings),
    ("SLURM", "Read with `DTRAIN_CLUSTER=slurm`; see [SLURM](../installing.md#slurm).", SlurmSettings),
    (
        "Kubernetes",
        "Read with `DTRAIN_CLUSTER=kubernetes`; see [Kubernetes](../installing.md#kubernetes).",
        KubernetesSettings,
    ),
    ("Ray", "Read with `DTRAIN_CLUSTER=ray`; see [Ray](../installing.md#ray).", RaySettings),
    ("Azure ML", "Read with `DTRAIN_CLUSTER=azure_ml`; see [Azure ML](../azure.md).", AzureSettings),
)
"""The sections of the page of environment variables: title, remark, class."""
LAUNCHPAD: tuple[tuple[str, type], ...] = (
    ("stock_prices", PricesConfig),
    ("sharded_dataset", DatasetConfig),
    ("sharded_dataset of a folder of your own", FolderConfig),
    ("cost_estimate", TrainingOptions),
    ("cost_estimate of a script of your own", ScriptOptions),
    ("hyperparameter_search", SearchOptions),
    ("an asset of your own that runs a program", ProgramOptions),
)
"""The assets that have options in the launchpad, and the class of these."""
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "{} characters or more"}
_USUAL = {
    "step": "Optimizer step, counted over the whole job.",
    "epoch": "Epoch, counted from 0 (people read it counted from 1).",
    "seconds": "Seconds that it took.",
    "loss": "Mean loss per sample.",
    "nodes": "Numbers of the nodes.",
    "node_id": "Number of the node.",
    "message": "What happened, in words.",
    "reason": "Why, in words.",
    "learning_rate": "Learning rate.",
    "grad_norm": "2-norm of the gradient before clipping.",
    "step_seconds": "Wall seconds of one step.",
    "eta_seconds": "Seconds until the last step, by the pace so far.",
    "memory_used_bytes": "Resident memory of the node's ranks.",
    "path": "Path in the run directory.",
}
"""What fields of events mean that have no docstring of their own."""
_ROLE = re.compile(r"``([^`]+)``")


def settings_page() -> str:
    """Return the page of environment variables."""
    text = (
        "# Environment variables\n\n"
        "These variables describe the environment: the cluster, the storage, the registry, the prices. What changes "
        "from run to run is set in the [launchpad](launchpad.md) or with `--set` ([job.json](job.md)).\n\n"
        "A value that is set and cannot be used is an error at the start. A name that nothing reads is warned of, "
        "with the name that was probably meant. Those that few people need share a variable, which takes words "
        "`name=value`, quoted as a shell does: `DTRAIN_OPTIONS=\"calendar=none preflight='quick: /opt/check'\"`. "
        "Settings are stored with everything that is made, so a value that "
        "contains a password, key, signature or the token of a web hook is refused. Give `env:NAME` or "
        "`keyvault://vault/secret` instead: it is resolved where it is used. The path of the home may contain any "
        "character but `?`, `%` and control characters, which addresses of SQLite databases cannot hold.\n"
    )
    for title, remark, kind in SETTINGS:
        rows = (
            (
                variable_of(kind, name),
                str if NoDecode in field.metadata else field.annotation,
                default_of(field),
                bounds_of(field),
                field.description or "",
            )
            for name, field in kind.model_fields.items()
            if kind is EngineSettings or not variable_of(kind, name).startswith(NODE)
        )
        text += f"\n## {title}\n\n" + (f"{remark}\n\n" if remark else "") + table(rows, name="variable")
    for title, remark, variables in plain_variables():
        lines = (
            f"| `{name}` | {cell(meaning)} | {cell(default)} |\n" for name, (meaning, default) in variables.items()
        )
        text += f"\n## {title}\n\n{remark}\n\n| variable | meaning | default |\n|---|---|---|\n"
        text += "".join(lines)
    return text


def plain_variables() -> list[tuple[str, str, dict[str, tuple[str, str]]]]:
    """Return variables that no class of settings has, by group: title, remark, and name → meaning and default."""
    remark = (
        "Set them where you start the training, or on a node: on SLURM by `setup` in `DTRAIN_SLURM_OPTIONS`, on Ray in "
        "the environment of `ray start`."
    )
    of_nodes = {name: (told.meaning, told.default) for name, told in OF_NODES.items()}
    groups = tomllib.loads((Path(__file__).parent / "variables.toml").read_text())["groups"]
    others = [(group["title"], group["remark"], group["variables"]) for group in groups]
    return [("The processes of a training", remark, of_nodes), *others]


def job_page() -> str:
    """Return the page of the fields of job.json."""
    text = (
        "# job.json: what a training is made of\n\n"
        "Every training is described by one file, `job.json`, in its run directory. `dtrain train --set "
        "training.epochs=3` changes a field for one training, `--settings FILE` several; in Dagster the launchpad of "
        "`cost_estimate` has the common ones, and `more` takes any other. An unknown field or a value out of bounds is "
        "refused before anything is bought. [job.schema.json](job.schema.json) is the same as a JSON schema, for "
        "editors.\n"
    )
    sections = (
        ("Top level", job_config.JobConfig), ("dataset", job_config.DatasetRef),
        ("model, loss", job_config.FactoryConfig), ("training", job_config.DistributedTrainingConfig),
        ("training.tls", job_config.TLSConfig), ("tracking", job_config.TrackingConfig),
    )  # fmt: skip
    for title, kind in sections:
        meanings = field_docstrings(kind)
        hints = typing.get_type_hints(kind)
        rows = (
            (name, hints[name], default_of(field), bounds_of(field), meanings.get(name, ""))
            for name, field in kind.__pydantic_fields__.items()  # type: ignore[attr-defined]
        )
        text += f"\n## {title}\n\n{plain(inspect.getdoc(kind) or '')}\n\n" + table(rows, name="field")
    return text


def launchpad_page() -> str:
    """Return the page of the options in Dagster's launchpad."""
    text = (
        "# Launchpad: the options of the assets\n\n"
        "In Dagster's UI: *Materialize* with the arrow beside it, then *Open launchpad*. On the command line: "
        '`dagster asset materialize … --config-json \'{"ops": {"cost_estimate": {"config": {"epochs": 3}}}}\'`. '
        "Values out of bounds are refused when the step begins, before anything is bought.\n"
    )
    for asset, kind in LAUNCHPAD:
        rows = (
            (name, field.annotation, default_of(field), bounds_of(field), without_bounds(field.description or ""))
            for name, field in kind.model_fields.items()  # type: ignore[attr-defined]
        )
        text += f"\n## {asset}\n\n" + table(rows, name="option")
    return text


def run_directory_page() -> str:
    """Return the page of the files and events of a run directory."""
    layout = textwrap.dedent((rundir.__doc__ or "").split("\n\n")[1])
    text = (
        "# Run directory: files and events\n\n"
        "A job's folder is all that the orchestrator and the nodes share. It may lie on a disk, on a shared file "
        "system or in Blob storage. Each file is written whole; readers of a newer version read files of older ones. "
        "The reasons for this design: [Architecture](../architecture.md).\n\n"
        f"```text\n{plain(layout).rstrip()}\n```\n\n"
        "Beside these, where they apply: `plan.json` (the plan with its estimate), `model/` (the trained model), "
        "`reports/` (what the pages of assets show, as files), `tensorboard/`, `tracking.json` (the run in MLflow), "
        "`registration.json` (the version in the registry), and what people were told: `alerts.json`, "
        "`cost_alerts.json`, `notices/`.\n\n"
        "A *generation* counts the worlds of ranks that worked in the directory: 1 for the first, one more for each "
        "restart or change of members.\n\n"
        "## Events\n\n"
        "`events/*.jsonl` holds one JSON object per line. All have `kind`, `time` (Unix seconds), `rank` and "
        "`generation`; the other fields by kind:\n"
    )
    for kind in event_kinds():
        meanings = defaultdict(str, _USUAL) | {
            name: said for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)
            for name, said in field_docstrings(base).items()
        }  # fmt: skip
        hints = typing.get_type_hints(kind)
        rows = (
            (field.name, hints[field.name], default_of(field), "", meanings[field.name])
            for field in dataclasses.fields(kind)
            if field.name not in ("time", "rank", "generation")
        )
        text += f"\n### {kind.kind}\n\n{plain(inspect.getdoc(kind) or '')}\n\n" + table(rows, name="field")
    return text + (
        "\n### communication_error\n\n"
        "For people: communication has failed, as one rank saw it (`step`, `attempt`, `operation`, `waited_seconds`, "
        "`error`, `peers`).\n"
    )


def graph_page() -> str:
    """Return the page of the graph: its assets with their checks, its jobs, schedules and sensors."""
    graph = defs.resolve_asset_graph()
    text = (
        "# The graph: assets, checks, schedules, sensors\n\n"
        "`make run` and the job `train` materialize all groups but `studies`, whose assets are made on demand. A "
        "check that is *blocking* stops what comes after it; any other is a warning. Options of assets are on the page "
        "[Launchpad](launchpad.md).\n\n![The graph in Dagster](../pictures/lineage.png)\n"
    )
    for group in ("data", "planning", "training", "registry", "reporting", "studies"):
        text += f"\n## Group {group}\n"
        for key in graph.toposorted_asset_keys:
            node = graph.get(key)
            if node.group_name == group:
                checks = sorted(graph.get(check).key for check in node.check_keys)
                lines = [
                    f"| `{check.name}` | {cell(graph.get(check).description or '')} |"
                    f" {'yes' if graph.get(check).blocking else ''} |\n"
                    for check in checks
                ]
                said = f"\n| check | what it demands | blocking |\n|---|---|---|\n{''.join(lines)}" if lines else ""
                text += f"\n### {key.to_user_string()}\n\n{plain(inspect.cleandoc(node.description or ''))}\n{said}"
    jobs = [(job.name, "", job.description) for job in defs.jobs or ()]
    schedules = [(item.name, _status(item.default_status), item.description) for item in defs.schedules or ()]
    sensors = [(item.name, _status(item.default_status), item.description) for item in defs.sensors or ()]
    for title, items in (("Jobs", jobs), ("Schedules", schedules), ("Sensors", sensors)):
        heads = ("name", "what it does") if title == "Jobs" else ("name", "at first", "what it does")
        head = f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
        rows = (f"| `{name}` | {f'{at} | ' if at else ''}{cell(said or '')} |\n" for name, at, said in items)
        text += f"\n## {title}\n\n{head}{''.join(rows)}"
    return text


def _status(status: Enum) -> str:
    return "on" if status.value == "RUNNING" else "off"


def metrics_page() -> str:
    """Return the page of the metrics for Prometheus."""
    text = (
        "# Metrics for Prometheus\n\n"
        "`dtrain ui jobs` serves them at `/metrics`, for jobs that run or ended within the last hour. How to collect "
        "and draw them: [Watching a training](../monitoring.md).\n\n"
        "| metric | labels | meaning |\n|---|---|---|\n"
        "| `dtrain_job_info` | `job`, `model`, `state` | 1; the labels tell what the job is and how it stands |\n"
    )
    counters = {name: (about, ()) for name, (about, _) in metrics.COUNTER_METRICS.items()}
    gauges = {name: (about, own) for name, (about, own, _) in metrics.METRICS.items()}
    for name, (about, own) in {**gauges, **counters}.items():
        text += f"| `{name}` | {', '.join(f'`{label}`' for label in ('job', *own))} | {about} |\n"
    return text


def job_schema() -> str:
    """Return the JSON schema of job.json."""
    schema = TypeAdapter(job_config.JobConfig).json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def event_kinds() -> list[type[events.Event]]:
    """Return the classes of events, in the order of the file that defines them."""
    found = (value for value in vars(events).values() if isinstance(value, type) and issubclass(value, events.Event))
    return [kind for kind in found if "kind" in vars(kind)]


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the text below each field of a class, by the field's name. A class of another language has none."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        line.target.id: " ".join(said.value.value.split())
        for line, said in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    }  # fmt: skip


def table(rows: Iterable[tuple[str, Any, str, str, str]], name: str) -> str:
    """Return a Markdown table of fields: name, meaning, type with bounds, default; no column that is empty."""
    lines = [
        (f"`{key}`", cell(meaning), ", ".join(filter(None, (type_name(kind), bounds))), default)
        for key, kind, default, bounds, meaning in rows
    ]
    heads = (name, "meaning", "type and bounds", "default")
    if not lines:
        return "No further fields.\n"
    kept = [place for place in range(len(heads)) if any(line[place] for line in lines)]
    text = "| " + " | ".join(heads[place] for place in kept) + " |\n|" + "---|" * len(kept) + "\n"
    return text + "".join("| " + " | ".join(line[place] for place in kept) + " |\n" for line in lines)


def type_name(kind: Any) -> str:
    """Return a type as a reader would say it: ``int``, or the values of an enumeration."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{item.value}`" for item in kind)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{item}`" for item in typing.get_args(kind))
    if parts := [part for part in typing.get_args(kind) if part is not type(None)]:
        origin = typing.get_origin(kind)
        if type(None) in typing.get_args(kind):
            return " or ".join(map(type_name, parts)) + ", or empty"
        if origin in (dict, Mapping):
            return "object"
        if isinstance(origin, type) and issubclass(origin, Iterable):
            return "list"
        return " or ".join(map(type_name, parts))
    words = {"str": "text", "bool": "`true`, `false`", "int": "whole number", "float": "number", "Path": "path"}
    return words.get(getattr(kind, "__name__", ""), "object")


def default_of(field: FieldInfo | dataclasses.Field[Any]) -> str:
    """Return a field's default as code; "required" where it has none, "" where it is empty."""
    if isinstance(field, FieldInfo):
        if field.is_required():
            return "required"
        value = field.get_default(call_default_factory=False) if field.default_factory is None else None
    else:
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            return "required"
        value = field.default if field.default is not dataclasses.MISSING else None
    if isinstance(value, Enum):
        value = value.value
    if value is None or value == "" or value == {} or value == ():
        return ""
    return f"`{value if isinstance(value, str | Path) else json.dumps(value)}`"


def bounds_of(field: FieldInfo) -> str:
    """Return the bounds of a field in signs, "" where it has none; "finite" is not told."""
    found = ((sign, getattr(item, key, None)) for item in field.metadata for key, sign in _BOUNDS.items())
    return ", ".join(sign.format(f"{limit:g}") for sign, limit in found if limit is not None and limit < math.inf)


def without_bounds(description: str) -> str:
    """Return a description of the launchpad without the bounds that were put at its end, as they have a column."""
    return re.sub(r" \((?:(?:at least|more than|at most|less than) [^()]*)\)\.$", ".", description)


def plain(text: str) -> str:
    """Return a docstring as Markdown: literals in single backquotes."""
    return _ROLE.sub(r"`\1`", text)


def cell(text: str) -> str:
    """Return a docstring as one cell of a Markdown table."""
    return " ".join(plain(text).replace("|", "\\|").split())


def describe_commands() -> str:
    """Return the reference: one section per command, in the order of ``dtrain --help``."""
    parts = [introduction()]
    for commands in SECTIONS.values():
        parts += [describe_command(f"{PROGRAM} {name}", load_command(name)) for name in commands]
    return "\n".join(parts)


def describe_command(words: str, command: click.Command) -> str:
    """Return the section of one command. Pure."""
    text, examples = split_help(command)
    context = click.Context(command, info_name=words)
    lines = [
        f"## {words}",
        "",
        text,
        "",
        "```text",
        " ".join([words, *command.collect_usage_pieces(context)]),
        "```",
        "",
    ]
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    rows = [describe_option(option, context) for option in options if not option.hidden and "--help" not in option.opts]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    for title, block in examples:
        lines += [f"{title}:", "", "```sh" if title == "Examples" else "```text", block, "```", ""]
    if any("--json" in option.opts for option in options):
        lines += [f"Fields of `--json`: [{words}](../json.md#{words.replace(' ', '-')}).", ""]
    return "\n".join(lines)


def split_help(command: click.Command) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a command's help as paragraphs, and its blocks, such as the examples, as (title, text).
    Pure."""
    paragraphs, blocks = [], []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        if part.startswith("\b\n"):
            title, _, block = part.removeprefix("\b\n").partition("\n")
            blocks.append((title.rstrip(":"), textwrap.dedent(block).rstrip()))
        else:
            paragraphs.append(" ".join(part.split()))
    return "\n\n".join(paragraphs), blocks


def describe_option(option: click.Option, context: click.Context) -> str:
    """Return a row of the table of options. Pure."""
    name = ", ".join(sorted((*option.opts, *option.secondary_opts), key=len, reverse=True))
    metavar = "" if option.is_flag or option.count else f" {command_code(option.make_metavar(context))}"
    said, stated = split_default(option)
    default = command_cell(stated)
    if not default and option.required:
        default = "required"
    elif not default and option.show_default and not option.is_flag:
        default = f"`{command_code(str(option.get_default(context)))}`"
    bounds = option_bounds(option)
    return f"| `{name}{metavar}` | {default} | {command_cell(said)}{bounds} |"


def split_default(option: click.Option) -> tuple[str, str]:
    """Return the meaning of an option, and the default that its help states in words, "" for none. Pure."""
    found = re.search(r"\s*\[default: (.*)\]$", option.help or "")
    return ((option.help or "")[: found.start()], found[1]) if found else (option.help or "", "")


def option_bounds(option: click.Option) -> str:
    """Return the bounds of an option's number in words, "" for none."""
    kind = option.type
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    if kind.min is not None and kind.max is not None:
        return f" From {kind.min:g} to {kind.max:g}."
    return f" At least {kind.min:g}." if kind.min is not None else f" At most {kind.max:g}."


def command_cell(text: str) -> str:
    """Return a text for a cell of a table of Markdown."""
    return command_code(text).replace("*", "\\*").replace("<", "&lt;")


def command_code(text: str) -> str:
    """Return a text for code within a cell of a table of Markdown."""
    return " ".join(text.split()).replace("|", "\\|")


def introduction() -> str:
    """Return what precedes the sections of the commands."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    listed = "\n\n".join(
        f"{title}: " + ", ".join(f"[`{PROGRAM} {name}`](#{PROGRAM}-{name})" for name in commands)
        for title, commands in SECTIONS.items()
    )
    return (
        f"{split_help(dtrain)[0]}\n\n{listed}\n\n| exit code | meaning |\n|---|---|\n{codes}\n\n"
        "`train` and `launch` end with the code of the process that failed first. Its fields: [what "
        "`--json` prints](../json.md).\n"
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "job.md": job_page,
    "launchpad.md": launchpad_page,
    "graph.md": graph_page,
    "run-directory.md": run_directory_page,
    "commands.md": lambda: f"# Commands\n\n{describe_commands()}",
    "metrics.md": metrics_page,
}
"""The pages that are made here."""


def made() -> dict[str, str]:
    """Return the content of all files that are made here, by name below docs/reference."""
    return {**{name: HEADER + page() for name, page in PAGES.items()}, "job.schema.json": job_schema()}


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in made().items():
        unfinished = FOLDER / f".{name}.{os.getpid()}"
        unfinished.write_text(text)
        unfinished.replace(FOLDER / name)  # whole or not at all, for who reads it at the same time


if __name__ == "__main__":
    main()

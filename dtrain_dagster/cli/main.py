"""`dtrain`: the cluster from a shell, whichever kind it is. A command's module is imported when it is called, so that
``--help`` answers at once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

SECTIONS = {
    "Train": {
        "init": "Make a project of your own in FOLDER, by default in this one.",
        "data": "Build a dataset of rows from Parquet or CSV files.",
        "train": "Train a model on N nodes, without Dagster.",
        "tune": "Measure which settings train this model fastest.",
        "search": "Search hyperparameters, on as many nodes as there are.",
        "launch": "Run a script of your own on N nodes of the cluster.",
        "fleet": "Train many models under one budget.",
        "cancel": "Stop a job or a fleet after it has written a checkpoint.",
    },
    "See what runs, and what it cost": {
        "jobs": "List the jobs of the cluster, newest first.",
        "status": "Show the state of a job or a fleet, and the result of a training.",
        "logs": "Print the output of a job's processes.",
        "cost": "Show what a job or a fleet has cost, and what for.",
        "ui": "Serve pages in a browser, for this machine alone.",
    },
    "Before the first job": {"doctor": "Tell whether the cluster can train; buy nothing."},
}
"""Title → command → what it does, in the order of help: by what a person wants to do, and not by the alphabet."""
MODULES = {"cancel": "jobs", "status": "jobs", "logs": "jobs", "launch": "train"}
"""Command → its module, where that has another name."""
EXIT_CODES = {
    0: "done; of a command that follows a job: the job has succeeded",
    1: "the job has failed, or a check has not passed, and the last lines say why; also a question that was answered "
    "with no",
    2: "refused: the request cannot be carried out, nothing was begun, and the message says what to do instead",
    130: "ended by Ctrl-C",
    143: "ended by SIGTERM",
}
"""Code → meaning, the same for every command. `train` and `launch` end with the code of the process that failed
first."""


def load_command(name: str) -> click.Command:
    """Return one of the commands in `SECTIONS`, whose module is imported."""
    return getattr(import_module(f"dtrain_dagster.cli.{MODULES.get(name, name)}"), name)


RETIRED = {
    "watch": "dtrain status JOB --follow",
    "summary": "dtrain status [JOB]",
    "report": "dtrain status JOB --html FILE",
    "profile": "dtrain status JOB --trace",
    "nodes": "dtrain status --nodes, and dtrain status --lift HOST",
    "searches": "dtrain jobs --fleets, or dtrain search --show NAME",
    "fleet run": "dtrain fleet FILE",
    "fleet status": "dtrain jobs --fleets, or dtrain status NAME",
    "fleet cancel": "dtrain cancel NAME",
    "fleet cost": "dtrain cost NAME",
    "data rows": "dtrain data SOURCE",
    "dashboard": "dtrain ui jobs",
    "mlflow": "dtrain ui mlflow",
    "tensorboard": "tensorboard --logdir .dtrain/storage/jobs",
    "prices": "dtrain cost, with --sku SKU, --region REGION or --refresh",
    "kubernetes train-job": "DTRAIN_CLUSTER=kubernetes dtrain train",
    "azure": "dtrain doctor",
    "slurm": "dtrain doctor",
    "kubernetes": "dtrain doctor",
    "ray": "dtrain doctor",
    "endpoint": "python -m dtrain_dagster.registry.endpoints check",
    "setup": "python -m dtrain_dagster setup",
    "work": "python -m dtrain_dagster work COMMAND",
    "clean": "python -m dtrain_dagster clean",
    "completion": "_DTRAIN_COMPLETE=bash_source dtrain, or zsh_source or fish_source",
}
"""What older versions had → what is typed instead. To be removed with the version after the next release."""


class LazyGroup(click.Group):
    """The group of all commands, whose help lists them in `SECTIONS`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the command, whose ``obj`` is its words as they were typed."""
        return super().make_context(info_name, args, parent, obj=list(args), **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [name for commands in SECTIONS.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, None where there is none."""
        return load_command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. Raise `click.UsageError` for one of `RETIRED`, with what takes its place."""
        for words in (" ".join(args[:2]), args[0]):
            if words in RETIRED:
                raise click.UsageError(f"`dtrain {words}` is now: {RETIRED[words]}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with what was typed, or the options."""
        names = {name: help_text for commands in SECTIONS.values() for name, help_text in commands.items()}
        found = [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(incomplete)]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section."""
        width = max(map(len, self.list_commands(ctx)))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(f"{code:<3}", meaning) for code, meaning in EXIT_CODES.items()])
        formatter.write_paragraph()
        formatter.write_text("train and launch end with the code of the process that failed first.")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="dtrain", message="%(prog)s %(version)s", help="Print the version and exit.")
@click.pass_context
def main(context: click.Context) -> None:
    """Run distributed trainings on the cluster, follow them, and stop them.

    On the local cluster a node is a group of processes on this machine. With DTRAIN_CLUSTER=azure_ml nodes are Azure
    ML's. A job outlives the shell that started it; everything about it is in its run directory, in
    DTRAIN_HOME/storage/jobs or DTRAIN_STORAGE/jobs. Unless it is set, DTRAIN_HOME is the folder .dtrain of the working
    directory, or of the nearest folder above it that has one.

    JOB is the name of a job, the beginning of it that no other job shares, or `latest`, the job that was started last.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())

"""`dtrain`: the cluster from a shell, whichever kind it is. Each command imports what it needs, so that ``--help``
answers at once."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import FishComplete, add_completion_class

from dtrain_dagster.cli.cost import cost
from dtrain_dagster.cli.data import data
from dtrain_dagster.cli.doctor import doctor
from dtrain_dagster.cli.fleet import fleet
from dtrain_dagster.cli.init import init
from dtrain_dagster.cli.jobs import cancel, jobs, logs, status
from dtrain_dagster.cli.launch import launch
from dtrain_dagster.cli.search import search
from dtrain_dagster.cli.start import ARGUMENTS
from dtrain_dagster.cli.train import train
from dtrain_dagster.cli.tune import tune
from dtrain_dagster.cli.ui import ui

SECTIONS = {
    "Train": (init, data, train, tune, search, launch, fleet, cancel),
    "See what runs, and what it cost": (jobs, status, logs, cost, ui),
    "Before the first job": (doctor,),
}
"""Title → commands, in the order of help: by what a person wants to do, and not by the alphabet."""
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
SHORT_HELP = """\
dtrain trains PyTorch models on GPU clusters, and says what they cost.

  dtrain train --dataset latest --nodes 3   train, and follow it; Ctrl-C cancels
  dtrain jobs                               list the jobs, newest first
  dtrain status latest --follow             follow the newest job
  dtrain cost latest                        what it cost, and what for
  dtrain ui jobs                            see all jobs live in a browser

Where a job is asked for, the beginning of its name is enough, or `latest`.
`dtrain --help` lists all commands, `dtrain COMMAND --help` explains one.
"""
RETIRED = {
    "watch": "dtrain status JOB --follow",
    "summary": "dtrain status [JOB]",
    "report": "dtrain status JOB --html FILE",
    "profile": "dtrain status JOB --trace",
    "searches": "dtrain search, or dtrain search --show NAME",
    "fleet run": "dtrain fleet FILE",
    "fleet status": "dtrain jobs --fleets, or dtrain status NAME",
    "fleet cancel": "dtrain cancel NAME",
    "fleet cost": "dtrain cost NAME",
    "data rows": "dtrain data SOURCE",
    "dashboard": "dtrain ui jobs",
    "mlflow": "dtrain ui mlflow",
    "tensorboard": "dtrain ui tensorboard",
    "prices": "dtrain cost, with --sku SKU, --region REGION or --refresh",
    "slurm account": "dtrain cost JOB",
    "kubernetes train-job": "DTRAIN_CLUSTER=kubernetes dtrain train",
    "azure": "dtrain doctor",
    "slurm": "dtrain doctor",
    "kubernetes": "dtrain doctor",
    "ray": "dtrain doctor",
    "endpoint": "python -m dtrain_dagster.registry.endpoints check, deploy or delete",
    "setup": "python -m dtrain_dagster setup",
    "work": "python -m dtrain_dagster work COMMAND",
    "clean": "python -m dtrain_dagster clean",
    "completion": "_DTRAIN_COMPLETE=bash_source dtrain, or zsh_source or fish_source",
}
"""What older versions had → what is typed instead. To be removed with the version after the next release."""


@add_completion_class
class WholeDescriptions(FishComplete):
    """Completion in fish with descriptions that may have commas: click's takes what stands before the first one."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


class SectionedGroup(click.Group):
    """The group of all commands, whose help lists them in `SECTIONS`. Without a command it prints `SHORT_HELP`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the command, which knows its words as they were typed."""
        typed = list(args)
        context = super().make_context(info_name, args, parent, **extra)
        context.meta[ARGUMENTS] = typed
        return context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. Raise `click.UsageError` for one of `RETIRED`, with what takes its place."""
        for words in (" ".join(args[:2]), args[0]):
            if words in RETIRED:
                raise click.UsageError(f"`dtrain {words}` is now: {RETIRED[words]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section, with the whole first sentence of each."""
        width = max(map(len, self.commands), default=0)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (str(each.name).ljust(width), each.get_short_help_str(formatter.width - width - 6))
                        for each in commands
                    ]
                )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(f"{code:<3}", meaning) for code, meaning in EXIT_CODES.items()])
        formatter.write_paragraph()
        formatter.write_text("train and launch end with the code of the process that failed first.")


@click.group(
    cls=SectionedGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    commands=[command for commands in SECTIONS.values() for command in commands],
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
        click.echo(SHORT_HELP, nl=False)

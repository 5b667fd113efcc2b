"""The groups of commands: the order in which ``dtrain --help`` lists them, by what a person wants to do and not by the
alphabet, and the form of every help. What a command does is told by itself."""

from __future__ import annotations

from typing import Any

import click

from dtrain_dagster.cli.going_on import ARGUMENTS

SECTIONS = {
    "Train": ("init", "data", "train", "tune", "search", "launch", "fleet", "cancel"),
    "See what runs": ("jobs", "status", "watch", "logs", "dashboard"),
    "Understand what it did and cost": ("summary", "cost", "searches", "profile", "report"),
    "Pages and endpoints": ("ui", "mlflow", "tensorboard", "endpoint"),
    "Prices, clouds and the home": ("prices", "azure", "kubernetes", "slurm", "ray", "setup", "work", "clean"),
    "This program": ("completion",),
}
"""Title → commands, in order of help. Each command stands in one section."""
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
  dtrain watch latest                       follow the newest job
  dtrain cost latest                        what it cost, and what for
  dtrain dashboard                          see all jobs live in a browser

Where a job is asked for, the beginning of its name is enough, or `latest`.
`dtrain --help` lists all commands, `dtrain COMMAND --help` explains one.
"""


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section, with the whole first sentence of each."""
        width = max(map(len, self.commands), default=0)
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - width - 6))
                        for name in names
                    ]
                )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(f"{code:<3}", meaning) for code, meaning in EXIT_CODES.items()])
        formatter.write_paragraph()
        formatter.write_text("train and launch end with the code of the process that failed first.")

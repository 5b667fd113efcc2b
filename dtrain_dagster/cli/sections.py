"""The order in which ``dtrain --help`` lists its commands: by what a person wants to do, not by the alphabet. What a
command does is told by itself."""

from __future__ import annotations

import click

SECTIONS = {
    "Train": ("init", "data", "train", "tune", "search", "launch", "fleet", "cancel"),
    "See what runs": ("jobs", "status", "watch", "logs", "dashboard"),
    "Understand what it did and cost": ("summary", "cost", "profile", "report"),
    "Pages and endpoints": ("ui", "mlflow", "tensorboard", "endpoint"),
    "Prices, clouds and the home": ("prices", "azure", "kubernetes", "slurm", "ray", "setup", "work", "clean"),
}
"""Title → commands, in order of help. Each command stands in one section."""


class SectionedGroup(click.Group):
    """A group of commands whose help lists them in `SECTIONS`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section, with the whole first sentence of each where it fits into a line."""
        width = max(map(len, self.commands), default=0)
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - width - 6))
                        for name in names
                    ]
                )

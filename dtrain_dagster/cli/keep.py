"""``--keep-failed``: nodes that fail are left in place for a person, where a cluster can do that."""

from __future__ import annotations

from collections.abc import Callable

import click

from dtrain_dagster.cli.common import Refusal, say
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration, seconds_of

MOST_SECONDS = 86400.0
"""The longest time for which nodes are kept: one that is forgotten is paid for."""


class _Duration(click.ParamType):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            seconds = seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds > MOST_SECONDS:
            self.fail(f"{value!r} is more than {format_duration(MOST_SECONDS)}: give less", param, ctx)
        return seconds


def keep_failed_option(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the option, which it gets as ``keep_failed_seconds``; 0 where it was not given."""
    return click.option(
        "--keep-failed",
        "keep_failed_seconds",
        type=_Duration(),
        default=0.0,
        metavar="30m",
        help="Keep nodes whose processes fail for that long, to look into; they are paid for.",
    )(command)


def refuse_to_keep(settings: Settings, seconds: float) -> None:
    """Raise `Refusal` where nodes of this kind of cluster cannot be kept; say so where there is nothing to keep."""
    if not seconds:
        return
    if settings.kind.buys_nodes:
        raise Refusal(
            f"--keep-failed: the {settings.kind.words} takes its nodes back as soon as their processes have ended. "
            "Enter a job that runs from its page in the studio, or train on slurm, kubernetes or ray"
        )
    if settings.kind.is_this_machine:
        say(f"--keep-failed: the nodes are this machine, so none is kept: look into {settings.jobs_uri}", err=True)

"""The parts that the commands of `dtrain` share: refusals, the cluster that the settings name, the terminal, and the
option ``--json``: one document on standard output, or one on each line, whose fields are stable (docs/json.md)."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from dtrain_dagster.cli.screen import Screen
from dtrain_dagster.clusters.ranks import ranks_per_node
from dtrain_dagster.settings.engines import engine_gpus
from dtrain_dagster.settings.environment import Settings, load_settings
from dtrain_dagster.settings.variables import warn_of_variables
from trainer.documents.places import PlaceError, checked_id
from trainer.printable import visible
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.clusters.base import GPUClusterManager
    from dtrain_dagster.configuration import ClusterConfiguration, ProjectConfiguration

EXIT_UNUSABLE, EXIT_INTERRUPTED, EXIT_STOPPED = 2, 130, 143
PIPE_COLUMNS = 10_000
"""The columns of a pipe or file, which has no width: what a program reads is neither wrapped nor left out."""
TROUBLE = (ValueError, RuntimeError, OSError)
"""The kinds of all errors that a user can cause, or that a service or a storage reports."""
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Errors of files that do not say of which."""
OWN_PACKAGES = ("dtrain_dagster", "trainer")


class Refusal(click.ClickException):
    """An error that ends a command: the request cannot be carried out. The message says why and what to do instead."""

    exit_code = EXIT_UNUSABLE

    def format_message(self) -> str:
        """Return the message without control characters."""
        return visible(super().format_message(), keep_lines=True)


def say(*texts: object, err: bool = False) -> None:
    """Print lines. Control characters are made visible."""
    for text in texts:
        click.echo(visible(str(text), keep_lines=True), err=err)


def refuses(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that ends with `Refusal` for errors that a user can cause, or that a service or a storage
    reports, and on Ctrl-C with `EXIT_INTERRUPTED`."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except TROUBLE as error:
            if type(error).__module__.partition(".")[0] in OWN_PACKAGES:  # whose errors are sentences for a person
                raise Refusal(str(error)) from None
            if isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_TROUBLE):
                where = error.filename2 or error.filename or "a file"
                raise Refusal(
                    f"{where} cannot be read or written ({error.strerror or error}); check that DTRAIN_HOME names an "
                    "existing folder that can be written and has room"
                ) from None
            raise
        except KeyboardInterrupt:  # a command that has begun a job says itself what became of it
            say(f"{click.get_current_context().command_path}: ended by Ctrl-C", err=True)
            sys.exit(EXIT_INTERRUPTED)

    return run


def read_settings(processes_per_node: int | None = None, nodes: int | None = None) -> Settings:
    """Return the settings of the environment; options of the command come first."""
    settings = load_settings()
    warn_of_variables()
    given = {"processes_per_node": processes_per_node, "nodes": nodes}
    return settings.model_copy(update={name: value for name, value in given.items() if value})


def ranks_of(settings: Settings) -> int:
    """Return the ranks of each node. Raise `PriceError` for an unknown SKU."""
    gpus = engine_gpus(settings)
    return ranks_per_node(settings.processes_per_node, settings.kind, settings.gpu_type, settings.nodes, gpus)


def cluster_of(settings: Settings) -> tuple[ClusterConfiguration, ProjectConfiguration]:
    """Return what the resources of assets are made of, so that a shell and Dagster see one cluster. No request is made
    before the manager is used."""
    from dtrain_dagster.configuration import read_configuration  # not above: completion needs no cluster

    return read_configuration(settings)


def manager_of(settings: Settings) -> GPUClusterManager:
    """Return the manager of the settings' cluster, for who only looks at jobs or ends them."""
    return cluster_of(settings)[0].manager()


def run_dir(settings: Settings, job_id: str) -> RunDir:
    """Return the run directory of a job, wherever the cluster keeps it. Raise `Refusal` for an invalid id: it becomes
    part of a path."""
    try:
        checked_id(job_id, "the name of the job")
    except PlaceError as error:
        raise Refusal(f"{error}; `dtrain jobs` lists them") from None
    return RunDir(f"{settings.jobs_uri}/{job_id}")


def console() -> Console:
    """Return the console to print to."""
    made = Screen()
    return made if made.is_terminal else Screen(width=PIPE_COLUMNS)


def gathers(kind: type[Any], name: str, *options: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives a command these options, whose values it gets together: as ``name``, a dataclass of this
    ``kind``, which has a field for each."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            own = {field.name: given.pop(field.name) for field in fields(kind)}
            command(**{name: kind(**own)}, **given)

        for option in reversed(options):
            run = option(run)
        return run

    return decorate


def json_option(help_text: str = "Print one JSON document instead.") -> Callable[..., Any]:
    """Return the option ``--json`` (parameter ``as_json``)."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print a document. Numbers that JSON does not have (NaN, infinity) are null. ``indent``: None prints one line."""
    click.echo(json.dumps(_finite(document), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

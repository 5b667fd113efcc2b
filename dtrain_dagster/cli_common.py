"""What the commands of `dtrain` share: refusals, the cluster that the settings name, the terminal.

Nothing is imported here before it is needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from dtrain_dagster.resources import GPUClusterResource, ProjectResource
    from dtrain_dagster.settings import Settings
    from trainer.rundir import RunDir

EXIT_UNUSABLE, EXIT_INTERRUPTED, EXIT_STOPPED = 2, 130, 143


class Refusal(click.ClickException):
    """What was asked for cannot be done; the message says why and what to do instead."""

    exit_code = EXIT_UNUSABLE


def refuses(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that a user can cause, and what a service or a storage refuses, end the command with their message."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (ValueError, RuntimeError, OSError) as error:  # kinds of which all these are
            if not isinstance(error, _expected()):
                raise
            raise Refusal(str(error)) from None

    return run


def _expected() -> tuple[type[Exception], ...]:
    from dtrain_dagster.clusters.base import ClusterError
    from dtrain_dagster.costs.prices import PriceError
    from dtrain_dagster.data.errors import DataError
    from dtrain_dagster.registry.answers import AnswerError
    from dtrain_dagster.registry.versions import RegistryError
    from dtrain_dagster.secrets import SecretError
    from dtrain_dagster.settings import SettingsError
    from trainer.config import ConfigError
    from trainer.storage import StorageError

    return (
        *(ClusterError, ConfigError, DataError, PriceError, SettingsError, SecretError),
        *(RegistryError, AnswerError, StorageError),
    )


def read_settings(processes_per_node: int | None = None) -> Settings:
    """Of the environment; an option of the command comes first."""
    from dtrain_dagster.settings import load_settings

    settings = load_settings()
    return settings.model_copy(update={"processes_per_node": processes_per_node}) if processes_per_node else settings


def cluster_of(settings: Settings) -> tuple[GPUClusterResource, ProjectResource]:
    """What assets get, so that a shell and Dagster see one cluster. Nobody is asked before its manager is used."""
    from dtrain_dagster.resources import build_resources

    resources: dict[str, Any] = build_resources(settings)
    return resources["cluster"], resources["project"]


def run_dir(settings: Settings, job_id: str) -> RunDir:
    """Of a job, wherever the cluster keeps it."""
    from trainer.rundir import RunDir

    return RunDir(f"{settings.jobs_uri}/{job_id}")


def console() -> Console:
    from rich.console import Console

    made = Console()
    return made if made.is_terminal else Console(width=160)  # a pipe has no width of its own


def print_summary(rundir: RunDir) -> None:
    from dtrain_dagster.summary import summary_lines
    from dtrain_dagster.terminal import pairs_table

    console().print(pairs_table(summary_lines(rundir)), highlight=False)

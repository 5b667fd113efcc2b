"""How a job is named on the command line: by its name, by the beginning of it that no other job shares, or as
``latest``; and the completion of such names in a shell.

Names of fleets and searches are found in the same way; datasets are completed here as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from dtrain_dagster.cli.common import Refusal, manager_of, run_dir
from dtrain_dagster.cli.screen import name_some
from dtrain_dagster.fleet.records import fleet_names
from dtrain_dagster.jobs.orders import ordered_jobs
from dtrain_dagster.search.results import search_names
from dtrain_dagster.settings.environment import Settings, SettingsError, load_settings
from trainer.rundir import JOB, LAUNCH
from trainer.storage.open import open_storage

LATEST = "latest"
"""The word for the job that was started last."""
MOST_NAMED = 6
"""Candidates that an error names."""


def resolve_name(given: str, names: Sequence[str], kind: str, listed_by: str) -> str:
    """Return the name that is meant: the given one if it is there, else the only one that begins with it. Raise
    `Refusal`, which lists the candidates, where there is none or more than one. ``kind``: what is named, such as job;
    ``listed_by``: the command that lists all. Pure."""
    found = [given] if given in names else [name for name in names if given and name.startswith(given)]
    if len(found) == 1:
        return found[0]
    named = name_some(found or names, MOST_NAMED)
    if found:
        raise Refusal(f"{given!r} begins {len(found)} names: {named}; give more of the name")
    if not names:
        raise Refusal(f"no {kind} {given!r}: there is none yet; `{listed_by}` lists them")
    close = difflib.get_close_matches(given, names, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are {named}"
    raise Refusal(f"no {kind} {given!r}; {meant} (`{listed_by}` lists them)")


def find_job(settings: Settings, given: str, fleets: Sequence[str] = ()) -> str:
    """Return the name of the job that is meant, or of one of the ``fleets``. Of a fleet and its jobs, whose names begin
    with its own, the fleet is meant. Raise `Refusal` where there is no such name, or more than one."""
    if _is_job(settings, given):
        return given
    if given == LATEST:
        jobs = manager_of(settings).list_jobs()
        if not jobs:
            raise Refusal(f"{LATEST}: there are no jobs in {settings.jobs_uri} yet")
        return jobs[0].job_id

    of_fleets = tuple(f"{name}-" for name in fleets if given and name.startswith(given))
    names = [name for name in open_storage(settings.jobs_uri).list() if not name.startswith(of_fleets)]
    return resolve_name(given, sorted({*names, *fleets}), "job", "dtrain jobs")


def _is_job(settings: Settings, name: str) -> bool:
    """Return whether there is a job of exactly this name. Raise `Refusal` for what can be no name."""
    storage = run_dir(settings, name).storage
    return any(storage.exists(file) for file in (JOB, LAUNCH))


def find_training(settings: Settings, given: str) -> str:
    """Return the id of the training that is meant. Raise `Refusal` for a job that is no training, and as `find_job`."""
    job_id = find_job(settings, given)
    if not run_dir(settings, job_id).storage.exists(JOB):
        raise Refusal(f"job {job_id} is not a training, but a program of `dtrain launch`: see `dtrain logs {job_id}`")
    return job_id


def find_job_or_fleet(settings: Settings, given: str) -> tuple[str, bool]:
    """Return the name of the job or fleet that is meant, and whether it is a fleet. Raise as `find_job`."""
    fleets = fleet_names(settings.home)
    name = find_job(settings, given, fleets)
    return name, name in fleets and not _is_job(settings, name)


def named_argument(required: bool = True) -> Callable[..., Any]:
    """Return the argument that names a job or a fleet."""
    return click.argument(
        "name", metavar="NAME" if required else "[NAME]", required=required, shell_complete=complete_jobs_and_fleets
    )


def completes(
    list_names: Callable[[Settings], Sequence[str]], or_files: bool = False
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what completes one of these names; ``or_files``: where none begins with what was typed, a file. A wrong
    setting completes nothing: a command says it, and of a shell that completes a word nobody wants a stack trace."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names: Sequence[str] = ()
        with suppress(SettingsError, OSError):
            names = list_names(load_settings())
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if or_files else [])

    return complete


def _known_jobs(settings: Settings) -> list[str]:
    """Return the names of jobs that this machine knows: of jobs elsewhere, those that were ordered from here, since a
    completion must not wait for a network."""
    storage = open_storage(settings.jobs_uri)
    return [LATEST, *(sorted(storage.list()) if storage.is_local else ordered_jobs(settings.home))]


def _known_datasets(settings: Settings) -> list[str]:
    folder = Path(settings.home, "storage", "datasets")
    return [LATEST, *(sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ())]


complete_jobs = completes(_known_jobs)
complete_jobs_and_fleets = completes(lambda settings: [*_known_jobs(settings), *fleet_names(settings.home)])
complete_searches = completes(lambda settings: search_names(settings.home))
complete_datasets = completes(_known_datasets, or_files=True)

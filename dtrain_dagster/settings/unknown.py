"""What is told of the variables of the environment: those of the project's prefix that nothing reads, most of them
misspelt, and those whose value is an old name."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache

from dtrain_dagster.settings.environment import PREFIX, Settings
from dtrain_dagster.settings.notices import NoticeSettings
from dtrain_dagster.settings.plain_variables import GROUPS, INTERNAL
from dtrain_dagster.settings.tiers import OLD_SPOT, OLD_SPOT_NOTICE

_log = logging.getLogger(__name__)


def is_ours(name: str) -> bool:
    """Return whether a variable's name begins like those of this project."""
    return name.startswith(PREFIX)


def known_variables() -> set[str]:
    """Return the names of all variables that the project reads."""
    from dtrain_dagster.settings.azure import AzureSettings  # not above: only who has such a variable needs to know
    from dtrain_dagster.settings.kubernetes import KubernetesSettings
    from dtrain_dagster.settings.ray import RaySettings
    from dtrain_dagster.settings.slurm import SlurmSettings

    names = {name for name in (*INTERNAL, *(each for group in GROUPS for each in group.variables)) if is_ours(name)}
    for kind in (Settings, AzureSettings, KubernetesSettings, NoticeSettings, RaySettings, SlurmSettings):
        names |= {f"{kind.model_config['env_prefix']}{name.upper()}" for name in kind.model_fields}
    return names


def find_unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence for each variable of the project's prefix that is not known, with the known name that is most
    like it. Variables that a known one refers to (``env:NAME``) are the user's own. Pure."""
    names = set(known)
    values = [environment[name] for name in names if name in environment]
    parts = [part for value in values for part in value.split()]
    referred = {part.removeprefix("env:") for part in parts if part.startswith("env:")}
    said = []
    for name in sorted(environment):
        if is_ours(name) and name not in names and name not in referred:
            ends = sorted(each.removeprefix(PREFIX) for each in names)
            close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.75)
            meant = f"; did you mean {PREFIX}{close[0]}?" if close else "; `make docs` builds a reference of all"
            said.append(f"the variable {name} is set, and nothing reads it{meant}")
    return said


def find_old_tiers(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that has the old name of Spot. It goes on working. Pure."""
    return [
        f"{name}={environment[name]}: {OLD_SPOT_NOTICE}; write spot"
        for name in (f"{PREFIX}TIER", f"{PREFIX}AZURE_CHAIN")
        if OLD_SPOT in environment.get(name, "")
    ]


@cache
def warn_of_variables() -> None:
    """Log a warning for each of them, once in a process."""
    for sentence in find_old_tiers(os.environ):
        _log.warning(sentence)
    mine = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    if any(is_ours(name) and name not in mine for name in os.environ):
        for sentence in find_unknown_variables(os.environ, known_variables()):
            _log.warning(sentence)

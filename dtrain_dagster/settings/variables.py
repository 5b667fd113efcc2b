"""Environment variables that are read as they are, without a class of settings; and what is told of the project's
variables: those that nothing reads, most of them misspelt.

What people may set belongs here with its meaning, and so does what processes hand on to each other, with the reason why
nobody sets it by hand. Variables with a type, bounds and a check do not belong here: they are fields of
`dtrain_dagster.settings.environment.Settings` and of the classes of each cluster. A test finds each of this project's
variables that the code names, and demands it in one of these places.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from dtrain_dagster.settings.environment import PREFIX, EnvironmentSettings, Settings, variable_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlainVariable:
    """A variable that people may set."""

    meaning: str
    """What it decides, as one cell of a table."""
    default: str = ""
    """What counts where it is unset, in words or as code."""


OF_NODES: Mapping[str, PlainVariable] = {
    "DTRAIN_CACHE": PlainVariable(
        "Folder on each node for its copies of datasets; it must be your own, where owners and modes are kept",
        "`cache` in the home; on nodes of other machines `/tmp/dtrain-cache`; under torchrun `dtrain` in "
        "`XDG_CACHE_HOME`, else `dtrain-cache-<uid>` in the folder for temporary files",
    ),
    "DTRAIN_STOP_GRACE_SECONDS": PlainVariable(
        "Seconds that a process has to save a checkpoint, from SIGTERM to SIGKILL, and to log why another one failed, "
        "before it is asked to end",
        "`8`",
    ),
    "DTRAIN_METADATA_URL": PlainVariable(
        "Address of the service that tells a machine when it will be taken away, as Azure's Scheduled Events do; "
        "`off` asks none",
        "`http://169.254.169.254` on machines of Azure, else `off`",
    ),
    "DTRAIN_HOST": PlainVariable(
        "Address or name at which the other nodes reach this one, different on each node; see "
        "[Addresses](../installing.md#addresses)",
        "found by itself",
    ),
    "DTRAIN_INTERFACE": PlainVariable(
        "Interface whose address that is, such as `ib0`; a node that has no such interface does not start",
        "`GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME`, where one is set",
    ),
    "DTRAIN_LAUNCH_SECRET_FILE": PlainVariable(
        "For a start by hand (`torchrun`, `srun`): a file of mode 0600 with 64 hexadecimal digits, the same on all "
        "nodes, by which ranks prove who they are. A cluster of dtrain makes one for each launch",
        "connections are not authenticated",
    ),
}
"""Variables of this project that the processes of a job read."""
_TOLD = "the process that starts a rank or a node tells it its place; set by hand it would be another job's"
_READ_ONLY = "dtrain tells a program with it where its run directory is; programs read it, and nobody sets it"
INTERNAL: Mapping[str, str] = {
    **dict.fromkeys(("DTRAIN_JOB_TOKEN", "DTRAIN_LAUNCH", "DTRAIN_ORDER"), _TOLD),
    "DTRAIN_SCRIPT_FOLDER": _READ_ONLY,
    "DTRAIN_CLOCK": "a process hands the origin of its clock on to its children",
    "DTRAIN_FAULTS": "tests and benchmarks use it to plant faults",
}
"""Variables of this project that nobody sets by hand, each with the reason."""


def is_ours(name: str) -> bool:
    """Return whether a variable's name begins like those of this project."""
    return name.startswith(PREFIX)


def known_variables() -> set[str]:
    """Return the names of all variables that the project reads."""
    from dtrain_dagster.settings.azure import AzureSettings  # not above: only who has such a variable needs to know
    from dtrain_dagster.settings.engines import ENGINE_SETTINGS

    kinds: list[type[EnvironmentSettings]] = [Settings, AzureSettings, *ENGINE_SETTINGS.values()]
    names = {*INTERNAL, *OF_NODES}
    for kind in kinds:
        names |= {name for field in kind.model_fields if is_ours(name := variable_of(kind, field).partition(":")[0])}
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


@cache
def warn_of_variables() -> None:
    """Log a warning for each that nothing reads, once in a process."""
    mine = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    if any(is_ours(name) and name not in mine for name in os.environ):
        for sentence in find_unknown_variables(os.environ, known_variables()):
            _log.warning(sentence)

"""Variables whose names begin like those of the project and that nothing reads: most are misspelt."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache

from dtrain_dagster.settings.environment import PREFIX, Settings

OF_PROCESSES = (
    *(
        "CACHE",
        "CLOCK",
        "FAULTS",
        "HOST",
        "INCARNATION",
        "INTERFACE",
        "JOB_TOKEN",
        "LAUNCH",
        "LAUNCH_NUMBER",
        "LAUNCH_SECRET_FILE",
        "LAUNCH_SECRET_URI",
    ),
    *("PEER_GRACE_SECONDS", "PRESENCE", "RELEASES_NODES", "STOP_GRACE_SECONDS"),
    *("DESCRIBE_JOB", "PART_OF", "RUN_DIR", "SCRIPT_FOLDER", "SET", "TRACKING", "WORK_FILE"),
)
"""Names after the prefix that processes of jobs read, and no settings have."""
_log = logging.getLogger(__name__)


def known_variables() -> set[str]:
    """Return the names of all variables that the project reads."""
    from dtrain_dagster.settings.azure import AzureSettings  # not above: only who has such a variable needs to know
    from dtrain_dagster.settings.data_engine import DataEngineSettings
    from dtrain_dagster.settings.kubernetes import KubernetesSettings
    from dtrain_dagster.settings.notices import NoticeSettings
    from dtrain_dagster.settings.ray import RaySettings
    from dtrain_dagster.settings.slurm import SlurmSettings
    from dtrain_dagster.settings.walk_forward import WalkForwardSettings

    names = {f"{PREFIX}{name}" for name in OF_PROCESSES}
    kinds = (
        *(Settings, AzureSettings, DataEngineSettings, KubernetesSettings, NoticeSettings, RaySettings),
        *(SlurmSettings, WalkForwardSettings),
    )
    for kind in kinds:
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
        if name.startswith(PREFIX) and name not in names and name not in referred:
            ends = sorted(each.removeprefix(PREFIX) for each in names)
            close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.75)
            listed = "the settings are listed in docs/reference/settings.md"
            meant = f"; did you mean {PREFIX}{close[0]}?" if close else f"; {listed}"
            said.append(f"the variable {name} is set, and nothing reads it{meant}")
    return said


@cache
def warn_of_unknown_variables() -> None:
    """Log a warning for each of them, once in a process."""
    mine = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    if any(name.startswith(PREFIX) and name not in mine for name in os.environ):
        for sentence in find_unknown_variables(os.environ, known_variables()):
            _log.warning(sentence)

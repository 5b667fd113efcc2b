"""The settings of ``DTRAIN_CLUSTER=slurm``: ``DTRAIN_SLURM_*`` environment variables. None of them is a secret: who may
submit is decided by SLURM, and how a login node is reached by the user's own configuration of ssh.

Which options of ``sbatch`` come of them belongs in `dtrain_dagster.clusters.slurm.commands`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from dtrain_dagster.settings.environment import SettingsError, read_options
from dtrain_dagster.settings.nodes import EngineSettings, node_field

PREFIX = "DTRAIN_SLURM_"
PRICES = f"{PREFIX}OPTIONS: prices"
"""How messages name the file of the site's prices."""
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.,:@/-]*$"
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_OURS = {
    "--array": "nodes are jobs of their own",
    "--job-name": "it names the node",
    "--nodes": "each job is one node",
    "--ntasks": "the node agent is one task",
    "--output": "it goes to the run directory",
    "--parsable": "answers are read",
    "--requeue": "lost nodes are replaced by jobs of their own",
    "--signal": "the agent handles the end",
    "--time": "set time_limit_minutes in DTRAIN_SLURM_OPTIONS",
    "--wrap": "the agent runs",
}
"""Options of sbatch that the project sets itself → why."""


def read_arguments(value: object) -> object:
    """Return text as options of sbatch; anything else as it is. Raise `ValueError` for one that cannot be set here."""
    if not isinstance(value, str):
        return value
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{error}: quote it as a shell does") from None
    for word in words:
        option = word.partition("=")[0]
        if not option.startswith("--") or ("=" not in word and option not in ("--exclusive", "--hold")):
            raise ValueError(f"{word!r} is not an option of sbatch in the form --name=value")
        if option in _OURS:
            raise ValueError(f"{option} cannot be set here: {_OURS[option]}")
        names = word.partition("=")[2].split(",")
        if option == "--export" and ("ALL" in names or not all(map(_VARIABLE.fullmatch, names))):
            raise ValueError("--export takes names of variables alone: a value would be in the list of processes")
    return words


class SlurmSettings(EngineSettings):
    """The settings of a SLURM cluster. Every field is the environment variable of that name in capitals after
    ``DTRAIN_SLURM_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)
    OPTIONS = ("host", "time_limit_minutes", "setup", "extra", "prices")

    host: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$",
        description="Login node that commands are run on, as ssh knows it (user@host or an alias); unset: this machine",
    )
    partition: str | None = Field(default=None, pattern=_NAME, description="Partition; unset: the cluster's default")
    cpus: int = node_field("CPUS", 1, "CPUs of a node, a whole number on SLURM", ge=1, le=4096)
    time_limit_minutes: int | None = Field(
        default=None, ge=2, description="Time limit of a node; a longer training goes on in its successor"
    )
    setup: str = Field(default="", description="Shell commands before the node begins, such as: module load cuda/12.4")
    extra: Annotated[tuple[str, ...], NoDecode, BeforeValidator(read_arguments)] = Field(
        default=(),
        description="Further options of sbatch, as --account=lab --qos=high --exclusive; an --export names the "
        "variables that nodes get in the place of PATH, HOME, USER and LANG",
    )
    prices: str | None = Field(
        default=None,
        exclude=True,
        description="File with what a node-hour of each partition costs, in US dollars, as JSON: "
        '{"gpu": 2.5}; with DTRAIN_SLURM_PARTITION, plans and bills are in these dollars',
    )


def site_prices_path() -> Path | None:
    """Return the file of the site's prices; None where none is set. It is asked for often, and not checked."""
    given = read_options(SlurmSettings).get("prices")
    return Path(given).expanduser() if given else None


def read_partition_prices() -> dict[str, float]:
    """Return partition → US dollars per node-hour, from the file of the site's prices; none where none is set. Raise
    `SettingsError` for a file that is not there, or is no such table."""
    path = site_prices_path()
    if path is None:
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{PRICES}={path}: it cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise SettingsError(f'{PRICES}={path}: give partitions and dollars per node-hour: {{"gpu": 2.5}}')
    for name, usd in found.items():
        if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 < usd < math.inf:
            raise SettingsError(
                f"{PRICES}={path}: {usd!r} of {name!r} is not a positive number of dollars per node-hour"
            )
    return {name: float(usd) for name, usd in found.items()}

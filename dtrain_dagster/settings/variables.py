"""Environment variables that are read as they are, without a class of settings; and what is told of the project's
variables: those that nothing reads, most of them misspelt.

What people may set belongs here with its meaning, by group, and so does what processes hand on to each other, with the
reason why nobody sets it by hand. Variables with a type, bounds and a check do not belong here: they are fields of
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
from dtrain_dagster.settings.notices import NoticeSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlainVariable:
    """A variable that people may set."""

    meaning: str
    """What it decides, as one cell of a table."""
    default: str = ""
    """What counts where it is unset, in words or as code."""


@dataclass(frozen=True, slots=True)
class VariableGroup:
    """Variables that are set at the same place."""

    title: str
    remark: str
    variables: Mapping[str, PlainVariable]


OF_NODES = VariableGroup(
    "The processes of a training",
    "Set them where you start the training, or on a node: on SLURM in a line of `DTRAIN_SLURM_SETUP`, on Ray in the "
    "environment of `ray start`.",
    {
        "DTRAIN_CACHE": PlainVariable(
            "Folder on each node for its copies of datasets; it must be your own, where owners and modes are kept",
            "`cache` in the home; on nodes of other machines `/tmp/dtrain-cache`; under torchrun `dtrain` in "
            "`XDG_CACHE_HOME`, else `dtrain-cache-<uid>` in the folder for temporary files",
        ),
        "DTRAIN_STOP_GRACE_SECONDS": PlainVariable(
            "Seconds from SIGTERM to SIGKILL, in which a process that is asked to end can save a checkpoint", "`8`"
        ),
        "DTRAIN_PEER_GRACE_SECONDS": PlainVariable(
            "Seconds that the other processes of a node have to log why one of them failed, before they are ended",
            "`10`",
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
    },
)
"""Variables of this project that the processes of a job read."""
OF_OTHER_PROGRAMS = VariableGroup(
    "Variables of other programs",
    "dtrain reads these names of other programs and libraries, with their usual meaning. Variables that only such a "
    "library reads are in its own documentation.",
    {
        "DAGSTER_HOME": PlainVariable(
            "Folder of Dagster's runs, schedules and settings", "`dagster` in the home, for commands of make and dtrain"
        ),
        "MLFLOW_DISABLE_TELEMETRY": PlainVariable("Whether MLflow sends nothing to its makers", "`true`"),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": PlainVariable(
            "How often the trainer retries an MLflow server that does not answer", "`3`"
        ),
        "MLFLOW_TRACKING_URI": PlainVariable(
            "MLflow server of a script with `HorovodTrainer` or another trainer by a framework's name that asks for "
            "MLflow"
        ),
        "MLFLOW_TRACKING_USERNAME": PlainVariable("User of an MLflow server whose address names none"),
        "MLFLOW_TRACKING_PASSWORD": PlainVariable("Password of that user"),
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": PlainVariable("Whether MLflow draws bars of progress", "`false`"),
        "OMP_NUM_THREADS": PlainVariable(
            "CPU threads of a rank, unless `DTRAIN_THREADS_PER_RANK` sets it", "cores / ranks"
        ),
        "CUDA_VISIBLE_DEVICES": PlainVariable("GPUs of this machine that its ranks may use", "all"),
        "GLOO_SOCKET_IFNAME": PlainVariable("As `DTRAIN_INTERFACE`, where that is unset"),
        "NCCL_SOCKET_IFNAME": PlainVariable("As `DTRAIN_INTERFACE`, where neither of the two is set"),
        "CXX": PlainVariable("C++ compiler that `training.compile` uses on a CPU", "`g++`"),
        "XDG_CACHE_HOME": PlainVariable("Folder below which caches are kept", "see `DTRAIN_CACHE`"),
        "TORCH_EXTENSIONS_DIR": PlainVariable(
            "Folder of what DeepSpeed compiles", "`dtrain/torch_extensions` below `XDG_CACHE_HOME` or `~/.cache`"
        ),
        "DS_ACCELERATOR": PlainVariable("Device that DeepSpeed computes on", "`cpu` without a GPU of NVIDIA's"),
        "DS_BUILD_OPS": PlainVariable("Whether DeepSpeed compiles its parts when it is imported", "`0`"),
        "RAY_ADDRESS": PlainVariable(
            "Ray cluster that a script with `RayTrainer` uses", "a Ray is started on this machine"
        ),
        "RAY_AUTH_MODE": PlainVariable("How the Ray that `RayTrainer` starts authenticates its clients", "`token`"),
        "RAY_AUTH_TOKEN": PlainVariable("The token that authenticates them", "drawn at random"),
        "RAY_USAGE_STATS_ENABLED": PlainVariable("Whether that Ray sends figures to its makers", "`0`"),
        "AZURE_STORAGE_ACCOUNT_URL": PlainVariable(
            "Storage account of `DTRAIN_STORAGE`: `https://account.blob.core.windows.net`"
        ),
        "AZURE_STORAGE_CONNECTION_STRING": PlainVariable(
            "The same with a key, for Azurite and other storage that knows no identities; it comes first"
        ),
        "AZURE_CLIENT_ID": PlainVariable("Client id of the managed identity to use", "the system-assigned one"),
        "AZURE_KEY_VAULT_SUFFIX": PlainVariable(
            "End of the names of key vaults, in another cloud than the public one", "`vault.azure.net`"
        ),
        "ARM_CLOUD_METADATA_URL": PlainVariable(
            "Description of another cloud, by which `dtrain doctor` knows its registries"
        ),
    },
)
"""Variables of other programs that people set, and that this project looks at."""
OF_MAKE = VariableGroup(
    "make and the scripts of deploy",
    "Set them in front of the command or behind it: `make run PYTHON=python3.12`.",
    {
        "PYTHON": PlainVariable("Interpreter that `.venv` is made with: 3.11 to 3.13", "`python3`"),
        "TORCH_INDEX": PlainVariable(
            "Address of a further package index for torch, for a CPU build; torch is then pinned without a hash"
        ),
        "SELECT": PlainVariable("Assets that `make run` materializes", "`not group:studies`"),
        "PORT": PlainVariable("Port of `make ui`, and of an endpoint's container", "`3000`; `5001`"),
        "TEST_WORKERS": PlainVariable("Processes of `make test`", "`4`"),
        "TESTS": PlainVariable("Folders or files of tests for `make test`", "all"),
        "BENCH": PlainVariable("Names of the benchmarks that `make bench` runs", "all that the Makefile lists"),
        "VERSION": PlainVariable("Version that `make release` makes"),
        "DRY_RUN": PlainVariable("With any value `make release` only shows what it would do"),
        "WORKERS": PlainVariable("Processes of an endpoint's container", "`1`"),
        "DTRAIN_TEST_CACHE": PlainVariable(
            "Folder in which programs are kept that tests have built or fetched", "`~/.cache/dtrain-tests`"
        ),
        "DTRAIN_KUBERNETES_BINARIES": PlainVariable("Folder with built programs of Kubernetes, for `make kube`"),
        "DTRAIN_HOROVOD_SOURCE": PlainVariable("Horovod's source, `horovod-0.28.1.tar.gz`, where there is no network"),
        "HOROVOD_GPU_OPERATIONS": PlainVariable("`NCCL` builds Horovod for GPUs", "for CPUs"),
        "MAKEFLAGS": PlainVariable("Options of make when Horovod is built", "`-j` with the number of cores"),
    },
)
"""Variables that the Makefile and the scripts below deploy read, besides those above."""
GROUPS = (OF_NODES, OF_OTHER_PROGRAMS, OF_MAKE)
"""All groups, in the order of the page that lists them."""

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
    from dtrain_dagster.settings.engines import ENGINES

    kinds: list[type[EnvironmentSettings]] = [Settings, NoticeSettings, AzureSettings, *ENGINES.values()]
    names = {*INTERNAL, *(name for group in GROUPS for name in group.variables if is_ours(name))}
    for kind in kinds:
        names |= {name for field in kind.model_fields if is_ours(name := variable_of(kind, field))}
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

"""The settings of cluster, storage, registry and prices: ``DTRAIN_*`` environment variables, checked before any start.

Values that a person changes from run to run (epochs, learning rate, window…) are not here but in the launchpad of their
asset.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from dtrain_dagster.settings.cluster_kinds import KINDS, TIERS, ClusterKind, KindName, Tier, cluster_key
from dtrain_dagster.settings.home import DEFAULT, find_home
from dtrain_dagster.support.notify import refuse_inline_secret
from dtrain_dagster.support.secrets import SecretError, is_reference, redact, refuse_secret, secret_in
from trainer.model.allowed_factories import parse_modules
from trainer.node.preflight import read_setting
from trainer.setting_errors import describe_error, explain_unknown, words_of

PREFIX = "DTRAIN_"
_BY_REFERENCE = ("prices", "notify", "mlflow_tracking_uri")
"""The settings whose value may be a reference (``env:NAME``, ``keyvault://vault/secret``)."""
_NO_SECRET = {
    "storage": "nodes and this machine authorise themselves by identity, or by Azure's own variables "
    "(AZURE_STORAGE_CONNECTION_STRING and the like)",
    "dagster_url": "give the address alone, as people open it in a browser",
}
"""The remedy for each setting that takes no reference."""
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f?%]")
"""Characters that a home's path must not have: the address of an SQLite file ends at ``?``, and ``%41`` in it is
another letter, so that the databases of Dagster and MLflow would lie elsewhere; control characters break lines of logs
and lists."""
BUYABLE_GPU_TYPE = "Standard_NC24ads_A100_v4"
"""The SKU that Azure ML is asked for where none is set: one A100, the stronger equivalent of a V100, whose sizes are
retired. Locally a V100 stands in, as nothing is bought."""
MOST_NODES = 256
MLFLOW_HERE = "http://127.0.0.1:5000"
"""Where `dtrain ui mlflow` serves MLflow's UI."""
_ADDRESS = r"^https?://[^\s@?#]+$"


class SettingsError(ValueError):
    """A refusal of an environment variable that cannot be used. The message names it, its value and the remedy."""


class EnvironmentSettings(BaseSettings):
    """Settings whose fields are environment variables: of their names in capitals after a prefix; those that few people
    set share one, with words ``name=value``. Values that are given take precedence. The constructor raises
    `SettingsError` with one line per variable that cannot be used."""

    model_config = SettingsConfigDict(extra="forbid", env_ignore_empty=True, env_prefix=PREFIX)

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The fields that share the variable ``<prefix>OPTIONS``."""
    RETIRED: ClassVar[Mapping[str, str]] = {}
    """The end of the name of a variable of before → what to do instead, as a sentence goes on. It is refused: what was
    asked for by it must not be left out without a word."""

    def __init__(self, **given: Any) -> None:
        prefix = self.model_config["env_prefix"]
        for name, remedy in self.RETIRED.items():
            if os.environ.get(f"{prefix}{name}"):
                raise SettingsError(f"{prefix}{name} {remedy}, and unset this")
        for name in self.OPTIONS:
            if os.environ.get(f"{prefix}{name.upper()}"):
                raise SettingsError(
                    f"{prefix}{name.upper()} is one of several in {prefix}OPTIONS now: set that to '{name}=…', further "
                    "ones after a blank, and unset this"
                )
        try:
            super().__init__(**{**read_options(type(self)), **given})
        except ValidationError as error:
            lines = [_describe(type(self), item) for item in error.errors(include_url=False)]
            raise SettingsError(redact("\n".join(lines))) from None

    @classmethod
    def read(cls, **given: Any) -> Self:
        """Return the settings of the environment, with those that are given in their place."""
        return cls(**given)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the settings that gave these `options`: the environment is not read, and nothing is checked again."""
        return cls.model_construct(**options)

    def options(self) -> dict[str, Any]:
        """Return the values in JSON's types, without unset ones."""
        return self.model_dump(mode="json", exclude_none=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_secrets(cls, value: object, info: ValidationInfo) -> object:
        return without_secret(cls, str(info.field_name), value)


def read_options(kind: type[EnvironmentSettings]) -> dict[str, str]:
    """Return the settings of this kind in ``<prefix>OPTIONS``: words ``name=value``, quoted as a shell does. Raise
    `SettingsError` for other text."""
    variable = f"{kind.model_config['env_prefix']}OPTIONS"
    try:
        words = [word.partition("=") for word in shlex.split(os.environ.get(variable, "") if kind.OPTIONS else "")]
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}: quote it as a shell does") from None
    for name, sign, _ in words:
        if name not in kind.OPTIONS:
            raise SettingsError(
                f"{variable} takes words name=value: {explain_unknown(redact(name), name, kind.OPTIONS)}"
            )
        if not sign:
            raise SettingsError(f"{variable} takes words name=value: give {name}=…, without blanks around the =")
    return {name: value for name, _, value in words if value}


def suggest_option(name: str, value: str) -> None:
    """Set one of `Settings.OPTIONS` for this process and its children, unless it is set already."""
    variable = f"{PREFIX}OPTIONS"
    os.environ[variable] = " ".join([shlex.quote(f"{name}={value}"), os.environ.get(variable, "")])


def split_words(value: object) -> object:
    """Return the words of a text that are separated by commas; anything else as it is."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


class Settings(EnvironmentSettings):
    """The project's settings. Every field is the environment variable of that name in capitals after ``DTRAIN_``."""

    OPTIONS = (
        "max_replacements",
        "preflight",
        "calendar",
        "data_engine",
        "experiment",
        "command_tracking",
        "dagster_url",
        "dashboard_url",
        "mlflow_url",
        "idle_minutes",
        "queue_deadline_hours",
        "orphan_policy",
        "orphan_minutes",
    )
    RETIRED: ClassVar[Mapping[str, str]] = {
        "PEER_GRACE_SECONDS": "is gone: DTRAIN_STOP_GRACE_SECONDS also says how long peers of a failed process have",
        "RETRAIN_CRON": "is gone: give `build_training_assets(…, schedule=…)` the five fields",
        "RETRAIN_TIMEZONE": "is gone: the weekly retraining goes by the time of New York",
        "RETRAIN_MAX_AGE_DAYS": "is gone: 30 days after the last registration a model is stale",
    }

    home: Path = Field(
        default=Path(DEFAULT),
        description="Folder for everything that is written on this machine; unset: that of the working directory or of "
        "the nearest folder above it that has one",
    )

    storage: str | None = Field(
        default=None,
        pattern=r"^az://[a-z0-9](-?[a-z0-9]){2,62}(/.*)?$",
        description="Storage of datasets and run directories that nodes of the cloud reach: az://container/path",
    )
    cluster: KindName = Field(default="local", description="Kind of cluster: local, azure_ml, slurm, kubernetes or ray")
    cluster_name: str = Field(
        default="local", pattern=r"^[A-Za-z][A-Za-z0-9-]{0,31}$", description="Name of the cluster"
    )
    nodes: int = Field(default=3, ge=1, le=MOST_NODES, description="Nodes that training runs on")
    processes_per_node: int | None = Field(
        default=None, ge=1, le=16, description="Ranks per node; unset: one per GPU of the node, 1 without GPUs"
    )
    threads_per_rank: int | None = Field(default=None, ge=1, description="CPU threads per rank; unset: cores / ranks")
    max_replacements: int = Field(
        default=6,
        ge=0,
        description="Lost nodes that are replaced while a job runs; on Azure ML how often it is submitted again",
    )
    preflight: str = Field(
        default="",
        description="Checks of a node before it joins: off, quick or full, and a command of your own after a colon, as "
        "in 'quick: /opt/check-node'; unset: quick. Only of nodes of SLURM, Kubernetes and Ray",
    )
    gpu_type: str = Field(
        default="Standard_NC6s_v3",
        description="SKU; on the local cluster its price stands in; unset on Azure ML: Standard_NC24ads_A100_v4, as "
        "V100 sizes are retired",
    )
    tier: str = Field(
        default="dedicated",
        description="Tiers on which nodes are requested, in order, separated by commas: dedicated, spot; plans "
        "use the first one's price",
    )
    region: str = Field(
        default="eastus",
        pattern=r"^[a-z]+[a-z0-9]*$",
        description="Azure region whose prices count; on Azure ML that of the workspace",
    )

    prices: str = Field(
        default="sp500_panel",
        description="sp500_panel, or the address of a file; one with a key or password in it by reference: env:NAME, "
        "keyvault://vault/secret",
    )
    calendar: str = Field(default="XNYS", description="Exchange calendar of the prices, or none")

    data_engine: Literal["duckdb", "ray"] = Field(
        default="duckdb",
        description="Who sorts prices and computes features: duckdb, in one process, or ray; the dataset is the same",
    )

    factory_modules: str = Field(
        default="",
        description="Modules of your own models and losses, and all below them, separated by commas; no other is "
        "imported for a job",
    )
    mlflow_tracking_uri: str | None = Field(
        default=None,
        description="MLflow server (or env:NAME, keyvault://vault/secret); unset: SQLite under the home",
    )
    experiment: str = Field(default="dtrain", min_length=1, description="MLflow experiment")
    command_tracking: Literal["mlflow", "off"] = Field(
        default="mlflow",
        description="Whether `dtrain train` and `dtrain fleet` write their trainings to MLflow: mlflow or off",
    )
    model_name: str = Field(
        default="stock-return-distribution",
        pattern=r"^\w[\w .-]{0,199}$",
        description="Registered model's name: letters, digits, blanks, dots, dashes, underscores",
    )
    dagster_url: str = Field(default="http://127.0.0.1:3000", description="Dagster's UI, for links back from a model")
    dashboard_url: str = Field(
        default="http://127.0.0.1:8060",
        pattern=_ADDRESS,
        description="The dashboard as people open it in a browser, for links in Dagster and in notices",
    )
    mlflow_url: str | None = Field(
        default=None,
        pattern=_ADDRESS,
        description="MLflow's UI as people open it, for links; unset: the tracking server where it is one, else "
        f"`{MLFLOW_HERE}`, where `dtrain ui mlflow` serves it",
    )

    retrain_budget_usd: float = Field(
        default=0, ge=0, lt=float("inf"), description="Budget of an unattended retraining in dollars; 0: no limit"
    )
    idle_minutes: float = Field(default=10, gt=0, description="A cluster without work for longer is scaled down")

    queue_deadline_hours: float = Field(
        default=24, gt=0, description="Hours that a run waits for capacity before it is given up"
    )
    notify: str = Field(
        default="",
        description="Apprise addresses that receive alerts, separated by spaces; those that hold a token or "
        "password by reference: keyvault://vault/secret, env:NAME",
    )
    orphan_policy: Literal["notify", "cancel"] = Field(
        default="notify", description="Treatment of jobs and computes whose Dagster run has ended: notify or cancel"
    )
    orphan_minutes: float = Field(default=30, gt=0, description="Minutes that they may go on before that")

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        given = os.environ.get(f"{PREFIX}HOME") or home != Path(DEFAULT)
        path = home.expanduser().absolute() if given else find_home(Path.cwd())
        try:
            text = str(path).encode().decode()
        except UnicodeEncodeError:
            raise ValueError("its path is not UTF-8; choose another folder") from None
        if found := _UNUSABLE.search(text):
            raise ValueError(
                f"its path holds {found[0]!r}, which addresses of SQLite databases cannot hold; choose another folder"
            )
        return path

    @field_validator("preflight")
    @classmethod
    def _known_mode(cls, preflight: str) -> str:
        if preflight:
            read_setting(preflight)
        return preflight

    @field_validator("tier")
    @classmethod
    def _known_tiers(cls, tier: str) -> str:
        names = [name.strip() for name in tier.split(",") if name.strip()]
        if not names or not set(names) <= set(TIERS):
            raise ValueError(f"must be one or more of {', '.join(TIERS)}, separated by commas")
        return ",".join(dict.fromkeys(names))

    @field_validator("factory_modules")
    @classmethod
    def _modules(cls, names: str) -> str:
        return ",".join(parse_modules(names))

    @field_validator("notify")
    @classmethod
    def _no_tokens(cls, notify: str) -> str:
        for address in notify.split():
            refuse_inline_secret(f"{PREFIX}NOTIFY", address)
        return notify

    @model_validator(mode="after")
    def _bought_is_what_can_be(self) -> Settings:
        if self.kind.buys_nodes and "gpu_type" not in self.model_fields_set:
            self.gpu_type = BUYABLE_GPU_TYPE
        return self

    @model_validator(mode="after")
    def _pre_flights_have_an_agent(self) -> Settings:
        if self.preflight and self.kind.buys_nodes:
            raise ValueError(
                f"{PREFIX}OPTIONS: preflight={self.preflight!r} cannot be used with the {self.kind.words}, "
                "which checks its nodes itself: unset it"
            )
        return self

    @model_validator(mode="after")
    def _nodes_reach_their_storage(self) -> Settings:
        if self.kind.shares_home != (self.storage is None):
            remedy = (
                f"unset it: the {self.kind.words} keeps everything under DTRAIN_HOME"
                if self.storage
                else "set it to az://container/path, which the nodes of DTRAIN_CLUSTER=azure_ml can reach"
            )
            raise ValueError(f"{PREFIX}STORAGE={self.storage or ''!r} cannot be used with this cluster; {remedy}")
        return self

    @property
    def cluster_key(self) -> str:
        """What tells the cluster apart among those of all kinds."""
        return cluster_key(self.cluster, self.cluster_name)

    @property
    def kind(self) -> ClusterKind:
        """What this kind of cluster is and can do."""
        return KINDS[self.cluster]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers on which nodes are requested, in order; at least one."""
        return cast("tuple[Tier, ...]", tuple(self.tier.split(",")))

    @property
    def storage_uri(self) -> str:
        """The folder of this machine in which prices and datasets are built."""
        return str(self.home / "storage")

    @property
    def shared_uri(self) -> str:
        """The storage that the cluster's nodes reach: run directories, and the datasets that they read."""
        return self.storage.rstrip("/") if self.storage else self.storage_uri

    @property
    def jobs_uri(self) -> str:
        """The folder of run directories."""
        return f"{self.shared_uri}/jobs"

    @property
    def cache_dir(self) -> Path:
        """The node-local cache of shards."""
        return self.home / "cache"

    @property
    def tracking_uri(self) -> str:
        """The MLflow address as it was set: it may be a reference, which is resolved where it is used."""
        return self.mlflow_tracking_uri or f"sqlite:///{self.home / 'mlflow.db'}"

    @property
    def mlflow_page(self) -> str:
        """The address of MLflow's UI; a reference to a secret is not resolved for a link."""
        is_server = re.match(_ADDRESS, self.tracking_uri) is not None
        return (self.mlflow_url or (self.tracking_uri if is_server else MLFLOW_HERE)).rstrip("/")


def without_secret(kind: type[BaseSettings], name: str, value: object) -> object:
    """Return the value of a setting, which carries no secret. Raise `SecretError` for one that does, or for a reference
    where none is taken. Settings are kept in run snapshots, logs and manifests."""
    if not isinstance(value, str):
        return value
    setting = variable_of(kind, name)
    for part in value.split() or [value]:
        refuse_secret(setting, part, "" if name in _BY_REFERENCE else _NO_SECRET.get(name, "give it without"))
        if is_reference(part) and name not in _BY_REFERENCE:
            raise SecretError(f"{setting} takes no reference to a secret: give its value, which is not a secret")
    return value


def variable_of(kind: type[BaseSettings], name: str) -> str:
    """Return the environment variable of a field; of one that shares it, with the field's name."""
    field = kind.model_fields.get(name)
    shared = {name for each in kind.__mro__ if issubclass(each, EnvironmentSettings) for name in each.OPTIONS}
    if name in shared:  # also of a class that does not read the environment again, and so has none of its own
        return f"{kind.model_config['env_prefix']}OPTIONS: {name}"
    return str((field and field.validation_alias) or f"{kind.model_config['env_prefix']}{name.upper()}")


def load_settings(**given: Any) -> Settings:
    """Read and check the environment; values that are given take precedence. Raise `SettingsError` with one line per
    variable that cannot be used."""
    return Settings(**given)


def setting(name: str) -> str:
    """Return one setting as the environment has it, not checked: for values that are read often."""
    given = read_options(Settings).get(name) if name in Settings.OPTIONS else os.environ.get(f"{PREFIX}{name.upper()}")
    return given or str(Settings.model_fields[name].get_default())


def _describe(kind: type[BaseSettings], item: ErrorDetails) -> str:
    """Return the sentence on one variable of settings of this kind."""
    if not item["loc"]:  # several variables do not go together; the message names them
        return item["msg"].removeprefix("Value error, ")
    given_as = str(item["loc"][0])
    name = next((name for name in kind.model_fields if given_as in (name, variable_of(kind, name))), given_as)
    field, variable = kind.model_fields.get(name), variable_of(kind, name)
    if field is None:
        return describe_error(item, kind)
    about = f" ({field.description})" if field.description else ""
    if item["type"] == "missing":
        return f"{variable}{about} is not set"
    default = ""
    if not field.is_required():
        default = "; unset it for the default" + (f", {value}" if (value := field.get_default()) else "")
    given = "" if _is_secret(item) else f"={item['input']!r}"
    return f"{variable}{given}{about}: {words_of(item)}{default}"


def _is_secret(item: ErrorDetails) -> bool:
    """Return whether the value was refused because of a secret, or may have one in it."""
    refused = (item.get("ctx") or {}).get("error")
    return isinstance(refused, SecretError) or (isinstance(item["input"], str) and secret_in(item["input"]) is not None)

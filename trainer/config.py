"""The configuration of a job, as plain dataclasses: read from ``job.json``, overridden on the command line, checked.

Every class refuses unknown keys and wrong types; the error names the field, the value and the remedy. This process's
place in the world (rank, world size, address) comes from the environment instead, see `trainer.comm.launcher_env`.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from trainer.documents.factory_arguments import check_arguments
from trainer.errors import REMOVED, ConfigError
from trainer.runtime.packages import load
from trainer.secrets.addresses import refuse_secret
from trainer.secrets.redaction import redact
from trainer.secrets.references import SecretError
from trainer.strategies import SHARDED, Strategy, explain_strategy

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""The pattern of a job's name, which is a folder of its run directory and a part of its name on clusters."""
T = TypeVar("T")


def _checked(args: dict[str, Any]) -> dict[str, Any]:
    check_arguments(args)
    return args


Arguments = Annotated[dict[str, Any], AfterValidator(_checked)]
"""Keyword arguments of a factory: plain data, see `trainer.documents.factory_arguments`."""
_log = logging.getLogger(__name__)
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
FACTORY = "factory"
"""What the address of a dataset begins with where a function of the user's own makes it."""
SCRIPT = "script"
"""The name of a model, a loss and a dataset that a script gives as objects (`trainer.fit`)."""
PARTS = ("model", "loss", "optimizer", "lr_scheduler")
"""The sections of a job that name a part of its training and the arguments of that."""
DESCRIBE = "trainer.setting_errors:describe_errors"
"""What puts findings of pydantic into words, loaded where there are some."""
MOST_TRACED_STEPS = 50
"""The most steps of one trace, whose cost to the training grows with them: see `trainer.observability.trace`."""


def checked_settings(section: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator for a pydantic dataclass whose constructor then raises `ConfigError`, see
    `trainer.setting_errors`. ``section``: where its settings are in ``job.json``."""

    def decorate(kind: type[T]) -> type[T]:
        make = kind.__init__

        @functools.wraps(make)
        def __init__(self: T, *given: Any, **settings: Any) -> None:
            if given:  # pydantic would take them in the order of the fields
                names = "the mapping as **settings" if isinstance(given[0], Mapping) else "them by name"
                raise ConfigError(f"{kind.__name__}(…) was given settings without names: give {names}")
            try:
                make(self, **settings)
            except ValidationError as error:
                raise ConfigError(load(DESCRIBE)(error, kind, section=section)) from None

        kind.__init__ = __init__  # type: ignore[assignment, method-assign]
        return kind

    return decorate


def settings_of(given: Any, kind: type[T], name: str, base: type | None = None) -> T:
    """Return settings that a caller gave: of ``kind`` or its ``base``, as a mapping of their names, or None for the
    defaults. Raise `ConfigError`, which says ``name``, for anything else."""
    if given is None:
        return kind()
    if isinstance(given, Mapping):
        return kind(**{str(key): value for key, value in given.items()})
    if isinstance(given, base or kind):
        return given  # type: ignore[return-value]  # a base of it has the same fields
    what = f"the class {given.__name__}" if isinstance(given, type) else f"of the type {type(given).__name__}"
    raise ConfigError(f"{name} is {what}: give {kind.__name__}(…), or a mapping of its settings")


@checked_settings("dataset")
@dataclass(kw_only=True, slots=True, config=_STRICT)
class DatasetRef:
    """The dataset to train on."""

    uri: str
    """Folder that holds ``manifest.json`` and ``data/``; a path or any fsspec address. ``script:FILE`` where a script
    gives data, model and loss as objects (`trainer.fit`). ``factory:package.module:function`` where a function of the
    user's own makes the datasets on each node (`trainer.engine.own_problem`)."""
    dataset_id: str | None = None
    """Expected content id. Training refuses a folder whose manifest says another."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of that function. Plain data only: see `trainer.documents.factory_arguments`."""

    @property
    def factory(self) -> str | None:
        """The ``package.module:function`` that makes the datasets; None for a folder or a script."""
        kind, _, name = self.uri.partition(":")
        return name if kind == FACTORY else None


@checked_settings()
@dataclass(kw_only=True, slots=True, config=_STRICT)
class FactoryConfig:
    """A stock part by name (``tcn``) or a user's own by ``package.module:factory``, with its keyword arguments."""

    factory: str = Field(max_length=500)
    """A user's own only where ``DTRAIN_FACTORY_MODULES`` allows its module (`trainer.model.allowed_factories`)."""
    args: Arguments = Field(default_factory=dict)
    """Plain data only: see `trainer.documents.factory_arguments`."""


@checked_settings("training.tls")
@dataclass(kw_only=True, slots=True, config=_STRICT)
class TLSConfig:
    """Certificates (PEM files on every node) for traffic between nodes: each side shows its own, signed by ``ca``."""

    certificate: str
    """The node's own certificate."""
    key: str
    """The private key of it."""
    ca: str
    """The job's own authority: every process with a certificate of it is admitted."""


@checked_settings("optimizer.groups")
@dataclass(kw_only=True, slots=True, config=_STRICT)
class ParameterGroup:
    """Parameters of a model that an optimizer treats by themselves."""

    match: str
    """A pattern of their names, such as ``*.bias`` or ``encoder.*``. A parameter belongs to the first group it fits."""
    args: Arguments = Field(default_factory=dict)
    """The group's options, such as ``{"weight_decay": 0}``."""


@checked_settings("optimizer")
@dataclass(kw_only=True, slots=True, config=_STRICT)
class OptimizerConfig(FactoryConfig):
    """An optimizer: a class such as ``torch.optim:SGD``, which gets the model's parameters, or a function of the user's
    own (``package.module:function``), which gets the model and returns an optimizer."""

    groups: list[ParameterGroup] = Field(default_factory=list)
    """Groups with options of their own; all other parameters are one more. For a class only."""


@checked_settings("training")
@dataclass(kw_only=True, slots=True, config=_STRICT)
class DistributedTrainingConfig:
    """The settings of a training. The global batch, ``batch_size_per_gpu * gradient_accumulation_steps * world_size``
    samples, is constant: at another actual world size the same micro-batches are distributed differently, and the loss
    curve stays the same."""

    world_size: int = Field(default=3, ge=1)
    """Ranks the batch was planned for (nodes x processes per node)."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """``auto``: nccl where every rank has a GPU, else gloo."""
    master_addr: str = "127.0.0.1"
    """Where rank 0 listens; only used when the environment does not say (MASTER_ADDR)."""
    master_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of rank 0; the cluster picks a free one when absent."""
    batch_size_per_gpu: int = Field(default=128, ge=1)
    """Samples in one micro-batch, the unit that is distributed to ranks."""
    gradient_accumulation_steps: int = Field(default=2, ge=1)
    """Micro-batches per rank and optimizer step at the planned world size."""
    checkpoint_frequency: int = Field(default=100, ge=1)
    """Optimizer steps between checkpoints."""

    epochs: int = Field(default=6, ge=1)
    """How often each training sample is used."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps, whatever ``epochs`` says."""
    seed: int = Field(default=0, ge=0)
    """What the initial weights, the order of samples and dropout are drawn from."""
    shuffle_block: int | None = Field(default=None, ge=1)
    """For a dataset larger than memory: blocks of this many consecutive samples are permuted, and samples within groups
    of 256 blocks, so that only two groups at a time are read (`trainer.data.sampler`). None permutes all samples."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Autocast type of the forward pass; fp16 (GPU only) comes with loss scaling. Weights stay float32. ``tf32`` (GPU
    only): no autocast, matrix products of float32 in TF32, as torch computes convolutions on a GPU in any case."""

    compile: Literal["off", "default", "reduce-overhead"] = "off"
    """Train through ``torch.compile`` in this mode: the first step then takes up to a minute, and so does the first
    step of each other size. ``reduce-overhead`` means CUDA graphs, for a GPU. On a CPU a C++ compiler is needed on
    every node, and for the stock models it did not pay."""
    cuda_graphs: Literal["auto", "on", "off"] = "off"
    """On a GPU: record the passes and the update of a step as CUDA graphs, which replays launch all at once
    (`trainer.engine.graphs`). ``auto`` trains without where a model cannot be recorded, and says why; ``on`` refuses
    such a model. No GPU has run this yet, so it is ``off``."""
    prefetch_batches: int | None = Field(default=None, ge=0, le=16)
    """Batches that a thread gathers ahead; 0: each one in its step. None: see `trainer.data.loader.batches_ahead`."""
    data_on_device: bool = True
    """Keep features and targets in the GPU's memory where they take no more than a quarter of what is free there, and
    gather batches on the GPU. Has no effect without a GPU."""

    learning_rate: float = Field(default=2e-3, gt=0)
    """AdamW's learning rate at its peak, before ``lr_scaling``."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by (global batch / ``lr_base_batch_size``), or by its square root."""
    lr_base_batch_size: int = Field(default=768, ge=1)
    """The global batch, in samples, for which ``learning_rate`` was chosen."""
    warmup_steps: int = Field(default=50, ge=0)
    """Linear warm-up from zero, over at most a tenth of all steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after the warm-up: along half a cosine, or as it is."""
    min_lr_fraction: float = Field(default=0.05, ge=0, le=1)
    """The end of the cosine, as a fraction of its peak."""
    weight_decay: float = Field(default=1e-2, ge=0)
    """AdamW's decoupled weight decay."""
    decay_norms_and_biases: bool = False
    """Whether weights of one dimension, those of norms and biases, decay as well."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest 2-norm of the gradient; None does not clip."""
    clip_value: float | None = Field(default=None, gt=0)
    """Largest absolute value of each element of the gradient, instead of ``clip_norm``, which then is None."""

    eval_frequency: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations on the validation split; None: at the end of each epoch."""
    monitor: str = Field(default="loss", min_length=1)
    """The figure of the validation split by which the best weights are chosen, and by which training stops early:
    ``loss``, or the name of a metric or a measure."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of it is better."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without improvement; None never does."""
    log_frequency: int = Field(default=10, ge=1)
    """Optimizer steps between step events."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints to keep; the best by validation is kept as well."""
    resume: bool = True
    """Continue from the latest checkpoint of the run directory, where there is one."""
    start_from: str | None = None
    """Warm start: the job or the run directory of a finished training of the same model, with whose parameters this one
    begins. Buffers, such as the standardisation of features, are of the new data."""
    start_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """The sha256 of ``model/weights.pt`` there; other weights are not used. None: found there when this is planned."""

    threads_per_rank: int | None = Field(default=None, ge=1)
    """Intra-op threads of torch; None: OMP_NUM_THREADS, else the machine's cores divided by the ranks on it."""
    collective_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long a collective may wait for a peer."""
    max_node_seconds: float | None = Field(default=None, gt=0)
    """Hard budget: at this many paid seconds, over all nodes and launches of the job, a checkpoint is saved and the job
    stops (`trainer.engine.budget`). None: no limit. ``budget.json`` in the run directory takes precedence."""
    regroup: bool = True
    """On a cluster: continue without nodes that are lost, and take in new ones. False: one lost node ends the
    training."""
    health_check_seconds: float = Field(default=0.5, gt=0)
    """Seconds between two heartbeats to a peer; more in a world of more than 256 of them."""
    adaptive_detection: bool = True
    """Whether a peer counts as frozen or cut off as soon as its silence is out of proportion to its silences before
    (`trainer.elastic.peer`); False: after ``peer_timeout_seconds`` only."""
    peer_timeout_seconds: float = Field(default=60.0, gt=0)
    """A peer that has been silent for this long is frozen or cut off, whatever its silences were, and counts as
    lost."""
    communication_retries: int = Field(default=3, ge=0)
    """How often a step is tried again, with exponential backoff, when communication fails and no peer is lost; then
    gradients go through one rank (parameter-server mode)."""
    allreduce_retry_seconds: float = Field(default=60.0, gt=0)
    """In parameter-server mode: seconds until all-reduce is tried again; doubled each time that it fails."""
    communication: Literal["allreduce", "fp16", "topk", "hierarchical"] = "allreduce"
    """How gradients are summed over ranks: exactly, as half precision, the largest of them first, or within nodes
    first (`trainer.parallel.compression`). With ``topk`` a resumed run does not repeat an uninterrupted one bit for
    bit; with ``fp16``, a run of another world size does not repeat it up to rounding of sums. No effect in
    parameter-server mode, and on one rank."""
    topk_fraction: float = Field(default=0.01, gt=0, le=1)
    """The part of each gradient bucket that ``topk`` sends in a step; the rest is kept and added to the next one."""
    strategy: Strategy = "ddp"
    """What a rank holds of the model, its gradients and its moments: all of it (``ddp``), its part of the rows, as all
    ranks share one copy (``fsdp``), or its part of its node's copy (``hsdp``); see docs/performance.md. With
    ``horovod`` it holds all, and Horovod sums the gradients; with ``deepspeed`` DeepSpeed's ZeRO divides what
    ``zero_stage`` says; see docs/frameworks.md."""
    zero_stage: Literal[1, 2, 3] = 1
    """With ``deepspeed``: what ranks divide among them: moments (1), gradients too (2), weights too (3)."""
    gather_precision: Literal["fp32", "bf16"] = "fp32"
    """With ``fsdp`` and ``hsdp``: the type in which parameters are gathered and computed with. Rows, moments and sums
    of gradients stay float32."""
    cpu_offload: bool = False
    """With ``fsdp`` and ``hsdp`` on a GPU: rows, gradients and moments lie in the host's memory between passes, and the
    host updates them. With ``deepspeed``: moments and updates (with stage 3 weights as well) are the host's."""
    activation_checkpointing: bool = False
    """Compute activations within blocks twice instead of keeping them, from the first step on."""
    encryption: Literal["auto", "required", "off"] = "auto"
    """Encrypt traffic between hosts, with certificates that each launch makes for itself. ``auto``: all but what NCCL
    sends between GPUs of several hosts, of which rank 0 says so. ``required``: a job of which anything would leave a
    host unencrypted is refused."""
    tls: TLSConfig | None = None
    """Encrypt with certificates of your own instead; GPUs then sum through the hosts' memory."""
    micro_batch_floor: int = Field(default=8, ge=1)
    """When memory runs out, fewer samples of a micro-batch go through the model at once, down to this many; then
    activations are computed twice instead of kept."""
    solo_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long ranks wait while one works alone: unpacks the dataset, builds the model, saves a checkpoint, evaluates
    the baselines."""
    monitor_interval_seconds: float = Field(default=2.0, gt=0)
    """Seconds between two samples of a node's utilisation."""
    timing: bool = True
    """Measure the segments of each step on every rank, so that a slow network is told from a slow node."""
    hang_seconds: float | None = Field(default=None, gt=0)
    """A rank whose step takes longer reports where it stands (`trainer.engine.reports`). None: 20 s, or 20
    times the median step if that is longer. Never much later than half of ``collective_timeout_seconds``."""
    profile_steps: int | None = Field(default=None, ge=1, le=MOST_TRACED_STEPS)
    """Trace this many optimizer steps of every start, on every rank, to ``<run_dir>/profile/trace-r<rank>-s<last
    step>.json`` (Chrome's trace format); None traces only on request while the job runs: see
    `trainer.observability.trace`."""
    profile_from_step: int = Field(default=0, ge=0)
    """Steps to be done before that trace begins; where a start has done more already, it begins at once."""
    profile_python: bool = True
    """That trace also holds the Python functions that call the operations, and is about twice as large
    (docs/monitoring.md)."""

    @field_validator("tls")
    @classmethod
    def _is_not_off(cls, tls: TLSConfig | None, info: ValidationInfo) -> TLSConfig | None:
        if tls is not None and info.data.get("encryption") == "off":
            raise ValueError("certificates are given and training.encryption is 'off': remove one of the two")
        return tls

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold rows of the parameters, and not all of them."""
        return self.strategy in SHARDED

    @model_validator(mode="after")
    def _clips_once(self) -> DistributedTrainingConfig:
        if self.clip_value is not None and self.clip_norm is not None:
            raise ValueError(
                f"training.clip_value = {self.clip_value} clips instead of clip_norm = {self.clip_norm}: set clip_norm "
                "to None (null)"
            )
        return self

    @model_validator(mode="after")
    def _loss_falls(self) -> DistributedTrainingConfig:
        if self.monitor == "loss" and self.mode == "max":
            raise ValueError(
                "training.mode = 'max' would choose the weights with the greatest loss: name another figure in "
                "training.monitor, or leave mode out"
            )
        return self

    @model_validator(mode="after")
    def _start_is_complete(self) -> DistributedTrainingConfig:
        if self.start_from is None and self.start_sha256 is not None:
            raise ValueError(
                "training.start_sha256 belongs to the weights that training.start_from names: set that too"
            )
        return self

    @model_validator(mode="after")
    def _strategy_fits(self) -> DistributedTrainingConfig:
        if why := explain_strategy(self):
            raise ValueError(why)
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one optimizer step, over all ranks."""
        return self.gradient_accumulation_steps * self.world_size

    @property
    def global_batch_size(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        return self.batch_size_per_gpu * self.micro_batches


@checked_settings("tracking")
@dataclass(kw_only=True, slots=True, config=_STRICT)
class TrackingConfig:
    """The tracking services that rank 0 reports to, besides the run directory."""

    tensorboard: bool = True
    """Write TensorBoard files to ``<run_dir>/tensorboard`` (local run directories only)."""
    mlflow_tracking_uri: str | None = None
    """MLflow server or ``sqlite:///…``; None does not track. Credentials: MLflow's own variables (such as
    MLFLOW_TRACKING_PASSWORD), or the whole address by reference, ``env:NAME`` or ``keyvault://VAULT/SECRET``."""
    mlflow_experiment: str = "dtrain"
    """The experiment that the run belongs to."""
    mlflow_run_name: str | None = None
    """The name of the run; None: the job's id."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Further tags of the run."""
    registered_model: str | None = Field(default=None, pattern=r"^[^/:]+$")
    """The name in MLflow's registry under which the model is registered once it is trained; None: it is not."""


@checked_settings()
@dataclass(kw_only=True, slots=True, config=_STRICT)
class JobConfig:
    """The whole of ``job.json``."""

    schema_version: Literal[1] = 1
    """The version of this file's form."""
    job_id: str = Field(pattern=f"^{JOB_ID.pattern}$")
    """The job's name: letters, digits, dots, dashes and underscores, at most 200."""
    run_dir: str
    """The folder of this job; a path or any fsspec address. All output is written here, see `trainer.rundir`."""
    dataset: DatasetRef
    """What to train on."""
    model: FactoryConfig = Field(default_factory=lambda: FactoryConfig(factory="tcn"))
    """The network."""
    loss: FactoryConfig = Field(default_factory=lambda: FactoryConfig(factory="student_t"))
    """What is minimised."""
    optimizer: OptimizerConfig | None = None
    """What updates the weights; None: AdamW by ``training``. Its learning rates follow the schedule of ``training``, as
    multiples of theirs, unless there is an ``lr_scheduler``."""
    lr_scheduler: FactoryConfig | None = None
    """A scheduler such as ``torch.optim.lr_scheduler:OneCycleLR``, which gets the optimizer and moves on with each
    step; the argument ``"$total_steps"`` stands for the number of all steps. None: the schedule of ``training``."""
    training: DistributedTrainingConfig = Field(default_factory=DistributedTrainingConfig)
    """How to train."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    """Whom to tell of it."""

    @property
    def is_of_script(self) -> bool:
        """Whether a script gives data, model and loss as objects."""
        return self.dataset.uri.startswith(f"{SCRIPT}:")

    @property
    def factories(self) -> list[str]:
        """The names of the parts of the training, and of the function that makes its dataset, where there is one."""
        parts = [config for name in PARTS if (config := getattr(self, name)) is not None]
        return [config.factory for config in parts] + ([self.dataset.factory] if self.dataset.factory else [])

    def to_json(self) -> str:
        """Return the configuration as indented JSON with sorted keys."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)


_JOB = TypeAdapter(JobConfig)


def parse_job(
    text: str, overrides: list[str] | None = None, source: str = "job.json", *, is_stored: bool = False
) -> JobConfig:
    """Return the `JobConfig` in this JSON text.

    ``overrides`` are ``dotted.key=value`` strings as given with ``--set``; a value is read as JSON where it is JSON,
    and as a plain string otherwise. Raise `ConfigError` for a value that cannot be used, and for a secret in any text,
    since ``job.json`` is stored and copied; with ``is_stored``, which says that the text was stored before, secrets are
    not looked for. Settings that older versions had are left out.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a JSON object, not {type(data).__name__}")
    _read_older_values(data, source)
    for override in overrides or []:
        key, separator, raw = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {redact(override)!r}: write it as dotted.key=value, such as training.epochs=3")
        *path, last = key.split(".")
        node = data
        for part in path:
            if node.get(part) is None:  # such as of an optimizer, where a job has none of its own
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise ConfigError(f"--set {redact(override)!r}: {part!r} is not a section of {source}")
        try:
            node[last] = json.loads(raw)
        except json.JSONDecodeError:
            node[last] = raw
    if not is_stored:
        _refuse_secrets(data, source)
    try:
        return _JOB.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError(load(DESCRIBE)(error, JobConfig, source)) from None


def _read_older_values(data: dict[str, Any], source: str) -> None:
    """Leave out settings, and replace values, that only older versions had, and say so."""
    training = data.get("training")
    if not isinstance(training, dict):
        return
    for name in REMOVED.keys() & training:
        _log.info("%s: training.%s is no longer a setting (%s), and is left out", source, name, REMOVED[name])
        del training[name]
    if training.get("communication") == "auto":
        training["communication"] = "allreduce"
        _log.info(
            "%s: training.communication = 'auto' is no longer a value, and is read as 'allreduce': where the network "
            "holds steps up, the alert and `dtrain tune` say what to set",
            source,
        )


_REMEDIES = {
    "tracking.mlflow_tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
    "MLFLOW_TRACKING_TOKEN) where nodes run, or put the whole address into a variable or a vault and write env:NAME or "
    "keyvault://VAULT/SECRET",
    "dataset.uri": "remove it; nodes authenticate with their identity or with variables of their own",
    "run_dir": "remove it; nodes authenticate with their identity or with variables of their own",
}


def _refuse_secrets(node: Any, source: str, where: str = "") -> None:
    """Raise `ConfigError` for the first text of the document that carries a secret; it names only the field."""
    if isinstance(node, str):
        remedy = _REMEDIES.get(where, "remove it, and read it from a variable where it is used")
        try:
            refuse_secret(where, node, remedy)
        except SecretError as error:
            raise ConfigError(f"{source}: {error}") from None
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_secrets(value, source, f"{where}.{key}" if where else str(key))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number there")

"""The check of a training before any node is asked for: data, model, loss and their arguments, and whether the model
fits into the memory of the nodes.

Nodes cost money; a wrong argument is found here within seconds. What a rank needs is `trainer.performance.memory`'s
formula. Memory that a driver or an allocator takes is not counted, so that a training which is refused here could not
have run; one that only just fits is warned of.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.resume_advice import name_larger_skus
from dtrain_dagster.costs.prices import SkuPrice, alternatives_to
from dtrain_dagster.planning.build_plan import PlannedJob
from dtrain_dagster.settings.cluster_kinds import ClusterKind
from dtrain_dagster.support.user_code import stage_files
from dtrain_dagster.support.user_sources import StagingError, resolve_user_sources
from trainer.comm.encryption import refuse_nccl, refuse_own_connections
from trainer.config import PARTS, ConfigError, DistributedTrainingConfig, JobConfig
from trainer.data.manifest import DatasetError, describe, kind_of, load_manifest
from trainer.data.sampler import Sampler, steps_of
from trainer.isolation.runner import RehearsalError, UnsureRehearsalError, rehearse
from trainer.model.allowed_factories import modules_of_settings, refuse_foreign_factories, refuse_other_kinds
from trainer.node.gpus import least_gpu_bytes, visible_gpus
from trainer.performance.memory import (
    GIB,
    ModelBytes,
    RankBytes,
    count_sharing,
    format_bytes,
    most_samples,
    rank_bytes,
    zero_rank_bytes,
)
from trainer.runtime.host_memory import machine_bytes
from trainer.secrets.redaction import redact
from trainer.spec import OWN, ROWS, WINDOWS, DataSpec, RowSpec
from trainer.storage.open import open_storage
from trainer.strategies import PACKAGES, require_package

MAKE_SECONDS = 600.0
"""The most seconds that a function may take to make its datasets here."""

TooSmall = Callable[[SkuPrice, int], str]
"""Why so many nodes of a SKU have too little memory; "" if they have enough, or that is not known."""

ROOM = 64 << 20
"""Bytes that events, logs, reports and the code of a packed model take, at the least."""
_COPIES = 4
"""Copies of the weights in the temporary folder while a model is registered and its server asked."""

SPLITS = ("train", "valid", "test")
FITS = 0.9
"""Share of the memory that a training may need: the rest is for drivers, allocators and buffers."""
MOST_NODES = 64
"""The most nodes that are named as a way out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoom:
    """The memory that each rank of the planned nodes has."""

    bytes: float
    words: str
    """Whose memory it is: ``Standard_NC6s_v3 has 16 GiB for each GPU``."""
    node_count: int
    ranks_per_node: int
    on_gpu: bool = False
    is_shared: bool = False
    """Whether all nodes are on one machine, whose memory they divide."""

    def on_nodes(self, count: int) -> MemoryRoom:
        factor = self.node_count / count if self.is_shared else 1.0
        return replace(self, node_count=count, bytes=self.bytes * factor)


def room_of(kind: ClusterKind, price: SkuPrice, node_count: int, ranks_per_node: int) -> MemoryRoom | None:
    """Return the memory of each rank, None where it is not known: nodes of an engine have what the site gives them."""
    ranks = max(1, ranks_per_node)
    if kind.buys_nodes:
        return room_of_sku(price, node_count, ranks)
    if not kind.is_this_machine:
        return None
    every = node_count * ranks
    if len(visible_gpus(os.environ)) >= every:
        least = least_gpu_bytes()
        if not least:
            return None
        words = f"the smallest GPU of this machine has {format_bytes(least)}"
        return MemoryRoom(bytes=least, words=words, node_count=node_count, ranks_per_node=ranks, on_gpu=True)

    whole = machine_bytes()
    words = f"this machine has {format_bytes(whole)} for {every} rank{'s' if every > 1 else ''}"
    return MemoryRoom(bytes=whole / every, words=words, node_count=node_count, ranks_per_node=ranks, is_shared=True)


def room_of_sku(price: SkuPrice, node_count: int, ranks: int) -> MemoryRoom:
    """Return the memory of each rank of nodes of a SKU: of its GPU, which ranks may have to share, or of the host."""
    if price.gpus:
        on_one = math.ceil(ranks / price.gpus)
        words = f"{price.sku} has {price.gpu_memory_gib} GiB for each GPU" + (f" of {on_one} ranks" * (on_one > 1))
        bytes_ = price.gpu_memory_gib * GIB / on_one
    else:
        words, bytes_ = f"{price.sku} has {price.memory_gib} GiB for {ranks} rank(s)", price.memory_gib * GIB / ranks
    return MemoryRoom(bytes=bytes_, words=words, node_count=node_count, ranks_per_node=ranks, on_gpu=bool(price.gpus))


def need_of(
    model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, samples: int, strategy: str = ""
) -> RankBytes:
    """Return what each rank of these nodes needs, for passes of this many samples. ``strategy``: instead of the
    training's own. With ``cpu_offload`` a GPU has what is gathered alone, and the whole model with DeepSpeed."""
    ranks = room.node_count * room.ranks_per_node
    if (strategy or training.strategy) == "deepspeed":
        need = zero_rank_bytes(model, training.zero_stage, ranks, samples, training.precision)
        if training.cpu_offload and room.on_gpu:
            copies = 2 if training.zero_stage < 3 else 1
            return replace(need, parameters=copies * model.parameters, gradients=0, moments=0)
        return need
    sharing = count_sharing(strategy or training.strategy, ranks, room.ranks_per_node)
    need = rank_bytes(model, sharing, samples, training.precision, training.gather_precision)
    if training.cpu_offload and room.on_gpu and sharing > 1:
        return replace(need, parameters=0, gradients=0, moments=0)
    return need


def why_too_small(model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom) -> str:
    """Return why the model cannot be trained on these nodes with any batch; "" if it can be."""
    need = need_of(model, training, room, 0)
    if need.least <= room.bytes:
        return ""
    gathered = f" ({format_bytes(need.gathered)} of it gathered)" if need.gathered else ""
    return (
        f"does not fit: {format_bytes(need.least)} a rank with training.strategy = {training.strategy!r}{gathered}, "
        f"and {room.words}"
    )


def judge_memory(
    model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, prices: Iterable[SkuPrice] = ()
) -> str:
    """Return a sentence where a training only just fits on these nodes, or only in parts; "" where it fits. Raise
    `ConfigError`, with the remedy, where it cannot run. ``prices``: the SKUs that could be had instead."""
    if why := why_too_small(model, training, room):
        ways = _ways(model, training, room, prices) or ["train a smaller model"]
        raise ConfigError(f"the model {why}; {'; '.join(ways)}")
    batch = training.batch_size_per_gpu
    need = need_of(model, training, room, batch)
    if need.total <= FITS * room.bytes:
        return ""
    said = f"memory is short: {format_bytes(need.total)} a rank with {batch} samples at once, and {room.words}"
    if need.activations:
        most = most_samples(need_of(model, training, room, 1), FITS * room.bytes) or 0
        said += f". At most about {most} fit (training.batch_size_per_gpu)"
        if not training.activation_checkpointing:
            said += "; training.activation_checkpointing = true takes less"
    return "; ".join([said, *_ways_to_share(model, training, room, batch)])


def _ways(
    model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, prices: Iterable[SkuPrice]
) -> list[str]:
    ways = _ways_to_share(model, training, room, 1)
    needed = need_of(model, training, room, 0).least
    memory: Mapping[str, Any] = {"needed_bytes": needed, "device": "cuda" if room.on_gpu else "cpu"}
    if larger := name_larger_skus(prices, memory, room.ranks_per_node):
        ways.append(f"a SKU with {format_bytes(needed)} would, as {larger}")
    if room.is_shared and not ways:
        ways.append("fewer ranks on this machine would have more each (DTRAIN_NODES, DTRAIN_PROCESSES_PER_NODE)")
    return ways


def _ways_to_share(model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, samples: int) -> list[str]:
    """Return how ranks could share the model for passes of this many samples: here, else on the fewest that suffice."""

    def fits(strategy: str, there: MemoryRoom) -> bool:
        return need_of(model, training, there, samples, strategy).total <= FITS * there.bytes

    def each(strategy: str, there: MemoryRoom) -> str:
        return format_bytes(need_of(model, training, there, training.batch_size_per_gpu, strategy).least)

    if training.strategy in ("ddp", "horovod") and room.ranks_per_node > 1 and fits("hsdp", room):
        return [f'training.strategy = "hsdp" would, {each("hsdp", room)} each']
    least = room.node_count + (training.strategy == "fsdp")
    for count in range(least, (room.node_count if room.is_shared else MOST_NODES) + 1):
        there, ranks = room.on_nodes(count), count * room.ranks_per_node
        if ranks > 1 and fits("fsdp", there):
            more = "" if count == room.node_count else f" (DTRAIN_NODES = {count})"
            return [f'training.strategy = "fsdp" on {ranks} ranks would, {each("fsdp", there)} each{more}']
    return []


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a job that nodes could train."""

    sentences: tuple[str, ...] = ()
    """What could not be checked here, or only just fits."""
    model: ModelBytes | None = None
    """The bytes of its model; None if they are not known."""


def check_strategy(training: DistributedTrainingConfig, hosts: int, has_gpus: bool, is_here: bool) -> list[str]:
    """Return sentences on what could not be checked of the package that a strategy needs. ``hosts``, ``has_gpus``: as
    for `check_job`. ``is_here``: whether nodes are on this machine, and have what this Python has. Raise `ConfigError`
    where the package is known to be missing, or where traffic between hosts would be encrypted, which it is not."""
    strategy = training.strategy
    if hosts > 1 and not has_gpus and training.encryption != "off":  # between GPUs NCCL's is not encrypted either
        refuse_own_connections(training)
    if is_here:
        require_package(strategy)
    elif strategy in PACKAGES:
        package = PACKAGES[strategy].partition(".")[0]
        return [f"training.strategy = {strategy!r} needs {package!r} on the nodes, which cannot be seen from here"]
    return []


def check_job(
    job: JobConfig,
    ranks: int,
    rehearses: bool = True,
    hosts: int = 1,
    has_gpus: bool = False,
    room: MemoryRoom | None = None,
    prices: Iterable[SkuPrice] = (),
) -> Checked:
    """Check that nodes could train this job, and return what is known of it then.

    The dataset has samples in each split, and enough for the batch; the loss and the model can be built with their
    arguments and do a training step. Parts of the user's own run in a process without secrets or network. Stock parts
    without arguments are known to work. ``ranks``: those that will run. ``rehearses``: whether the model and the loss
    are tried; they need not be where they have trained before. ``hosts`` and ``has_gpus``: how many machines
    the nodes are on, and whether these are known to have GPUs, which sum by NCCL. ``room``: the memory that each rank
    has there, where it is known; ``prices``: of the SKUs that could be had instead. Raise `ConfigError`, which names
    the field, and `DatasetError` where the dataset cannot be read."""
    refuse_foreign_factories(job)
    refuse_nccl(job.training, hosts, has_gpus)
    data, config = data_of(job), job.training
    samples = data.samples
    refuse_other_kinds(job, data.kind)
    for split in SPLITS if data.spec is not None else ("train",):
        if not samples.get(split):
            how = "choose other split dates" if data.kind == WINDOWS else "build it with other fractions"
            raise ConfigError(f"{job.dataset.uri}: the {split} split has no samples; {how}")
    known = {"loss", *FIGURES.get(data.kind, (config.monitor,))}  # of data of the user's own, who tries its task knows
    if config.monitor not in known:
        raise ConfigError(
            f"training.monitor = {config.monitor!r} is not measured of such data: choose one of "
            f"{', '.join(sorted(known))}"
        )
    Sampler(
        samples=samples["train"],
        global_batch_size=config.global_batch_size,
        micro_batches=config.micro_batches,
        seed=config.seed,
        rank=0,
        world_size=ranks,
        shuffle_block=config.shuffle_block,
    )
    parts = [part for name in PARTS if (part := getattr(job, name)) is not None]
    if data.spec is None:
        return check_memory(Checked(model=data.model), config, room, prices)  # it was tried with its data
    if not rehearses or not any(part.args or ":" in part.factory for part in parts):
        return Checked()
    said, model = tuple[str, ...](), None
    try:
        sources = resolve_user_sources(part.factory for part in parts)
        with tempfile.TemporaryDirectory(prefix="dtrain-check-") as folder:
            stage_files(sources.files, Path(folder))
            steps = steps_of(config, samples["train"])
            model = rehearse(job, data.spec, steps, modules_of_settings(), [Path(folder)])
    except (StagingError, RehearsalError) as error:
        raise ConfigError(str(error)) from None
    except UnsureRehearsalError as error:
        model, said = error.model, (f"model and loss could not be tried out here; the nodes try them first: {error}",)
    return check_memory(Checked(said, model), config, room, prices)


def check_memory(
    checked: Checked, training: DistributedTrainingConfig, room: MemoryRoom | None, prices: Iterable[SkuPrice] = ()
) -> Checked:
    """Return the same, with a sentence where memory is short. Raise `ConfigError` where the model cannot fit."""
    if checked.model is None or room is None:
        return checked
    warning = judge_memory(checked.model, training, room, prices)
    return replace(checked, sentences=(*checked.sentences, warning)) if warning else checked


def memory_of(planned: PlannedJob, checked: Checked) -> tuple[TooSmall, tuple[str, ...]]:
    """Return which other nodes are too small for a planned training, and sentences on what is known of it. Raise
    `trainer.config.ConfigError` where its own nodes are too small."""
    price, count, each = planned.price, planned.node_count, planned.sizes.processes_per_node
    model = checked.model or (planned.script.model if planned.script else None)
    room = room_of(planned.kind, price, count, each)
    prices = tuple(alternatives_to(price.sku).values()) if planned.kind.buys_nodes else ()
    checked = check_memory(replace(checked, model=model), planned.job.training, room, prices)

    def too_small(other: SkuPrice, nodes: int) -> str:
        if model is None or room is None:
            return ""
        if other.sku == price.sku:
            there = room.on_nodes(nodes)
        elif planned.kind.buys_nodes:
            there = room_of_sku(other, nodes, other.gpus or each)
        else:
            return ""  # the price of another SKU stands in for the same nodes
        return why_too_small(model, planned.job.training, there)

    return too_small, checked.sentences


FIGURES = {WINDOWS: ("mse_to_zero", "nll", "pinball", "coverage_90"), ROWS: ("accuracy", "squared_error")}
"""What the validation split may be judged by beside the loss, by the kind of data; the loss says which of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobData:
    """The data of a job."""

    kind: str
    samples: Mapping[str, int]
    dataset_id: str
    spec: DataSpec | RowSpec | None
    """None for a dataset of the user's own."""
    model: ModelBytes | None = None
    """The bytes of the job's model, of which a dataset of the user's own was tried; None for others."""


def data_of(job: JobConfig) -> JobData:
    """Return what is known of a job's data. Model and loss of a job on datasets of the user's own are tried on their
    first samples. Raise `DatasetError` where the data cannot be used, and `ConfigError` where one of their functions is
    not allowed, fails or does not fit."""
    if job.dataset.factory is not None:
        refuse_foreign_factories(job)
        made = _made(job.dataset.uri, json.dumps(job.dataset.args), job.to_json())
        model = ModelBytes(**made["model"])
        return JobData(kind=OWN, samples=made["samples"], dataset_id=made["dataset_id"], spec=None, model=model)
    manifest = load_manifest(open_storage(job.dataset.uri))
    try:
        kind, spec = kind_of(manifest), describe(manifest)
    except ValueError as error:
        raise DatasetError(f"{job.dataset.uri}/manifest.json: {error}") from None
    return JobData(kind=kind, samples=manifest["samples"], dataset_id=manifest["dataset_id"], spec=spec)


@lru_cache(maxsize=8)
def _made(uri: str, args: str, text: str) -> dict[str, Any]:
    """Return what a job on the datasets of a function is, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="dtrain-dataset-") as folder:
        path = Path(folder, "job.json")
        path.write_text(text)
        command = [sys.executable, "-m", "trainer.engine.own_problem", str(path)]
        seen = os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.getcwd()]).strip(os.pathsep)
        try:
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": seen}, capture_output=True, text=True, timeout=MAKE_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"dataset.uri = {uri!r} made no dataset here within {MAKE_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:] or ["it said nothing"]
        raise ConfigError(redact("\n".join(said)))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def room_needed(model: ModelBytes | None, keep_checkpoints: int) -> dict[str, int]:
    """Return the bytes that a training needs in its storage, in the home and in the temporary folder. Pure."""
    weights, checkpoint = 0, 0
    if model is not None:
        weights, checkpoint = model.parameters, model.parameters + 2 * model.trained
    return {  # of checkpoints there are the best one and one that is being written besides
        "storage": ROOM + weights + (keep_checkpoints + 2) * checkpoint,
        "home": ROOM + weights,
        "temporary": ROOM + _COPIES * weights,
    }


def try_places(shared_uri: str, home: str, needed: Mapping[str, int]) -> list[str]:
    """Write to the storage of jobs, to the home and to the temporary folder, and return what is wrong with them. Disks
    are asked for room as long as they are of this machine; one that several places are on has to have it for all."""
    storage, name, problems = open_storage(shared_uri), f"dtrain-tried-{uuid.uuid4().hex[:8]}", []
    try:
        storage.write(name, b"")
        storage.delete(name)
    except Exception as error:  # each kind of storage has errors of its own
        problems.append(f"{redact(shared_uri)} cannot be written to ({redact(str(error))}): see DTRAIN_STORAGE")
    places = {"home": (Path(home), "DTRAIN_HOME"), "temporary": (Path(tempfile.gettempdir()), "TMPDIR")}
    if storage.is_local:
        places["storage"] = storage.local_path(), "DTRAIN_HOME"
    disks: dict[int, list[str]] = defaultdict(list)
    for place, (folder, setting) in places.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                disks[folder.stat().st_dev].append(place)
        except OSError as error:
            problems.append(f"{folder} cannot be written to ({error.strerror or error}): see {setting}")
    for of_disk in disks.values():
        folder, total = places[of_disk[0]][0], sum(needed[place] for place in of_disk)
        if (free := shutil.disk_usage(folder).free) < total:
            settings = " or ".join(sorted({places[place][1] for place in of_disk}))
            problems.append(
                f"the disk of {folder} has {free / 1e9:.3g} GB left, and this training needs {total / 1e9:.3g} GB "
                f"(checkpoints, the registered model, and copies on its way): make room, or see {settings}"
            )
    return problems

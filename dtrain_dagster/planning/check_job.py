"""The check of a training before any node is asked for: data, model, loss and their arguments.

Nodes cost money; a wrong argument is found here within seconds.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from dtrain_dagster.planning.job_data import data_of
from dtrain_dagster.support.user_code import stage_files
from dtrain_dagster.support.user_sources import StagingError, resolve_user_sources
from trainer.comm.encryption import refuse_nccl
from trainer.config import ConfigError, JobConfig
from trainer.data.sampler import Sampler
from trainer.isolation.rehearsal import RehearsalError, UnsureRehearsalError, rehearse
from trainer.model.allowed_factories import modules_of_settings, refuse_foreign_factories, refuse_other_kinds
from trainer.spec import WINDOWS
from trainer.strategies import PACKAGES, require_package

SPLITS = ("train", "valid", "test")
"""The splits that every training reads."""


def check_strategy(strategy: str, is_here: bool) -> list[str]:
    """Return sentences on what could not be checked of the package that a strategy needs. ``is_here``: whether nodes
    are on this machine, and have what this Python has. Raise `ConfigError` where it is known to be missing."""
    if is_here:
        require_package(strategy)
    elif strategy in PACKAGES:
        package = PACKAGES[strategy].partition(".")[0]
        return [f"training.strategy = {strategy!r} needs {package!r} on the nodes, which cannot be seen from here"]
    return []


def check_job(job: JobConfig, ranks: int, rehearses: bool = True, hosts: int = 1, has_gpus: bool = False) -> list[str]:
    """Check that nodes could train this job, and return sentences on what could not be checked here.

    The dataset has samples in each split, and enough for the batch; the loss and the model can be built with their
    arguments and do a training step. Parts of the user's own run in a process without secrets or network. Stock parts
    without arguments are known to work. ``ranks``: those that will run. ``rehearses``: whether the model and the loss
    are tried; they need not be where they have trained before. ``hosts`` and ``has_gpus``: how many machines
    the nodes are on, and whether these are known to have GPUs, which sum by NCCL. Raise `ConfigError`, which names the
    field, and `DatasetError` where the dataset cannot be read."""
    refuse_foreign_factories(job)
    refuse_nccl(job.training, hosts, has_gpus)
    data, config = data_of(job), job.training
    samples = data.samples
    refuse_other_kinds(job, data.kind)
    for split in SPLITS if data.spec is not None else ("train",):
        if not samples.get(split):
            how = "choose other split dates" if data.kind == WINDOWS else "build it with other fractions"
            raise ConfigError(f"{job.dataset.uri}: the {split} split has no samples; {how}")
    Sampler(
        samples=samples["train"],
        global_batch_size=config.global_batch_size,
        micro_batches=config.micro_batches,
        seed=config.seed,
        rank=0,
        world_size=ranks,
        shuffle_block=config.shuffle_block,
    )
    parts = (job.model, job.loss)
    if data.spec is None:
        return [] if not rehearses else ["model and loss were not tried out here: a dataset of your own has no spec"]
    if not rehearses or not any(part.args or ":" in part.factory for part in parts):
        return []
    try:
        sources = resolve_user_sources(part.factory for part in parts)
        with tempfile.TemporaryDirectory(prefix="dtrain-check-") as folder:
            stage_files(sources.files, Path(folder))
            rehearse(asdict(job.model), asdict(job.loss), data.spec, modules_of_settings(), [Path(folder)])
    except (StagingError, RehearsalError) as error:
        raise ConfigError(str(error)) from None
    except UnsureRehearsalError as error:
        return [f"model and loss could not be tried out here, nodes will tell: {error}"]
    return []

"""What a caller's own loaders ask for, in the terms of a training whose samples are dealt by its sampler.

Decisions about a caller's `torch.utils.data.DataLoader` belong here: what is taken over, what cannot be honoured and is
refused by name, and what runs with a guarantee fewer, which is told. Reading samples is `trainer.data.dataset_data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from trainer.data.dataset_data import DatasetData
from trainer.data.loader_workers import ReadOptions
from trainer.errors import ConfigError

_UNDERSTOOD = (RandomSampler, SequentialSampler, DistributedSampler)


@dataclass(frozen=True, slots=True)
class LoaderRequest:
    """What a caller gave for one split."""

    dataset: Dataset[Any]
    batch_size: int | None
    """None where a dataset was given."""
    options: ReadOptions
    notes: tuple[str, ...]
    """What is different from the caller's loader, as sentences."""


def read_request(given: Dataset[Any] | DataLoader[Any], split: str) -> LoaderRequest:
    """Return what a dataset or a loader asks for. Raise `ConfigError`, which names the part and the remedy, for what
    cannot be honoured."""
    if not isinstance(given, DataLoader):
        return LoaderRequest(given, None, ReadOptions(), ())
    what = f"the {split} loader"
    if isinstance(given.dataset, IterableDataset):
        raise ConfigError(
            f"{what} reads {type(given.dataset).__name__}, an iterable dataset: its samples have no positions, so they "
            "cannot be dealt to nodes that come and go, nor be used exactly once. Give a map-style dataset "
            "(__getitem__ and __len__)"
        )
    if given.batch_size is None or type(given.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"{what} has a batch_sampler of its own ({type(given.batch_sampler).__name__}): the trainer decides "
            "which samples form a batch, the same ones at any number of nodes. Give batch_size instead"
        )
    sampler = given.sampler
    if type(sampler) not in _UNDERSTOOD:
        raise ConfigError(
            f"{what} has the sampler {type(sampler).__name__}: the trainer decides the order of samples, and uses "
            "each once per epoch. Leave the sampler out; to weight samples, multiply their losses"
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise ConfigError(
            f"{what} draws {sampler.num_samples} samples with replacement or in part, and the trainer uses each sample "
            "once per epoch: leave replacement and num_samples out"
        )
    notes = list[str]()
    if split == "train":
        if isinstance(sampler, SequentialSampler):
            notes.append("the training loader does not shuffle; the trainer does, by training.seed and epoch")
        if given.drop_last:
            notes.append("the training loader drops the last samples; the trainer uses each sample once per epoch")
    options = ReadOptions(
        collate_fn=None if given.collate_fn is default_collate else given.collate_fn,
        num_workers=given.num_workers,
        prefetch_factor=given.prefetch_factor if given.num_workers else None,
        pin_memory=given.pin_memory,
        worker_init_fn=given.worker_init_fn,
        timeout=given.timeout,
        multiprocessing_context=given.multiprocessing_context,
    )
    return LoaderRequest(given.dataset, given.batch_size, options, tuple(notes))


def join_requests(by_split: Mapping[str, LoaderRequest], name: str | None = None) -> DatasetData:
    """Return the data of a training from the requests for its splits. Each loader's samples are read as it says; those
    of a dataset that was given without one, as the training loader says."""
    train = by_split["train"]
    datasets = {split: request.dataset for split, request in by_split.items()}
    options = {
        split: train.options if request.batch_size is None else request.options for split, request in by_split.items()
    }
    return DatasetData(datasets["train"], datasets.get("valid"), datasets.get("test"), options=options, name=name)

"""Datasets that a function of the user's own makes on each node: ``dataset.uri = "factory:package.module:function"``.

Called with ``dataset.args``, it returns a map-style dataset for training, or a mapping with some of ``train``,
``valid`` and ``test``. All nodes must get the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.data import Dataset

from trainer.config import FactoryConfig, JobConfig
from trainer.data.dataset_data import DatasetData
from trainer.data.kinds import SPLITS
from trainer.data.manifest import DatasetError
from trainer.errors import ConfigError
from trainer.model.factories import build_from_factory


def open_own_dataset(job: JobConfig) -> DatasetData:
    """Return the datasets that the function of a job makes. Raise `ConfigError` where it is not allowed, fails or
    returns something else, and `DatasetError` where they are not those that the job expects."""
    assert job.dataset.factory is not None
    made = build_from_factory("dataset", FactoryConfig(factory=job.dataset.factory, args=job.dataset.args), {})
    where = f"dataset.factory = {job.dataset.factory!r}"
    if not isinstance(made, Mapping):
        made = {"train": made}
    if unknown := sorted(set(map(str, made)) - set(SPLITS)):
        raise ConfigError(
            f"{where} returned a mapping with the unknown key {unknown[0]!r}; known keys are {', '.join(SPLITS)}"
        )
    if not isinstance(made.get("train"), Dataset) and not hasattr(made.get("train"), "__getitem__"):
        raise ConfigError(
            f"{where} returned no training dataset but a {type(made.get('train')).__name__}: return a map-style "
            'dataset (__getitem__ and __len__), or {"train": …, "valid": …, "test": …}'
        )
    data = DatasetData(train=made["train"], valid=made.get("valid"), test=made.get("test"))
    expected = job.dataset.dataset_id
    if expected is not None and data.dataset_id != expected:
        raise DatasetError(
            f"{where} made {data.dataset_id!r} here, and dataset.dataset_id = {expected!r}: all nodes must get "
            "the same samples in the same order"
        )
    return data

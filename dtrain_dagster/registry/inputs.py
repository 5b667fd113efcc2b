"""The inputs of the test split as a registered model takes them: windows, or rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dtrain_dagster.registry.run_model import RunModel
from trainer.spec import RowSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.data.row_data import RowData
    from trainer.data.shards import DataShardManager


class StoredInputs(Protocol):
    """The interface of the inputs of a test split."""

    @property
    def count(self) -> int:
        """Their number."""
        ...

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of their dataset."""
        ...

    def inputs(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return those at these positions, 0 … count - 1: windows float32, rows float64."""
        ...

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what ``predictions.npz`` calls their rows."""
        ...


def open_inputs(own: RunModel, cache_dir: str | None) -> StoredInputs:
    """Return the inputs of the test split of a model's data. Raise DatasetError where it cannot be read."""
    uri, dataset_id = own.job.dataset.uri, own.spec.dataset_id
    if isinstance(own.spec, RowSpec):
        from trainer.data.row_data import RowData  # not above: torch

        return _TableInputs(RowData(uri, cache_dir, dataset_id))
    from trainer.data.shards import DataShardManager

    return _WindowInputs(DataShardManager(uri, cache_dir, dataset_id))


class _WindowInputs:
    def __init__(self, shards: DataShardManager) -> None:
        self.shards, self.count, self.manifest = shards, shards.count("test"), shards.manifest

    def inputs(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.shards.gather(self.rows(positions))[0].numpy()

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.shards.end_rows("test", positions)


class _TableInputs:
    def __init__(self, data: RowData) -> None:
        self.data, self.count, self.manifest = data, data.count("test"), data.manifest

    def inputs(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.data.original("test", positions)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions

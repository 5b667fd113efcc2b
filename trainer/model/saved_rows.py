"""A trained model of rows, for the scoring server and for checks; `trainer.model.saved_model` loads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.spec import RowSpec

BATCH = 1 << 14
"""Rows that go through the model at once: bounds the memory of a large request."""


class SavedRows:
    """A trained model that forecasts from rows as they were before they were stored, on the CPU."""

    def __init__(self, model: nn.Module, criterion: nn.Module, spec: RowSpec, description: dict[str, Any]) -> None:
        self.model, self.criterion = model.eval(), criterion
        self.spec = spec
        self._mean, self._std = np.array(spec.feature_mean), np.array(spec.feature_std)  # 0 and 1 for a category
        self.description = description
        self.columns = tuple(self._batch(torch.zeros(2, len(spec.features))))
        """Names of what `predict` gives, in order."""

    def predict(self, rows: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for rows (n, columns), float64: numbers as they are, not a number where one is
        missing; categories as codes, from 1 in the order of their values, 0 for a missing or unknown one.

        A regression gives ``prediction``, in the target's unit. Classes give ``prediction``, the code of the most
        probable class, and the probabilities of the classes, ``probability_0`` …; a loss that knows neither gives the
        model's raw outputs. Raise ValueError for a wrong shape, and for a value that no training row could have.
        """
        spec = self.spec
        array = np.asarray(rows, dtype=np.float64)
        if array.ndim != 2 or array.shape[1] != len(spec.features):
            raise ValueError(
                f"the input has shape {array.shape}; expected (n, {len(spec.features)}): n rows of "
                f"{', '.join(spec.features)}"
            )
        for place, (name, values, missing) in enumerate(
            zip(spec.features, spec.categories, spec.has_missing, strict=True)
        ):
            column = array[:, place]
            if values and not (np.isin(column, np.arange(len(values) + 1))).all():
                raise ValueError(
                    f"{name} is a category: give the code of its value, from 1 to {len(values)} in the order of the "
                    "dataset's manifest, or 0 for a missing or unknown one"
                )
            if not values and (np.isinf(column).any() or (np.isnan(column).any() and not missing)):
                raise ValueError(f"{name} holds a value that is missing or infinite, and no training row lacked it")
        with np.errstate(over="ignore"):
            stored = ((array - self._mean) / self._std).astype(np.float32)
        if np.isinf(stored).any():
            name = spec.features[int(np.flatnonzero(np.isinf(stored).any(axis=0))[0])]
            raise ValueError(f"{name} holds a value that is too far outside the range of the training rows")
        batches = [self._batch(torch.from_numpy(stored[at : at + BATCH])) for at in range(0, len(stored), BATCH)]
        return {name: np.concatenate([batch[name] for batch in batches] or [np.empty(0)]) for name in self.columns}

    def _batch(self, rows: Tensor) -> dict[str, NDArray[np.float64]]:
        criterion: Any = self.criterion
        with torch.inference_mode():
            outputs = self.model(rows)
            if callable(getattr(criterion, "probabilities", None)):
                found = criterion.probabilities(outputs)
                columns = {"prediction": found.argmax(1)}
                columns |= {f"probability_{code}": column for code, column in enumerate(found.unbind(1))}
            elif callable(getattr(criterion, "point", None)):
                columns = {"prediction": criterion.point(outputs)}
            else:
                columns = {f"prediction_{number + 1}": column for number, column in enumerate(outputs.unbind(1))}
        return {name: column.double().numpy() for name, column in columns.items()}

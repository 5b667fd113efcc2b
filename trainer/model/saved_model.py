"""A trained model, loaded from the two files that a job writes, for the scoring server and for checks.

    model/weights.pt   the weights (tensors only), standardisation included
    model/model.json   model and loss factories, `DataSpec`, the loss's ``correction`` where one was found after the
                       training, and the sha256 of the file above; written last

Importing this needs torch, numpy and pydantic, and forecasting scipy; nothing else: it runs in the scoring server.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from trainer.config import FactoryConfig
from trainer.documents.factory_arguments import is_correction
from trainer.model.build import KINDS, build_loss, build_model
from trainer.model.losses import gives_predictive
from trainer.model.raw_rows import stored_rows
from trainer.setting_errors import describe_errors
from trainer.spec import WINDOWS, DataSpec, RowSpec

FOLDER = "model"
DESCRIPTION = "model.json"
WEIGHTS = "weights.pt"
QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
BATCH = 4096
"""Windows or rows that go through the model at once: bounds the memory of a large request."""


class SavedModelError(ValueError):
    """An error for a saved model that cannot be used. The message says which file, what is wrong, and the remedy."""


class SavedModel:
    """A trained model that forecasts on the CPU, from raw feature windows, or from rows as they were before they were
    stored."""

    def __init__(
        self, model: nn.Module, criterion: nn.Module, spec: DataSpec | RowSpec, description: dict[str, Any]
    ) -> None:
        self.model, self.criterion = model.eval(), criterion
        self.spec = spec
        self.description = description
        shape = (len(spec.features),) if isinstance(spec, RowSpec) else (spec.window, len(spec.features))
        self.columns = tuple(self._batch(torch.zeros(2, *shape)))
        """Names of what `predict` gives, in order."""

    def predict(self, samples: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for windows (n, window, features) float32, or rows (n, columns) float64: numbers as
        they are, not a number where one is missing; categories as codes, from 1 in the order of their values, 0 for a
        missing or unknown one.

        Of windows, a loss that predicts a distribution gives ``mu``, ``sigma`` (the scale), ``nu`` (degrees of freedom;
        left out for a normal distribution, where it is infinite) and the quantiles ``q05`` … ``q95``. Of rows, one of
        classes gives ``prediction``, the code of the most probable class, and the probabilities of the classes,
        ``probability_0`` …. One with a point forecast gives ``prediction``; any other the model's raw outputs,
        ``prediction_1`` …, or ``prediction`` for the one output of a window. All but ``nu``, codes, probabilities and
        raw outputs are in the unit of the target. Raise ValueError for a wrong shape, and for a value that is not
        finite, or that no training row could have.
        """
        spec = self.spec
        given = _stored_rows(spec, samples) if isinstance(spec, RowSpec) else _checked_windows(spec, samples)
        batches = [self._batch(torch.from_numpy(given[at : at + BATCH])) for at in range(0, len(given), BATCH)]
        return {name: np.concatenate([batch[name] for batch in batches] or [np.empty(0)]) for name in self.columns}

    def predict_columns(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        """Return the same for rows of a table as people have them, see `trainer.model.raw_rows.stored_rows`, which says
        what is raised."""
        assert isinstance(self.spec, RowSpec)
        return self.predict(stored_rows(self.spec, columns))

    def _batch(self, samples: Tensor) -> dict[str, NDArray[np.float64]]:
        criterion: Any = self.criterion
        is_row = isinstance(self.spec, RowSpec)
        with torch.inference_mode():
            outputs = self.model(samples)
            if not is_row and gives_predictive(criterion):
                predictive = criterion.predictive(outputs)
                columns = {"mu": predictive.mu, "sigma": predictive.sigma}
                if not torch.isinf(predictive.nu).all():  # JSON knows no infinity
                    columns["nu"] = predictive.nu
                columns |= {name: predictive.quantile(level) for name, level in QUANTILES.items()}
            elif is_row and callable(getattr(criterion, "probabilities", None)):
                found = criterion.probabilities(outputs)
                columns = {"prediction": found.argmax(1)}
                columns |= {f"probability_{code}": column for code, column in enumerate(found.unbind(1))}
            elif callable(getattr(criterion, "point", None)):
                columns = {"prediction": criterion.point(outputs)}
            elif not is_row and outputs.shape[1] == 1:
                columns = {"prediction": outputs[:, 0]}
            else:
                columns = {f"prediction_{number + 1}": column for number, column in enumerate(outputs.unbind(1))}
        return {name: column.double().numpy() for name, column in columns.items()}


def _checked_windows(spec: DataSpec, windows: NDArray[Any]) -> NDArray[np.float32]:
    """Return windows as a model takes them. Raise ValueError for a wrong shape, and for a value that is not finite."""
    array = np.asarray(windows, dtype=np.float32)
    if array.ndim != 3 or array.shape[1:] != (spec.window, len(spec.features)):
        raise ValueError(
            f"the input has shape {array.shape}; expected (n, {spec.window}, {len(spec.features)}): n windows of "
            f"{spec.window} days, oldest first, each with {', '.join(spec.features)}"
        )
    bad = np.flatnonzero(~np.isfinite(array).all(axis=(1, 2)))
    if len(bad):
        raise ValueError(
            f"window {bad[0]} holds a value that is not finite ({len(bad)} of {len(array)} windows do): "
            "leave out windows with missing days"
        )
    return array


def _stored_rows(spec: RowSpec, rows: NDArray[Any]) -> NDArray[np.float32]:
    """Return rows as they are stored. Raise ValueError for a wrong shape, and for a value that no training row could
    have."""
    array = np.asarray(rows, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != len(spec.features):
        raise ValueError(
            f"the input has shape {array.shape}; expected (n, {len(spec.features)}): n rows of "
            f"{', '.join(spec.features)}"
        )
    for column, name, values, missing in zip(array.T, spec.features, spec.categories, spec.may_miss, strict=True):
        if values and not np.isin(column, np.arange(len(values) + 1)).all():
            raise ValueError(
                f"{name} is a category: give the code of its value, from 1 to {len(values)} in the order of the "
                "dataset's manifest, or 0 for a missing or unknown one"
            )
        if not values and (np.isinf(column).any() or (np.isnan(column).any() and not missing)):
            raise ValueError(f"{name} holds a value that is missing or infinite, and no row of the table lacked it")
    with np.errstate(over="ignore"):  # of a category the mean is 0, and the deviation 1
        stored = ((array - np.array(spec.feature_mean)) / np.array(spec.feature_std)).astype(np.float32)
    if np.isinf(stored).any():
        name = spec.features[int(np.flatnonzero(np.isinf(stored).any(axis=0))[0])]
        raise ValueError(f"{name} holds a value that is too far outside the range of the training rows")
    return stored


def load_saved_model(read: Callable[[str], bytes], modules: tuple[str, ...] | None = None) -> SavedModel:
    """Load a job's model. ``read(name)`` returns the content of ``model.json`` and ``weights.pt``. ``modules``: the
    modules that its factories may be in; None: those of the settings (`trainer.model.allowed_factories`).

    Nothing is unpickled but tensors, and only once the sha256 is right. Raise `SavedModelError` if the files are
    damaged, and `ConfigError` for a factory that is not allowed or cannot be found.
    """
    try:
        description = json.loads(read(DESCRIPTION))
        data = read(WEIGHTS)
    except FileNotFoundError as error:
        raise SavedModelError(f"the saved model is incomplete: {error.filename} is missing; train again") from error
    except (ValueError, RecursionError) as error:
        raise SavedModelError(f"{DESCRIPTION} is not JSON: {error}") from error
    if not isinstance(description, dict):
        raise SavedModelError(f"{DESCRIPTION} holds a {type(description).__name__} instead of a JSON object")
    expected, digest = description.get("file_sha256"), hashlib.sha256(data).hexdigest()
    if digest != expected:
        raise SavedModelError(
            f"{WEIGHTS} has sha256 {digest[:12]}…, {DESCRIPTION} says {str(expected)[:12]}…: it is damaged or was "
            "changed; do not use it, train again"
        )
    kind = description.get("kind", WINDOWS)
    if kind not in KINDS:
        raise SavedModelError(
            f"{DESCRIPTION} is of a dataset of kind {str(kind)[:40]!r}, whose models are neither registered nor served "
            f"(only those of {' and '.join(KINDS)} are): load {WEIGHTS} into a module of your own"
        )
    try:
        config = TypeAdapter(FactoryConfig).validate_python(description["model"])
        loss = TypeAdapter(FactoryConfig).validate_python(description["loss"])
        spec: Any = TypeAdapter(KINDS[kind].spec).validate_python(description["spec"])
    except KeyError as error:
        raise SavedModelError(f"{DESCRIPTION} lacks {error}; it was written by another version, train again") from error
    except ValidationError as error:
        raise SavedModelError(describe_errors(error, FactoryConfig, DESCRIPTION)) from None
    criterion: Any = build_loss(loss, spec, modules)
    if correction := description.get("correction"):
        allowed = getattr(criterion, "corrections", ())
        if not is_correction(correction) or not set(correction) <= set(allowed):
            raise SavedModelError(
                f"{DESCRIPTION} has a correction of loss.factory = {loss.factory!r} that is none: finite numbers for "
                f"{', '.join(allowed) or 'no argument at all'} are one; train again"
            )
        criterion = build_loss(replace(loss, args={**loss.args, **correction}), spec, modules)
    model = build_model(config, spec, criterion.outputs, modules)
    refuse_unpacking(data)
    try:
        weights = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile pickle makes of it
        raise SavedModelError(f"{WEIGHTS} holds something other than tensors, and was not loaded: {error}") from error
    _check_shapes(weights, model, config)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise SavedModelError(
            f"{WEIGHTS} do not fit model.factory = {config.factory!r} with {config.args!r}: {error}; "
            "its code has changed since it was trained"
        ) from error
    return SavedModel(model, criterion, spec, description)


def refuse_unpacking(data: bytes) -> None:
    """Raise `SavedModelError` for a file that grows when it is read: `torch.save` compresses nothing."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError):
        return  # `torch.load` says what it is
    if any(info.compress_type != zipfile.ZIP_STORED for info in members) or (
        sum(info.file_size for info in members) > len(data)
    ):
        raise SavedModelError(f"{WEIGHTS} is compressed, which the trainer never does: do not use it, train again")


def _check_shapes(weights: Any, model: nn.Module, config: FactoryConfig) -> None:
    """Raise `SavedModelError` for a tensor of another shape or kind than the model's: a few bytes may claim to be a
    million times as many, which must not be copied."""
    if not isinstance(weights, dict):
        raise SavedModelError(f"{WEIGHTS} holds something other than named tensors, and was not loaded")
    for name, tensor in model.state_dict().items():
        found = weights.get(name)
        if isinstance(found, Tensor) and (found.shape != tensor.shape or found.layout != tensor.layout):
            raise SavedModelError(
                f"{WEIGHTS} do not fit model.factory = {config.factory!r} with {config.args!r}: {name} has the shape "
                f"{tuple(found.shape)}, expected {tuple(tensor.shape)}; its code has changed since it was trained"
            )

"""A training that begins with the parameters of another one's finished model, instead of fresh ones."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, JobConfig
from trainer.model.saved_model import SavedModelError, refuse_unpacking
from trainer.rundir import WEIGHTS, resolve_start
from trainer.storage.open import open_storage


def begin_from(module: nn.Module, job: JobConfig) -> None:
    """Give the module the parameters that ``training.start_from`` names, if it names any. Its buffers stay as they are:
    the standardisation belongs to the data that is trained on now. A checkpoint of this job takes precedence, and is
    restored afterwards.

    Raise `ConfigError` for weights that are missing, are not those that were meant, or do not fit the model.
    """
    config = resolve_start(job).training
    if config.start_from is None:
        return
    where = f"training.start_from = {config.start_from!r}"
    try:
        data = open_storage(config.start_from).read(WEIGHTS)
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: there is no {WEIGHTS}; name the run directory of a training that finished"
        ) from None
    if (digest := hashlib.sha256(data).hexdigest()) != config.start_sha256:
        meant = f"training.start_sha256 = {config.start_sha256!r}"
        raise ConfigError(
            f"{where}: {WEIGHTS} has the sha256 {digest}, but {meant}: the file was changed, or the setting means "
            "another one"
        )
    copy_parameters(module, _read(data, where), where)


def copy_parameters(module: nn.Module, weights: dict[str, Any], where: str) -> None:
    """Copy parameters by name. Raise `ConfigError`, before anything is copied, where one is missing or has another
    shape."""
    own = dict(module.named_parameters())
    for name, parameter in own.items():
        found = weights.get(name)
        if not isinstance(found, Tensor) or found.shape != parameter.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else "none"
            raise ConfigError(
                f"{where}: {name} has the shape {shape} there and {tuple(parameter.shape)} here: start from the "
                "weights of the same model, with the same arguments and the same columns"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _read(data: bytes, where: str) -> dict[str, Any]:
    try:
        refuse_unpacking(data)
        weights = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except SavedModelError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:  # whatever a damaged or hostile pickle makes of it
        raise ConfigError(
            f"{where}: {WEIGHTS} holds something other than tensors, and was not loaded: {error}"
        ) from None
    if not isinstance(weights, dict):
        raise ConfigError(f"{where}: {WEIGHTS} does not hold named tensors")
    return weights

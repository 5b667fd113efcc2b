"""A script's trained model as a program of torch (`torch.export`), which needs nothing of the script.

    model/program.pt2    the exported program: its graph and weights; one tensor in, one number or K for each sample out
    model/example.npz    some samples of the test split (inputs), and what the trained model said to them (outputs)
    model/program.json   the shape of a sample, and the sha256 of both files; written last

Importing this needs torch and numpy alone: it runs in the scoring server.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PROGRAM, EXAMPLE, DESCRIPTION = "program.pt2", "example.npz", "program.json"
DIGESTS = {PROGRAM: "program_sha256", EXAMPLE: "example_sha256"}
"""The entries of `DESCRIPTION` with the digests of the files."""
MOST_OUTPUTS = 1000
"""The most numbers that a model gives for a sample: each is a named column of an answer."""
BATCH = 1024
"""Samples that go through the program at once."""
_PICKLED = ("custom_obj", "opaque_obj")
"""What names of members begin with that only pickle could read."""


class ProgramError(ValueError):
    """A model that cannot become such a program, or a file that is none. The message says why, and the remedy."""


def export_program(model: nn.Module, inputs: Any) -> bytes:
    """Return the program of a model on the CPU for batches like ``inputs`` (B, …) of any size B, at least 2 here. Raise
    `ProgramError` for one that cannot be exported."""
    if not isinstance(inputs, Tensor):
        raise ProgramError(
            f"a registered model takes one tensor, and the inputs of these batches are a {type(inputs).__name__}: let "
            "the dataset give pairs of one tensor and the target"
        )
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(inputs)
            if (
                not isinstance(outputs, Tensor)
                or outputs.ndim not in (1, 2)
                or outputs.shape[1:].numel() > MOST_OUTPUTS
            ):
                got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
                raise ProgramError(
                    f"a registered model gives (batch,) or (batch, K) with K up to {MOST_OUTPUTS}, and this one gives "
                    f"{got} for a batch of {tuple(inputs.shape)}: let it pool or choose within forward"
                )
            dynamic = ({0: torch.export.Dim.DYNAMIC},)
            found = torch.export.export(model, (inputs,), dynamic_shapes=dynamic)
        buffer = io.BytesIO()
        torch.export.save(found, buffer)
        data = buffer.getvalue()
        _refuse_pickled(data)
        load_program(data)
    except ProgramError:
        raise
    except Exception as error:  # torch's own and the model's
        said = str(error).strip().partition("\n")[0]
        raise ProgramError(
            f"the model cannot be exported by torch.export ({type(error).__name__}: {said}): write forward without "
            "branches on values of tensors and without a fixed size of the batch"
        ) from error
    return data


def load_program(data: bytes) -> Callable[[Tensor], Tensor]:
    """Return the function of a program. Nothing of it is unpickled but tensors. Raise `ProgramError` for a file that is
    none, or holds anything else."""
    _refuse_pickled(data)
    try:
        return torch.export.load(io.BytesIO(data)).module()
    except Exception as error:  # whatever a damaged file makes of it
        raise ProgramError(f"{PROGRAM} is not a program of torch.export: {error}") from error


def _refuse_pickled(data: bytes) -> None:
    """Raise `ProgramError` for an archive with an object that torch would unpickle, or that grows as it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            is_packed = any(item.compress_type != zipfile.ZIP_STORED for item in members)
            if is_packed or sum(item.file_size for item in members) > len(data):
                raise ProgramError(f"{PROGRAM} is compressed, which the trainer never does: do not use it, train again")
            for item in members:
                name = item.filename.rpartition("/")[2]
                if name.startswith(_PICKLED):
                    raise ProgramError(f"{PROGRAM} holds {name}, an object that only pickle can read: {_REMEDY}")
                if name.endswith("_config.json") and _is_pickled(json.loads(archive.read(item))):
                    raise ProgramError(f"{PROGRAM} holds a tensor of a class of its own: {_REMEDY}")
    except (zipfile.BadZipFile, ValueError, RecursionError, OSError) as error:
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"{PROGRAM} is not a program of torch.export: {error}") from error


_REMEDY = "let the model hold plain tensors alone"


def _is_pickled(document: Any) -> bool:
    """Return whether an entry says that it is pickled. Older forms, which do not say so, were pickled as a whole."""
    entries = document.get("config") if isinstance(document, Mapping) else None
    if not isinstance(entries, Mapping):
        return True
    return any(not isinstance(entry, Mapping) or entry.get("use_pickle") is not False for entry in entries.values())


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """A program and its description, checked against each other."""

    description: Mapping[str, Any]
    run: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.description["shape"])

    def predict(self, samples: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return the outputs as named columns (n,), as `as_columns` does, for samples (n, …). Raise ValueError for
        another shape."""
        array = np.asarray(samples, dtype=self.description["dtype"])
        if array.shape[1:] != self.shape:
            raise ValueError(f"the input has shape {array.shape}; expected (n, {', '.join(map(str, self.shape))})")
        found = []
        with torch.inference_mode():
            for at in range(0, max(1, len(array)), BATCH):
                found.append(self.run(torch.from_numpy(np.array(array[at : at + BATCH]))).double().numpy())
        return as_columns(np.concatenate(found))


def as_columns(outputs: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """Return outputs (n,) or (n, K) as named columns (n,): ``prediction``, or ``prediction_1`` … ``prediction_K``."""
    table = outputs.astype(np.float64)
    table = table[:, None] if table.ndim == 1 else table
    if table.shape[1] == 1:
        return {"prediction": table[:, 0]}
    return {f"prediction_{number}": column for number, column in enumerate(table.T, 1)}


def describe_program(program: bytes, example: bytes, inputs: NDArray[Any]) -> dict[str, Any]:
    """Return the content of `DESCRIPTION`."""
    files = {PROGRAM: program, EXAMPLE: example}
    digests = {DIGESTS[name]: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return {"shape": list(inputs.shape[1:]), "dtype": str(inputs.dtype), **digests}


def load_saved_program(read: Callable[[str], bytes]) -> SavedProgram:
    """Return a program from its files, which ``read(name)`` gives. Raise `ProgramError` where one of them is missing,
    damaged or no program."""
    try:
        description, data = json.loads(read(DESCRIPTION)), read(PROGRAM)
    except FileNotFoundError as error:
        raise ProgramError(f"the registered program is incomplete: {error.filename} is missing; train again") from error
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{DESCRIPTION} is not JSON: {error}") from error
    expected = description.get(DIGESTS[PROGRAM]) if isinstance(description, Mapping) else None
    if (digest := hashlib.sha256(data).hexdigest()) != expected:
        raise ProgramError(
            f"{PROGRAM} has sha256 {digest[:12]}…, {DESCRIPTION} says {str(expected)[:12]}…: it is damaged or was "
            "changed; do not use it, train again"
        )
    return SavedProgram(description, load_program(data))

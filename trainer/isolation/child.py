"""The child of `trainer.isolation.runner`: ``python -I`` this file with the JSON file of an order.

It loads a model, and answers windows with arrays. The parent wrote the order, and checks the data that the child
leaves; in between the model's own code may do anything that a program of this user may.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(order_file: str) -> None:
    """Load the model of the order, and write its answers."""
    order = json.loads(Path(order_file).read_text())
    gc.disable()  # the objects of torch stay, and to look through them while they are made takes an eighth of the time
    import numpy as np
    import torch

    windows = _given(order["windows"])
    torch.set_num_threads(order["threads"])
    if order["kind"] != "mlflow":  # which brings a `trainer` of its own
        sys.path.insert(0, str(Path(__file__).parents[2]))
        import trainer.model.saved_model  # noqa: F401 - before the model's code, which may hold a `numpy`
    gc.freeze()
    gc.enable()
    sys.path[:0] = order["path"]
    kinds = {"mlflow": _mlflow, "job": _job, "program": _program, "rehearsal": _rehearsal, "count": _count}
    ask = kinds[order["kind"]]
    answers = ask(order, windows)
    with open(order["answers"], "wb") as file:
        np.savez(file, **answers)


def _given(path: str) -> Any:
    """Return the input of an order: an array, or a table of named columns."""
    import numpy as np

    with open(path, "rb") as file:
        is_table = file.read(4) == b"PAR1"
    if not is_table:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    import pandas as pd

    return pd.read_parquet(path)


def _job(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Return the answers of a model saved by a job (``model.json`` and ``weights.pt``)."""
    from trainer.model.saved_model import load_saved_model

    folder = Path(order["model"])
    saved = load_saved_model(lambda name: (folder / name).read_bytes(), tuple(order["modules"]))
    return saved.predict(windows)


def _program(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Return the answers of a program that a script's training has written."""
    from trainer.model.program import load_saved_program

    folder = Path(order["model"])
    return load_saved_program(lambda name: (folder / name).read_bytes()).predict(windows)


def _rehearsal(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Build the loss and the model that a job names, as a rank does, and return the losses of a training step, and the
    bytes of the model."""
    from trainer.model.build import training_step

    job, spec, steps = _parts_of(order)
    losses, found = training_step(job, spec, windows, steps, tuple(order["modules"]))
    return {"loss": losses.double().numpy()} | _columns(found, len(windows))


def _count(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Return the bytes of the model that a job names, which is built without its memory."""
    from trainer.model.build import count_bytes

    job, spec, _ = _parts_of(order)
    return _columns(count_bytes(job.model, job.loss, spec, tuple(order["modules"])), len(windows))


def _parts_of(order: dict[str, Any]) -> tuple[Any, ...]:
    """Return the job, what describes its data, and its number of steps."""
    from pydantic import TypeAdapter

    from trainer.config import parse_job
    from trainer.model.build import KINDS

    document = json.loads((Path(order["model"]) / "rehearsal.json").read_text())
    description: Any = KINDS[document["kind"]].spec
    spec = TypeAdapter(description).validate_python(document["spec"])
    return parse_job(document["job"], is_stored=True), spec, int(document["steps"])


def _columns(found: Any, count: int) -> dict[str, Any]:
    """Return figures as columns of equal values."""
    from dataclasses import asdict

    import numpy as np

    return {name: np.full(count, float(value)) for name, value in asdict(found).items() if value is not None}


def _mlflow(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Return the answers of a model that MLflow has packed, with the code in its folder."""
    import mlflow.pyfunc
    import numpy as np

    model = mlflow.pyfunc.load_model(order["model"])
    schema = model.metadata.get_input_schema()
    if schema.is_tensor_spec():
        [kind] = schema.numpy_types()  # of an older version: single precision
        frame = model.predict(np.array(windows, dtype=kind))
    else:  # a whole number of these rows may be missing in others
        doubles = [item.name for item in schema.inputs if str(item.type) == "DataType.double" and item.name in windows]
        frame = model.predict(windows.astype(dict.fromkeys(doubles, "float64")))
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _cause_in_machine(error: BaseException) -> BaseException | None:
    """Return the cause of an error in this machine, which may be otherwise on a node: files and networks that are not
    reached from here, memory, packages, variables. None where there is none."""
    cause: BaseException | None = error
    while cause is not None:
        kinds = (OSError, MemoryError, ImportError)
        if isinstance(cause, kinds) or "allocate memory" in str(cause) or _is_of_environment(cause):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _is_of_environment(error: BaseException) -> bool:
    """Return whether a variable was missing, which a node may have."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not isinstance(error, KeyError) or trace is None:
        return False
    return trace.tb_frame.f_globals.get("__name__") == "os"


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException as error:
        cause = _cause_in_machine(error)
        kind = type(error).__name__ if cause is None else f"this machine's {type(cause).__name__}"
        sys.stderr.write(" ".join(f"{kind}: {error}".split()) + "\n")
        sys.stderr.flush()
        os._exit(1 if cause is None else os.EX_TEMPFAIL)
    sys.stderr.flush()
    os._exit(0)  # what the model's code has left to be done at the end is not done

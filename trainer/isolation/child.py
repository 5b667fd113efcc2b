"""The child of `trainer.isolation.runner`: ``python -I`` this file with the JSON file of an order.

It confines itself, loads a model, and answers windows with arrays. The parent wrote the order, and checks the data that
the child leaves; in between the model's own code may do anything that the sandbox allows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(order_file: str) -> None:
    """Confine this process, load the model of the order, and write its answers."""
    order = json.loads(Path(order_file).read_text())
    # By its file: the packages that lie beside it need not be those of the parent.
    spec = importlib.util.spec_from_file_location("_dtrain_sandbox", order["sandbox"])
    assert spec is not None
    assert spec.loader is not None
    sandbox: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sandbox)
    sandbox.limit(order["memory_bytes"], order["cpu_seconds"], order["file_bytes"])
    held = sandbox.confine([*order["readable"], *order["path"]], order["writable"])
    if order["trainer"]:  # our own copy; the model's code may hold a `numpy`, and has to wait until the walls are up
        sys.path.insert(0, order["trainer"])
    import numpy as np

    windows = np.load(order["windows"], mmap_mode="r", allow_pickle=False)
    import torch

    torch.set_num_threads(order["threads"])
    if order["kind"] == "mlflow":  # which brings a `trainer` of its own
        pass
    else:
        import trainer.model.saved_model  # noqa: F401 - all that is trusted, before anything else
    if sandbox.forbid_calls():
        held.append("calls")
    Path(order["held"]).write_text(json.dumps(held))
    sys.path[:0] = order["path"]
    answers = _mlflow(order, windows) if order["kind"] == "mlflow" else _job(order, windows)
    with open(order["answers"], "wb") as file:
        np.savez(file, **answers)


def _job(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Return the answers of a model saved by a job (``model.json`` and ``weights.pt``)."""
    from trainer.model.saved_model import load_saved_model

    folder = Path(order["model"])
    saved = load_saved_model(lambda name: (folder / name).read_bytes(), tuple(order["modules"]))
    return saved.predict(windows)


def _mlflow(order: dict[str, Any], windows: Any) -> dict[str, Any]:
    """Return the answers of a model that MLflow has packed, with the code in its folder."""
    import mlflow.pyfunc
    import numpy as np

    frame = mlflow.pyfunc.load_model(order["model"]).predict(np.array(windows))
    return {str(name): frame[name].to_numpy() for name in frame.columns}


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # what the model's code has left to be done at the end is not done

"""Predict with a registered model in a process of its own: ``python -I`` this file, URI, ``windows.npy``, ``out.npz``.

A model brings its own `trainer` package. In the orchestrator's process the package that is already imported would be
used instead, and the model's folder would stay on the path of everything imported later.
"""

from __future__ import annotations

import sys


def main(model_uri: str, windows: str, answers: str) -> None:
    import mlflow.pyfunc
    import numpy as np

    frame = mlflow.pyfunc.load_model(model_uri).predict(np.load(windows, allow_pickle=False))
    np.savez(answers, **{name: frame[name].to_numpy() for name in frame.columns})


if __name__ == "__main__":
    main(*sys.argv[1:])

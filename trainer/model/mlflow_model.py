"""The model that runs in the scoring server: MLflow loads this file (its models from code), so nothing is pickled.

The model's folder also holds ``artifacts/model`` (see `trainer.model.saved_model`) and ``code`` (this package and a
user's own modules). Do not import this module: it ends by telling MLflow which model it defines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow.models
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel

from trainer.model.saved_model import load_saved_model


class ForecastModel(PythonModel):
    """A model that takes raw feature windows (n, window, features) float32 and returns one row of named columns per
    window."""

    def load_context(self, context: Any) -> None:
        """Load the model of the folder that MLflow names."""
        folder = Path(context.artifacts["model"])
        allowed = folder / "factories.json"  # written by registration, with the code that lies beside it
        modules = tuple(json.loads(allowed.read_text())["modules"]) if allowed.exists() else ()
        self.saved = load_saved_model(lambda name: (folder / name).read_bytes(), modules)

    def predict(self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return one row of named columns per window. Raise MlflowException for input of another shape."""
        try:
            return pd.DataFrame(self.saved.predict(model_input))
        except ValueError as error:  # the caller's input is at fault: say so instead of ``unexpected error``
            raise MlflowException.invalid_parameter_value(str(error)) from error


mlflow.models.set_model(ForecastModel())

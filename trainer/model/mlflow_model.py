"""What runs in the scoring server: MLflow loads this file itself («models from code»), so nothing is ever pickled.

Beside it in the model's folder lie ``artifacts/model`` (see `trainer.model.saved_model`) and ``code`` (this package and
a user's own modules). It is not meant to be imported: it ends by telling MLflow which model it defines.
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
    """Raw feature windows (n, window, features) float32 → one row of named columns per window."""

    def load_context(self, context: Any) -> None:
        folder = Path(context.artifacts["model"])
        allowed = folder / "factories.json"  # written by registration, with the code that lies beside it
        modules = tuple(json.loads(allowed.read_text())["modules"]) if allowed.exists() else ()
        self.saved = load_saved_model(lambda name: (folder / name).read_bytes(), modules)

    def predict(self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None) -> pd.DataFrame:
        try:
            return pd.DataFrame(self.saved.predict(model_input))
        except ValueError as error:  # what the caller sent is at fault: say so instead of «unexpected error»
            raise MlflowException.invalid_parameter_value(str(error)) from error


mlflow.models.set_model(ForecastModel())

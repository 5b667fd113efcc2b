"""The model of a script in the scoring server: MLflow loads this file (its models from code), so nothing is pickled.

The model's folder also holds ``artifacts/program`` (see `trainer.model.program`) and ``code`` (this package). Do not
import this module: it ends by telling MLflow which model it defines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow.models
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel

from trainer.model.program import load_saved_program


class ProgramModel(PythonModel):
    """A model that takes samples (n, …) as its training did, and returns one row of named columns for each."""

    def load_context(self, context: Any) -> None:
        """Load the program of the folder that MLflow names."""
        folder = Path(context.artifacts["program"])
        self.saved = load_saved_program(lambda name: (folder / name).read_bytes())

    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return one row of named columns per sample. Raise MlflowException for input of another shape."""
        try:
            return pd.DataFrame(self.saved.predict(model_input))
        except ValueError as error:  # the caller's input is at fault: say so instead of ``unexpected error``
            raise MlflowException.invalid_parameter_value(str(error)) from error


mlflow.models.set_model(ProgramModel())

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
from numpy.typing import NDArray

from trainer.model.saved_model import load_saved_model
from trainer.spec import RowSpec


class ForecastModel(PythonModel):
    """A model that takes raw feature windows (n, window, features) float32, or rows of a table by the names of its
    columns, and returns one row of named columns for each."""

    def load_context(self, context: Any) -> None:
        """Load the model of the folder that MLflow names."""
        folder = Path(context.artifacts["model"])
        allowed = folder / "factories.json"  # written by registration, with the code that lies beside it
        modules = tuple(json.loads(allowed.read_text())["modules"]) if allowed.exists() else ()
        self.saved = load_saved_model(lambda name: (folder / name).read_bytes(), modules)

    def predict(
        self, context: Any, model_input: np.ndarray | pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return one row of named columns per window or row. Raise MlflowException for input of another shape, or with
        values that no training row could have."""
        try:
            spec = self.saved.spec
            if isinstance(model_input, pd.DataFrame) and isinstance(spec, RowSpec):
                return pd.DataFrame(self.saved.predict_columns(columns_of(model_input, spec)))
            return pd.DataFrame(self.saved.predict(model_input))
        except ValueError as error:  # the caller's input is at fault: say so instead of ``unexpected error``
            raise MlflowException.invalid_parameter_value(str(error)) from error


def columns_of(frame: pd.DataFrame, spec: RowSpec) -> dict[str, NDArray[Any]]:
    """Return the columns of a table that the model takes, as `trainer.model.raw_rows` has them."""
    found: dict[str, NDArray[Any]] = {}
    for column in spec.raw:
        if column.name not in frame:
            continue
        values = frame[column.name]
        if column.type == "datetime":
            found[column.name] = pd.to_datetime(values).to_numpy("datetime64[us]")
        elif column.type == "string":
            found[column.name] = values.astype(object).where(values.notna(), None).to_numpy()
        else:
            try:
                found[column.name] = values.to_numpy(np.float64, na_value=np.nan)
            except (TypeError, ValueError):
                raise ValueError(f"the column {column.name!r} holds {values.dtype}, and is a {column.type}") from None
    return found


mlflow.models.set_model(ForecastModel())

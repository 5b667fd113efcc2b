"""A deployment's own process: MLflow's scoring server over a registered model. ``serve.py MODEL_FOLDER PORT``."""

from __future__ import annotations

import sys

import mlflow.pyfunc
import uvicorn
from mlflow.pyfunc import scoring_server

if __name__ == "__main__":
    model = mlflow.pyfunc.load_model(sys.argv[1])
    uvicorn.run(scoring_server.init(model), host="127.0.0.1", port=int(sys.argv[2]), log_level="info")

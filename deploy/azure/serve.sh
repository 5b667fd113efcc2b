#!/bin/sh
# Serve the MLflow model below AZUREML_MODEL_DIR on port 5001: /ping and /invocations.
set -eu
file=$(find "${AZUREML_MODEL_DIR:?Azure ML sets it to where the model lies}" -name MLmodel | head -n 1)
[ -n "$file" ] || { echo "there is no MLflow model below $AZUREML_MODEL_DIR" >&2; exit 1; }
exec mlflow models serve --model-uri "$(dirname "$file")" --env-manager local \
    --host 0.0.0.0 --port "${PORT:-5001}" --workers "${WORKERS:-1}"

# The image of online endpoints: MLflow's own scoring server, the same that `registered_model` is checked with. Build it
# from the repository's root:
#   docker build -f deploy/azure/serving.Dockerfile -t <registry>.azurecr.io/dtrain-serving:1 .
# It serves whatever model Azure ML lays into AZUREML_MODEL_DIR, and needs nothing from the internet to start.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

RUN useradd --create-home --uid 1000 server

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/azure/requirements-serving.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --disable-pip-version-check \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement /tmp/requirements.txt \
    && pip check \
    && rm /tmp/requirements.txt

COPY deploy/azure/serve.sh /usr/local/bin/serve
USER server
WORKDIR /home/server
ENV PYTHONUNBUFFERED=1 WORKERS=1
EXPOSE 5001
CMD ["sh", "/usr/local/bin/serve"]

# The image of online endpoints: MLflow's own scoring server, with which `registered_model` is checked, too. Build it
# from the repository's root:
#   docker build --build-arg BASE_DIGEST=sha256:… -f deploy/azure/serving.Dockerfile -t <registry>.azurecr.io/dtrain-serving:1 .
# It serves the model that Azure ML puts into AZUREML_MODEL_DIR, and needs no internet to start.
# The base image is named by its digest, as in the Dockerfile beside this one.
ARG BASE_DIGEST
# What is in the image, as a bill of materials (CycloneDX) of its locked packages. The tool that writes it stays here.
FROM docker.io/library/python:3.11-slim-bookworm@${BASE_DIGEST} AS materials
COPY tools/supply/requirements.lock /tmp/supply.lock
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps --requirement /tmp/supply.lock
COPY deploy/azure/requirements-serving.lock /tmp/requirements.lock
RUN cyclonedx-py requirements --output-reproducible --output-format JSON --output-file /sbom.json /tmp/requirements.lock

FROM docker.io/library/python:3.11-slim-bookworm@${BASE_DIGEST}

RUN useradd --create-home --uid 1000 server

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/azure/requirements-serving.lock /tmp/requirements.lock
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps \
        --extra-index-url "$TORCH_INDEX" --requirement /tmp/requirements.lock \
    && pip check \
    && rm /tmp/requirements.lock

# The bill of materials, and what the image is; --build-arg VERSION=… and REVISION=$(git rev-parse HEAD) say of what.
COPY --from=materials /sbom.json /usr/share/sbom/dtrain-serving.cdx.json
ARG BASE_DIGEST
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dtrain-serving" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim-bookworm" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      dtrain.sbom="/usr/share/sbom/dtrain-serving.cdx.json"

COPY deploy/azure/serve.sh /usr/local/bin/serve
USER server
WORKDIR /home/server
ENV PYTHONUNBUFFERED=1 WORKERS=1
EXPOSE 5001
CMD ["sh", "/usr/local/bin/serve"]

# The image of the nodes, DTRAIN_KUBERNETES_IMAGE. Build it from the repository's root:
#   docker build --build-arg BASE_DIGEST=sha256:… -f deploy/kubernetes/nodes.Dockerfile -t registry.example/dtrain-nodes:1 .
# It has the trainer and its packages, and no orchestrator. torch's wheel carries CUDA, cuDNN and NCCL; the driver comes
# from the machine. How to look up and check the digest of the base image: deploy/azure/README.md.
ARG BASE_DIGEST
# What is in the image, as a bill of materials (CycloneDX) of its locked packages. The tool that writes it stays here.
FROM docker.io/library/python:3.11-slim-bookworm@${BASE_DIGEST} AS materials
COPY tools/supply/requirements.lock /tmp/supply.lock
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps --requirement /tmp/supply.lock
COPY deploy/azure/requirements-nodes.lock /tmp/requirements.lock
RUN cyclonedx-py requirements --output-reproducible --output-format JSON --output-file /sbom.json /tmp/requirements.lock

FROM docker.io/library/python:3.11-slim-bookworm@${BASE_DIGEST}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home dtrain

# All packages by their hashes; there is no other way to build it.
COPY deploy/azure/requirements-nodes.lock /tmp/requirements.lock
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps \
        --requirement /tmp/requirements.lock \
    && pip check \
    && rm /tmp/requirements.lock

COPY trainer /opt/dtrain/trainer
ENV PYTHONPATH=/opt/dtrain \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python -P -c "import trainer.rundir, trainer.node, torch"

# The bill of materials, and what the image is; --build-arg VERSION=… and REVISION=$(git rev-parse HEAD) say of what.
COPY --from=materials /sbom.json /usr/share/sbom/dtrain-nodes.cdx.json
ARG BASE_DIGEST
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dtrain-nodes" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim-bookworm" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      dtrain.sbom="/usr/share/sbom/dtrain-nodes.cdx.json"

# Without a user of its own nothing here runs as root; the pods say the same.
USER 1000
# There is no command: each pod gives one.

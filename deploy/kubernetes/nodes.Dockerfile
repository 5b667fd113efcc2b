# The image of the nodes, DTRAIN_KUBERNETES_IMAGE. Build it from the repository's root:
#   docker build --build-arg BASE_DIGEST=sha256:… -f deploy/kubernetes/nodes.Dockerfile -t registry.example/dtrain-nodes:1 .
# It has the trainer and its packages, and no orchestrator. torch's wheel carries CUDA, cuDNN and NCCL; the driver comes
# from the machine. How to look up and check the digest of the base image: deploy/azure/README.md.
ARG BASE_DIGEST
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

# Without a user of its own nothing here runs as root; the pods say the same.
USER 1000
# There is no command: each pod gives one.

"""The settings of ``DTRAIN_CLUSTER=kubernetes``: ``DTRAIN_KUBERNETES_*`` environment variables. None of them is a
secret: credentials are in the kubeconfig, and pods get theirs from Secrets of the cluster, which are named here.

The text of volumes and the file of the pod template are read here. What pods are made of them belongs in
`dtrain_dagster.clusters.kubernetes.objects`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from dtrain_dagster.settings.nodes import NODE, EngineSettings, node_field
from dtrain_dagster.support.secrets import refuse_secret

PREFIX = "DTRAIN_KUBERNETES_"
OPTIONS = f"{PREFIX}OPTIONS"
CONTAINER = "node"
"""The name of a pod's container."""
_LABEL = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)"
_KEY = rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}"
_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LONG_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_MOUNT = r"(?P<mount>/[^:,]+)(?P<read_only>:ro)?"
_VOLUMES = {
    "persistentVolumeClaim": re.compile(rf"pvc:(?P<claimName>{_LONG_NAME}):{_MOUNT}"),
    "nfs": re.compile(rf"nfs:(?P<server>[A-Za-z0-9.-]+):(?P<path>/[^:,]*):{_MOUNT}"),
    "hostPath": re.compile(rf"host:(?P<path>/[^:,]*):{_MOUNT}"),
}
"""Kind of volume, as a pod's specification names it → its text; the fields of its source are groups."""


def read_pod_template(path: object) -> object:
    """Return the pod template in a YAML file: a mapping with ``metadata``, ``spec`` or both, as a Job or a PodTemplate
    has it; what is no path, as it is. Raise `ValueError` for a file without one, for what dtrain itself sets, and for a
    value with a secret."""
    if not isinstance(path, str):
        return path
    try:
        template = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    if not isinstance(template, dict) or not template.keys() & {"metadata", "spec"}:
        raise ValueError("it has no pod template: give metadata (labels, annotations), spec, or both")
    found = {name: template[name] for name in ("metadata", "spec") if template.get(name)}
    if why := explain_template(found):
        raise ValueError(why)
    for part in _texts_of(found):
        refuse_secret(f"{OPTIONS}: pod_template={path}", part)
    return found


def explain_template(template: Mapping[str, Any]) -> str:
    """Return why a pod template cannot be used, "" where it can. Pure."""
    for name, part in template.items():
        if not isinstance(part, Mapping):
            return f"{name} is no mapping"
    spec = template.get("spec", {})
    for name in ("restartPolicy", "terminationGracePeriodSeconds"):
        if name in spec:
            return f"spec.{name} is set by dtrain: leave it out"
    containers = spec.get("containers") or []
    if not isinstance(containers, list) or not all(isinstance(one, Mapping) for one in containers):
        return "spec.containers is no list of containers"
    if others := [str(one.get("name")) for one in containers if one.get("name") != CONTAINER]:
        return (
            f"it has the container {others[0]}, which would keep a pod from ending: what belongs to the nodes' own is "
            f"under the name {CONTAINER!r}; make another one a sidecar (initContainers with restartPolicy: Always)"
        )
    for container in containers:
        for name in ("image", "command", "args"):
            if name in container:
                return f"{name} of the container is set by dtrain ({PREFIX}IMAGE, {NODE}PYTHON): leave it out"
        # The plan counts ranks and dollars by the settings: what a pod asks for must be the same.
        for amounts in (container.get("resources") or {}).values():
            for name in amounts if isinstance(amounts, Mapping) else ():
                if name in ("cpu", "memory") or "gpu" in name:
                    return f"{name} is set by {NODE}CPUS, _MEMORY_GIB and _GPUS, and gpu_resource: leave it out"
    return ""


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_of(part)


def read_volumes(value: object) -> object:
    """Return the volumes of a text, each with ``mount``, ``source`` (as a pod's specification has it) and
    ``read_only``; anything else as it is. Raise `ValueError` for other text, and for a folder that is mounted twice."""
    if not isinstance(value, str):
        return value
    found: list[dict[str, Any]] = []
    for word in filter(None, (word.strip() for word in value.split(","))):
        matches = ((kind, pattern.fullmatch(word)) for kind, pattern in _VOLUMES.items())
        kind, source = next(((kind, match.groupdict()) for kind, match in matches if match), ("", {}))
        if not kind:
            raise ValueError(
                f"{word!r} is not a volume: give pvc:claim:/mount, nfs:server:/path:/mount or host:/path:/mount, "
                "with :ro for read-only, separated by commas"
            )
        mount, read_only = source.pop("mount").rstrip("/"), source.pop("read_only") is not None
        if not mount or mount in (volume["mount"] for volume in found):
            raise ValueError(f"{word!r}: {mount or '/'} cannot be mounted there: give each volume a folder of its own")
        found.append({"mount": mount, "source": {kind: source}, "read_only": read_only})
    return found


class KubernetesSettings(EngineSettings):
    """The settings of a Kubernetes cluster. Every field is the environment variable of that name in capitals after
    ``DTRAIN_KUBERNETES_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)
    OPTIONS = ("context", "namespace", "gpu_resource", "queue", "pod_template")

    kubeconfig: str | None = Field(
        default=None,
        validation_alias="KUBECONFIG",
        description="Kubeconfig; unset: ~/.kube/config, and in a pod its service account",
    )
    context: str | None = Field(default=None, description="Context of it; unset: the current one")
    namespace: str = Field(default="dtrain", pattern=f"^{_NAME}$", description="Namespace of all that is created")
    image: str = Field(
        pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$", description="Image of the nodes, with this project and its packages"
    )
    python: str = node_field("PYTHON", "python3", "Interpreter in the image", pattern=r"^\S+$")
    memory_gib: float = node_field("MEMORY_GIB", 4.0, "GiB of memory of a node, and its limit", gt=0)
    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=f"^{_KEY}$", description="Name under which the cluster offers GPUs"
    )
    volumes: Annotated[tuple[dict[str, Any], ...], NoDecode, BeforeValidator(read_volumes)] = Field(
        default=(),
        description="Storage that all nodes share, separated by commas: pvc:claim:/mount, nfs:server:/path:/mount or "
        "host:/path:/mount, each with :ro for read-only",
    )
    queue: str | None = Field(
        default=None, pattern=f"^{_LONG_NAME}$", description="Kueue's local queue that nodes wait in; unset: none"
    )
    pod_template: Annotated[dict[str, Any], NoDecode, BeforeValidator(read_pod_template)] = Field(
        default={},
        description="YAML file with a pod template, from which the nodes' pods take all else: node selector, "
        "tolerations, Secrets, affinity, security context",
    )

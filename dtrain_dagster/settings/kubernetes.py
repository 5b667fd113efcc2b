"""The settings of ``DTRAIN_CLUSTER=kubernetes``: ``DTRAIN_KUBERNETES_*`` environment variables. None of them is a
secret: credentials are in the kubeconfig, and pods get theirs from Secrets of the cluster, which are named here.

The texts of lists (volumes, tolerations, selectors) are read here. What pods are made of them belongs in
`dtrain_dagster.clusters.kubernetes.manifest`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import EnvironmentSettings

PREFIX = "DTRAIN_KUBERNETES_"
_LABEL = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)"
_KEY = rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}"
_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LONG_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_QUANTITY = r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_SELECTOR = re.compile(rf"(?P<key>{_KEY})=(?P<value>{_LABEL}?)")
_TOLERATION = re.compile(
    rf"(?P<key>{_KEY})(=(?P<value>{_LABEL}))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_CLAIM = re.compile(rf"pvc:(?P<claim>{_LONG_NAME}):(?P<mount>/[^:,]+)(?P<read_only>:ro)?")
_NFS = re.compile(r"nfs:(?P<server>[A-Za-z0-9.-]+):(?P<path>/[^:,]*):(?P<mount>/[^:,]+)(?P<read_only>:ro)?")
_HOST = re.compile(r"host:(?P<path>/[^:,]*):(?P<mount>/[^:,]+)(?P<read_only>:ro)?")


class KubernetesSettings(EnvironmentSettings):
    """The settings of a Kubernetes cluster. Every field is the environment variable of that name in capitals after
    ``DTRAIN_KUBERNETES_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    kubeconfig: str | None = Field(
        default=None, description="Kubeconfig; unset: KUBECONFIG or ~/.kube/config, and in a pod its service account"
    )
    context: str | None = Field(default=None, description="Context of it; unset: the current one")
    namespace: str = Field(default="dtrain", pattern=f"^{_NAME}$", description="Namespace of all that is created")
    image: str = Field(
        pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$", description="Image of the nodes, with this project and its packages"
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the image is pulled: Always, IfNotPresent or Never"
    )
    pull_secrets: str = Field(default="", description="Secrets that the image is pulled with, separated by commas")
    python: str = Field(default="python3", pattern=r"^\S+$", description="Interpreter in the image")
    service_account: str | None = Field(
        default=None,
        pattern=f"^{_LONG_NAME}$",
        description="Service account of the pods, which get no token of it",
    )
    env_secrets: str = Field(
        default="",
        description="Secrets whose keys become variables of the nodes, as the credentials of a storage; separated by "
        "commas",
    )
    cpu: str = Field(default="1", pattern=f"^{_QUANTITY}$", description="CPUs of a node: requested, and no limit")
    memory: str = Field(default="4Gi", pattern=f"^{_QUANTITY}$", description="Memory of a node, and its limit")
    shared_memory: str = Field(
        default="1Gi", pattern=f"^{_QUANTITY}$", description="Size of /dev/shm, part of that memory; NCCL needs it"
    )
    gpus: int = Field(default=0, ge=0, le=16, description="GPUs of a node")
    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=f"^{_KEY}$", description="Name under which the cluster offers GPUs"
    )
    node_selector: str = Field(
        default="", description="Labels that a machine must have: key=value, separated by commas"
    )
    tolerations: str = Field(
        default="", description="Taints to accept: key, key=value or key=value:effect, separated by commas"
    )
    volumes: str = Field(
        default="",
        description="Storage that all nodes share, separated by commas: pvc:claim:/mount, nfs:server:/path:/mount or "
        "host:/path:/mount, each with :ro for read-only",
    )
    user: int = Field(default=1000, ge=0, le=2**31 - 1, description="User and group that nodes run as; 0 is root")
    spread: Literal["prefer", "require", "none"] = Field(
        default="prefer", description="Whether the nodes of a job are kept on separate machines: prefer, require, none"
    )
    host_network: bool = Field(default=False, description="Whether nodes use their machine's network, as RDMA may need")
    priority_class: str | None = Field(default=None, pattern=f"^{_LONG_NAME}$", description="Priority class of pods")
    queue: str | None = Field(
        default=None, pattern=f"^{_LONG_NAME}$", description="Kueue's local queue that nodes wait in; unset: none"
    )
    lost_seconds: int = Field(
        default=20, ge=0, description="Seconds after which a machine that does not answer is given up for lost"
    )
    keep_seconds: int = Field(
        default=3600,
        ge=60,
        description="Seconds for which the cluster keeps the record and output of an ended node",
    )
    poll_seconds: float = Field(default=2.0, gt=0, le=60, description="Seconds between two looks at the nodes")

    @field_validator("pull_secrets", "env_secrets")
    @classmethod
    def _names(cls, text: str) -> str:
        for name in _words(text):
            if not re.fullmatch(_LONG_NAME, name):
                raise ValueError(f"{name!r} is not the name of a Secret: give its name in the namespace")
        return text

    @field_validator("node_selector")
    @classmethod
    def _selector(cls, text: str) -> str:
        read_selector(text)
        return text

    @field_validator("tolerations")
    @classmethod
    def _tolerations(cls, text: str) -> str:
        read_tolerations(text)
        return text

    @field_validator("volumes")
    @classmethod
    def _volumes(cls, text: str) -> str:
        read_volumes(text)
        return text

    def options(self) -> dict[str, Any]:
        """Return the arguments of `dtrain_dagster.clusters.kubernetes.options.KubernetesOptions`, in JSON's types."""
        own = self.model_dump(exclude_none=True)
        return {
            **own,
            "pull_secrets": _words(self.pull_secrets),
            "env_secrets": _words(self.env_secrets),
            "node_selector": read_selector(self.node_selector),
            "tolerations": read_tolerations(self.tolerations),
            "volumes": read_volumes(self.volumes),
        }


def read_kubernetes_options() -> dict[str, Any]:
    """Return the environment's options for Kubernetes. Raise `SettingsError` for missing or unusable values."""
    return KubernetesSettings.read().options()


def read_selector(text: str) -> dict[str, str]:
    """Return ``key=value,…`` as a mapping. Raise `ValueError` for other text."""
    found = {}
    for word in _words(text):
        match = _SELECTOR.fullmatch(word)
        if not match:
            raise ValueError(f"{word!r} is not a label: give key=value, separated by commas")
        found[match["key"]] = match["value"]
    return found


def read_tolerations(text: str) -> list[dict[str, str]]:
    """Return ``key``, ``key=value`` or ``key=value:effect`` as Kubernetes has them. Raise `ValueError` for other
    text."""
    found = []
    for word in _words(text):
        match = _TOLERATION.fullmatch(word)
        if not match:
            raise ValueError(
                f"{word!r} is not a toleration: give key, key=value or key=value:effect (NoSchedule, PreferNoSchedule, "
                "NoExecute), separated by commas"
            )
        value, effect = match["value"], match["effect"]
        which = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
        found.append({"key": match["key"], **which, **({"effect": effect} if effect else {})})
    return found


def read_volumes(text: str) -> list[dict[str, Any]]:
    """Return the volumes as `dtrain_dagster.clusters.kubernetes.options.Volume` takes them. Raise `ValueError` for
    other text, and for a folder that is mounted twice."""
    found: list[dict[str, Any]] = []
    for word in _words(text):
        match = _CLAIM.fullmatch(word) or _NFS.fullmatch(word) or _HOST.fullmatch(word)
        if not match:
            raise ValueError(
                f"{word!r} is not a volume: give pvc:claim:/mount, nfs:server:/path:/mount or host:/path:/mount, "
                "with :ro for read-only, separated by commas"
            )
        given = match.groupdict()
        mount = given["mount"].rstrip("/")
        if not mount or mount in (volume["mount"] for volume in found):
            raise ValueError(f"{word!r}: {mount or '/'} cannot be mounted there: give each volume a folder of its own")
        if given.get("claim"):
            source = {"persistentVolumeClaim": {"claimName": given["claim"]}}
        elif given.get("server"):
            source = {"nfs": {"server": given["server"], "path": given["path"]}}
        else:
            source = {"hostPath": {"path": given["path"]}}
        found.append({"mount": mount, "source": source, "read_only": given["read_only"] is not None})
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

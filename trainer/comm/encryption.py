"""What is encrypted between the members of a launch, and what is said or refused where it cannot be.

The decisions, pure functions, belong here. How certificates are made is in `trainer.comm.launch_certificate`, the
encrypted collectives are in `trainer.comm.encrypted_mesh`.
"""

from __future__ import annotations

import logging
from typing import Literal

from trainer.comm.launch_secret import SECRET_FILE, LaunchSecret
from trainer.comm.own_address import is_loopback
from trainer.comm.tls import CertificateFiles, TLSContexts
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.strategies import PACKAGES

CertificateSource = Literal["", "launch", "files"]
"""Where the certificates of a process come from: the launch's secret, or the files of ``training.tls``; "": its
connections are plain."""
NCCL_REMEDY = (
    "put the hosts into a private encrypted network (WireGuard, IPsec) and set training.encryption = 'auto'; or set "
    "training.backend = 'gloo', which trains on the CPUs, encrypted; or give certificates of your own (training.tls): "
    "GPUs then sum through the hosts' memory, encrypted and slower"
)
"""What to do where GPUs of several hosts have to train encrypted."""
_log = logging.getLogger(__name__)


def choose_certificates(config: DistributedTrainingConfig, secret: LaunchSecret, host: str) -> CertificateSource:
    """Return where a process at the address ``host`` has its certificates from. At an address of loopback there is
    nothing to encrypt: all members are on this host. Pure.

    Raise `ConfigError` if encryption is required and there is no secret to make certificates from."""
    if config.tls is not None:
        return "files"
    if config.encryption == "off" or is_loopback(host):
        return ""
    if secret.is_given:
        return "launch"
    if config.encryption == "required":
        raise ConfigError(
            "training.encryption = 'required', but this launch has no secret to make certificates from: start "
            f"it on a dtrain cluster; or give all ranks a file of mode 0600 with the same 64 hexadecimal digits "
            f"(openssl rand -hex 32) and its path in {SECRET_FILE}; or certificates of your own (training.tls)"
        )
    return ""


def open_contexts(
    config: DistributedTrainingConfig, secret: LaunchSecret, host: str, *about: object
) -> TLSContexts | None:
    """Return the contexts for the connections of a process at the address ``host``; None if they are plain. ``about``:
    the job, or what else the launch's certificates are for. Raise `ConfigError` as `choose_certificates`, and for a
    file of ``training.tls`` that cannot be used."""
    source = choose_certificates(config, secret, host)
    if source == "files":
        assert config.tls is not None
        return CertificateFiles(config.tls)
    if source == "launch":
        from trainer.comm.launch_certificate import LaunchCertificate  # not above: most jobs of one host need none

        return LaunchCertificate(secret, *about)
    return None


def is_mesh_encrypted(source: str, hosts: int, uses_nccl: bool) -> bool:
    """Return whether ranks sum over an encrypted mesh instead of gloo: where what they send leaves a host. With
    certificates of the user's own it is encrypted within a host, too. Pure."""
    return source == "files" or (source == "launch" and hosts != 1 and not uses_nccl)


def uses_nccl(config: DistributedTrainingConfig, has_gpus: bool) -> bool:
    """Return whether members that all have a GPU, or not, sum by NCCL. Pure."""
    return has_gpus and config.backend != "gloo" and config.tls is None


def describe_open_traffic(source: str, hosts: int | None, by_nccl: bool, is_off: bool = False) -> str:
    """Return a sentence on what leaves a host unencrypted, with the remedy; "" if nothing does. ``hosts``: None if it
    is unknown whether they are several. ``is_off``: whether ``training.encryption`` switches it off. Pure."""
    if hosts == 1:
        return ""
    where = f"{hosts} hosts" if hosts else "possibly several hosts"
    if not source:
        why = "training.encryption is 'off'" if is_off else "there is no secret of the launch to make certificates from"
        remedy = "training.encryption = 'auto'" if is_off else "start it on a dtrain cluster, or set training.tls"
        return (
            f"nodes are on {where} and {why}: gradients, weights and heartbeats go over the network UNENCRYPTED. "
            f"Anyone who can intercept this traffic can read and change it: use a private network, or {remedy}"
        )
    if by_nccl:
        return (
            f"GPUs on {where} communicate through NCCL, which encrypts nothing: gradients and weights go over the "
            "network UNENCRYPTED; heartbeats, messages and addresses are encrypted. If the traffic matters, "
            f"{NCCL_REMEDY}"
        )
    return ""


def refuse_open_traffic(config: DistributedTrainingConfig, sentence: str) -> None:
    """Raise `ConfigError` if there is open traffic, which the sentence describes, and encryption is required."""
    if sentence and config.encryption == "required":
        raise ConfigError(f"training.encryption = 'required', but {sentence}")


def refuse_own_connections(config: DistributedTrainingConfig) -> None:
    """Raise `ConfigError`, where traffic between hosts is encrypted, for a strategy whose package sums over connections
    of its own."""
    if config.strategy in PACKAGES:
        raise ConfigError(
            f"training.strategy = {config.strategy!r} uses its own connections, which are not encrypted, but traffic "
            "between hosts is encrypted here: set training.encryption = 'off' in a private network, or "
            "training.strategy = 'ddp'"
        )


def refuse_nccl(config: DistributedTrainingConfig, hosts: int, has_gpus: bool) -> None:
    """Raise `ConfigError`, before there are nodes, for a job that must be encrypted and would sum by NCCL between
    several hosts. ``has_gpus``: whether the nodes are known to have GPUs."""
    by_nccl = config.backend == "nccl" or uses_nccl(config, has_gpus)
    if config.encryption == "required" and hosts > 1 and by_nccl and config.tls is None:
        raise ConfigError(
            f"training.encryption = 'required', but GPUs on {hosts} hosts communicate through NCCL (training.backend "
            f"= {config.backend!r}), which encrypts nothing: {NCCL_REMEDY}"
        )


def warn_of_open_traffic(rank: int, sentence: str) -> None:
    """Log what leaves a host unencrypted, at rank 0."""
    if sentence and rank == 0:
        _log.warning("%s", sentence)

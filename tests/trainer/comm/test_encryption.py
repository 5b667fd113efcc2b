"""What is encrypted, what is said, and what is refused; the wire itself is in tests/faults/test_encryption.py."""

from __future__ import annotations

import logging

import pytest

from trainer.comm.encryption import (
    choose_certificates,
    describe_open_traffic,
    is_mesh_encrypted,
    open_contexts,
    refuse_nccl,
    refuse_open_traffic,
    refuse_own_connections,
    uses_nccl,
    warn_of_open_traffic,
)
from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import SECRET_FILE, LaunchSecret
from trainer.config import ConfigError, DistributedTrainingConfig, TLSConfig, parse_job

GIVEN, NONE = LaunchSecret(b"s" * 32), LaunchSecret()
FILES = TLSConfig(certificate="c", key="k", ca="a")


def config(**fields: object) -> DistributedTrainingConfig:
    return DistributedTrainingConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "secret", "host", "source"),
    [
        ({}, GIVEN, "10.0.0.1", "launch"),
        ({}, GIVEN, "127.0.0.1", ""),
        ({}, GIVEN, "::1", ""),
        ({}, NONE, "10.0.0.1", ""),
        ({"encryption": "off"}, GIVEN, "10.0.0.1", ""),
        ({"encryption": "required"}, GIVEN, "10.0.0.1", "launch"),
        ({"encryption": "required"}, NONE, "127.0.0.1", ""),
        ({"tls": FILES}, NONE, "10.0.0.1", "files"),
        ({"tls": FILES, "encryption": "required"}, NONE, "127.0.0.1", "files"),
    ],
)
def test_where_certificates_come_from(fields: dict[str, object], secret: LaunchSecret, host: str, source: str) -> None:
    assert choose_certificates(config(**fields), secret, host) == source
    if source == "launch":
        assert isinstance(open_contexts(config(**fields), secret, host, "job"), LaunchCertificate)
    if not source:
        assert open_contexts(config(**fields), secret, host, "job") is None


def test_without_a_secret_it_is_refused_where_it_is_required() -> None:
    with pytest.raises(ConfigError, match=rf"training.encryption = 'required'.*{SECRET_FILE}"):
        choose_certificates(config(encryption="required"), NONE, "10.0.0.1")


@pytest.mark.parametrize(
    ("source", "hosts", "by_nccl", "is_mesh", "word"),
    [
        ("launch", 1, False, False, ""),
        ("launch", 3, False, True, ""),
        ("launch", 1, True, False, ""),
        ("launch", 3, True, False, "NCCL, which encrypts nothing"),
        ("files", 1, False, True, ""),
        ("files", 3, False, True, ""),
        ("", 1, False, False, ""),
        ("", 3, False, False, "nodes are on 3 hosts"),
        ("", None, True, False, "possibly several hosts"),
    ],
)
def test_what_leaves_a_host_unencrypted_is_said_and_refused_where_encryption_is_required(
    source: str, hosts: int | None, by_nccl: bool, is_mesh: bool, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    if hosts is not None:
        assert is_mesh_encrypted(source, hosts, by_nccl) is is_mesh
    sentence = describe_open_traffic(source, hosts, by_nccl)
    assert word in sentence
    assert bool(sentence) is bool(word) is ("UNENCRYPTED" in sentence)
    refuse_open_traffic(config(), sentence)
    with caplog.at_level(logging.WARNING):
        warn_of_open_traffic(1, sentence)
        assert not caplog.records
        warn_of_open_traffic(0, sentence)
    assert [record.getMessage() for record in caplog.records] == [sentence] * bool(sentence)
    if sentence:
        with pytest.raises(ConfigError, match=r"training\.encryption = 'required', but"):
            refuse_open_traffic(config(encryption="required"), sentence)


def test_who_switches_it_off_is_told_how_to_switch_it_on() -> None:
    assert "training.encryption = 'auto'" in describe_open_traffic("", 2, False, is_off=True)
    assert "start it on a dtrain cluster" in describe_open_traffic("", 2, False)


def test_own_certificates_take_gpus_sums_from_nccl() -> None:
    assert uses_nccl(config(), has_gpus=True)
    assert not uses_nccl(config(), has_gpus=False)
    assert not uses_nccl(config(backend="gloo"), has_gpus=True)
    assert not uses_nccl(config(tls=FILES), has_gpus=True)


@pytest.mark.parametrize(
    ("fields", "hosts", "has_gpus", "is_refused"),
    [
        ({"backend": "nccl"}, 2, False, True),
        ({"backend": "auto"}, 2, True, True),
        ({"backend": "auto"}, 2, False, False),
        ({"backend": "gloo"}, 2, True, False),
        ({"backend": "nccl"}, 1, True, False),
        ({"backend": "auto", "tls": FILES}, 2, True, False),
    ],
)
def test_nccl_between_hosts_is_refused_before_there_are_nodes(
    fields: dict[str, object], hosts: int, has_gpus: bool, is_refused: bool
) -> None:
    refuse_nccl(config(**fields), hosts, has_gpus)
    required = config(**fields, encryption="required")
    if not is_refused:
        return refuse_nccl(required, hosts, has_gpus)
    with pytest.raises(ConfigError, match=r"WireGuard.*training.encryption = 'auto'.*training.backend = 'gloo'"):
        refuse_nccl(required, hosts, has_gpus)
    return None


def test_the_setting_in_a_job() -> None:
    text = '{"job_id": "a", "run_dir": "/a", "dataset": {"uri": "/d"}, "training": {%s}}'
    assert parse_job(text % "").training.encryption == "auto", "older files do not have it"
    files = '"tls": {"certificate": "c", "key": "k", "ca": "a"}'
    assert parse_job(text % files).training.encryption == "auto"
    with pytest.raises(ConfigError, match="'auto', 'required' or 'off'"):
        parse_job(text % '"encryption": "on"')
    with pytest.raises(ConfigError, match="remove one of the two"):
        parse_job(text % f'{files}, "encryption": "off"')


@pytest.mark.parametrize("strategy", ["horovod", "deepspeed"])
def test_strategies_with_connections_of_their_own_are_refused_where_traffic_is_encrypted(strategy: str) -> None:
    for ours in ("ddp", "fsdp", "hsdp"):
        refuse_own_connections(config(strategy=ours))
    with pytest.raises(ConfigError, match=r"its own connections, .*encryption = 'off' .*strategy = 'ddp'"):
        refuse_own_connections(config(strategy=strategy))

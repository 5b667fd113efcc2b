"""The address under which other nodes reach this one: the decision, and what the kernel is asked."""

from __future__ import annotations

import socket

import psutil
import pytest

from trainer.comm.own_address import HostAddresses, choose_address, interface_of, is_loopback, own_address
from trainer.errors import ConfigError

HOST = HostAddresses(
    {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7", "fd00::7"], "eth1": ["10.1.0.7"]},
    towards="10.1.0.7",
    default="10.0.0.7",
)
UNKNOWN = HostAddresses(HOST.interfaces, default="10.0.0.7")


@pytest.mark.parametrize(
    ("environment", "target", "found", "address"),
    [
        ({"DTRAIN_INTERFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth0"}, None, HOST, "10.1.0.7"),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth1"}, "10.1.0.1", HOST, "10.0.0.7"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "10.1.0.1", HOST, "127.0.0.1"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "10.1.0.1", HOST, "10.0.0.7"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, None, HOST, "10.1.0.7"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "10.1.0.1", HOST, "10.1.0.7"),  # names nothing
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, None, HOST, "10.0.0.7"),
        ({"NCCL_SOCKET_IFNAME": "^=docker"}, None, HOST, "172.17.0.1"),
        ({}, "10.1.0.1", HOST, "10.1.0.7"),
        ({}, "localhost", HOST, "127.0.0.1"),
        ({}, "127.0.0.2", HOST, "127.0.0.2"),
        ({}, "::1", HOST, "::1"),
        ({}, None, UNKNOWN, "10.0.0.7"),
        ({}, None, HostAddresses(HOST.interfaces), "172.17.0.1"),
        # The host's own name is an address of loopback on it.
        ({}, "node7", HostAddresses(HOST.interfaces, "127.0.0.1", "10.0.0.7"), "10.0.0.7"),
    ],
)
def test_the_first_that_there_is(
    environment: dict[str, str], target: str | None, found: HostAddresses, address: str
) -> None:
    assert choose_address(environment, target, found) == (address, "")


def test_a_guess_is_said_with_the_remedy() -> None:
    address, warning = choose_address({}, "nowhere", UNKNOWN)
    assert address == "10.0.0.7"
    assert "'nowhere'" in warning
    assert "set DTRAIN_HOST" in warning
    address, warning = choose_address({}, None, HostAddresses({"lo": ["127.0.0.1"]}))
    assert address == "127.0.0.1"
    assert "no other host can reach" in warning


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"DTRAIN_INTERFACE='eth9' .* docker0, eth0, eth1, lo"):
        choose_address({"DTRAIN_INTERFACE": "eth9"}, None, HOST)


def test_what_the_kernel_says() -> None:
    """The addresses of this very machine: each that is chosen must be one that can be listened at."""
    assert own_address({"DTRAIN_HOST": "node7.example", "DTRAIN_INTERFACE": "eth9"}) == "node7.example"
    loopback = next(name for name, addresses in psutil.net_if_addrs().items() if any(
        one.address == "127.0.0.1" for one in addresses
    ))  # fmt: skip
    assert own_address({"DTRAIN_INTERFACE": loopback}) == "127.0.0.1"
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"MASTER_ADDR": "192.0.2.7"}, towards="127.0.0.1") == "127.0.0.1"
    for address in (own_address({}), own_address({}, "192.0.2.7")):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family):
            pass


def test_a_name_that_nobody_knows_does_not_end_the_search(caplog: pytest.LogCaptureFixture) -> None:
    assert own_address({"MASTER_ADDR": "nobody.invalid"})
    assert "DTRAIN_HOST" in caplog.text


def test_loopback() -> None:
    assert [is_loopback(one) for one in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node7")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_the_interface_of_an_address_is_found_and_of_a_foreign_one_named_as_missing():
    assert interface_of("127.0.0.1") == interface_of("localhost")
    with pytest.raises(ConfigError, match=r"has the address 192\.0\.2\.9, .* DTRAIN_INTERFACE to one of"):
        interface_of("192.0.2.9")

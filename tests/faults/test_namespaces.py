"""Hosts as network namespaces: who reaches whom, what a cut link does, and that nothing is left of them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.namespaces import Hosts, NoNamespacesError
from trainer.comm.own_address import own_address

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts; skips, and says why, where there can be none."""
    try:
        made = Hosts(2)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    with made:
        yield made
    assert not any(Path(path).exists() for path in made.paths)


def test_a_cut_link_tells_nobody_and_what_was_sent_arrives_when_it_is_back(hosts: Hosts) -> None:
    with hosts.inside(0):
        server = socket.create_server((hosts.address(0), 0))
    with hosts.inside(1):
        caller = socket.create_connection(server.getsockname())
    answerer, (address, _) = server.accept()
    with server, caller, answerer:
        assert address == hosts.address(1)
        hosts.cut(1)
        caller.sendall(b"are you there?")
        for end in (caller, answerer):
            end.settimeout(0.5)
            with pytest.raises(TimeoutError):  # no end, and no error
                end.recv(99)
        hosts.restore(1)
        answerer.settimeout(60)
        assert answerer.recv(99) == b"are you there?"


def test_a_host_knows_its_own_address_by_the_way_to_another_or_by_its_name_alone(hosts: Hosts) -> None:
    with hosts.inside(1):
        assert own_address({}, hosts.address(0)) == hosts.address(1)
        assert own_address({"MASTER_ADDR": hosts.other_address(0)}) == hosts.other_address(1)
        assert own_address({"SLURMD_NODENAME": hosts.address(1)}) == hosts.address(1)
        assert own_address({"DTRAIN_INTERFACE": "eth0"}) == hosts.address(1)
        assert own_address({}) == "172.17.0.1", "a guess, which is wrong here"


def test_programs_run_where_they_are_sent(hosts: Hosts) -> None:
    program = "import psutil; print(psutil.net_if_addrs()['eth0'][0].address)"
    for command, variables in (
        (hosts.command(1), {}),
        (hosts.local_cluster, {"NODE_RANK": "1", "PATH": "/usr/bin:/bin:/usr/sbin"}),
    ):
        done = subprocess.run(
            [*command, sys.executable, "-c", program], env=variables or None, capture_output=True, text=True
        )
        assert done.stdout.strip() == hosts.address(1), done.stderr

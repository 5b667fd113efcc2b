"""Encryption between hosts, seen from the wire: trainings over network namespaces, with a listener at their switch."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.elastic_nodes import KILLED, weights
from harness.faults import switch
from harness.faults.wire import Wire
from harness.namespaces import Hosts, NoNamespacesError
from harness.own_models import user_parts
from harness.waiting import until
from harness.worlds import FORKS, OWN_PARTS, Job, be_rank, build
from trainer.comm.launch_secret import SECRET_FILE, write_launch_secret
from trainer.elastic.generation_record import generations
from trainer.runtime.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SIZE = 3
TRAINING = {"epochs": 1, "max_steps": 12, "health_check_seconds": 0.1, "peer_timeout_seconds": 30}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts(SIZE)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dataset"))


def be_host(namespace: str, arguments: Sequence[str], environment: dict[str, str], log: str) -> None:
    """The life of a node's process on its host."""
    switch.enter(namespace)
    be_rank(arguments, environment, log)


class Training:
    """A job with a node on each host; by a cluster, or with a fixed MASTER_ADDR."""

    def __init__(
        self, hosts: Hosts, folder: Path, dataset: Path, factory: str = "user_parts:marked", **training: Any
    ) -> None:
        sections = {"model": {"factory": factory}}
        environment = {"DTRAIN_CACHE": str(dataset.parent / "cache")}
        self.job = Job(folder / "run", dataset, sections, {**TRAINING, **training}, environment)
        self.hosts, self.secret = hosts, folder / "secrets" / "launch"
        write_launch_secret(self.secret)
        self.processes: list[BaseProcess] = []

    def start(
        self, is_static: bool = False, secret: bool = True, arguments: dict[int, list[str]] | None = None
    ) -> Training:
        path = str(self.job.write())
        for node in range(SIZE):
            environment = {
                **os.environ, **OWN_PARTS, **self.job.environment,
                "PYTHONPATH": str(Path(user_parts.__file__).parent), "RANK": str(node), "LOCAL_RANK": "0",
                "NODE_RANK": str(node), "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.hosts.address(0), "MASTER_PORT": "29500",
            }  # fmt: skip
            environment |= {} if is_static else Launch(is_elastic=True).variables()
            environment |= {SECRET_FILE: str(self.secret)} if secret else {}
            given = ["--config", path, *(arguments or {}).get(node, [])]
            log = str(self.job.run_dir / f"log-{node}.txt")
            self.processes.append(FORKS.Process(target=be_host, args=(self.hosts.paths[node], given, environment, log)))
            self.processes[-1].start()
        return self

    def wait(self) -> list[int | None]:
        for process in self.processes:
            process.join(120)
        return [process.exitcode for process in self.processes]

    def log(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.job.run_dir.glob("log-*.txt")))


@pytest.fixture
def new_training(hosts: Hosts, dataset: Path, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(name: str = "a", **training: Any) -> Training:
        made.append(Training(hosts, tmp_path / name, dataset, **training))
        return made[-1]

    yield make
    for training in made:
        for process in training.processes:
            process.kill()
            process.join()


def marks() -> list[bytes]:
    """The bytes that a rank sends of the marked gradient, whatever number of micro-batches it had."""
    total, found = torch.zeros(16), []
    for _ in range(6):
        total = total + user_parts.MARK
        found.append(total.numpy().tobytes())
    return found


def heard_in_clear(wire: Wire) -> dict[str, bool]:
    """What a listener recognises: gradients, heartbeats, addresses."""
    return {
        "gradient": any(mark[at : at + 16] in wire.heard for mark in marks() for at in range(0, 49, 16)),
        "heartbeat": b'{"member": "n' in wire.heard,
    }


@pytest.mark.parametrize("is_static", [False, pytest.param(True, marks=pytest.mark.long)], ids=["cluster", "fixed"])
@pytest.mark.parametrize("encryption", ["auto", pytest.param("required", marks=pytest.mark.long), "off"])
def test_nothing_is_readable_on_the_wire_unless_encryption_is_off(
    new_training: Callable[..., Training], hosts: Hosts, encryption: str, is_static: bool
) -> None:
    training = new_training(**({} if encryption == "auto" else {"encryption": encryption}))
    with Wire(hosts.switch_path) as wire:
        training.start(is_static)
        assert training.wait() == [0] * SIZE, training.log()
    assert len(wire.heard) > 10_000, "the listener was at the wire"
    found = heard_in_clear(wire)
    if encryption == "off":
        assert found == {"gradient": True, "heartbeat": not is_static}
        assert "UNENCRYPTED" in training.log()
        return
    assert found == {"gradient": False, "heartbeat": False}
    assert "UNENCRYPTED" not in training.log()
    assert b"dtrain member" not in wire.heard, "certificates are encrypted in TLS 1.3"


def test_the_same_weights_as_over_gloo(new_training: Callable[..., Training]) -> None:
    runs = [new_training(name, encryption=name, factory="tcn").start() for name in ("off", "auto")]
    for training in runs:
        assert training.wait() == [0] * SIZE, training.log()
    plain, encrypted = (weights(training.job) for training in runs)
    for name, tensor in plain.items():
        assert torch.allclose(encrypted[name], tensor, rtol=1e-5, atol=1e-6), name
    assert runs[0].job.result()["consumed"] == runs[1].job.result()["consumed"]


def test_a_killed_node_is_noticed_and_the_rest_goes_on_encrypted(
    new_training: Callable[..., Training], hosts: Hosts
) -> None:
    training = new_training(factory="user_parts:paced", max_steps=90)
    with Wire(hosts.switch_path) as wire:
        training.start()
        until(lambda: any(step["step"] >= 5 for step in training.job.events("step")), training.log)
        training.processes[0].kill()
        assert training.wait() == [KILLED, 0, 0], training.log()
    assert [len(item.members) for item in generations(training.job.rundir.storage)] == [3, 2]
    assert {item["topology"] for item in training.job.events("membership")} == {"mesh"}
    for word in (b'"regroup"', b'{"member"', b'"segments"'):
        assert word not in wire.heard


def test_without_a_secret_it_is_said_and_refused_where_it_is_required(new_training: Callable[..., Training]) -> None:
    training = new_training()
    training.start(secret=False)
    assert training.wait() == [0] * SIZE, training.log()
    assert "no secret of the launch to make certificates from" in training.log()
    assert any("UNENCRYPTED" in item["message"] for item in training.job.events("error"))
    for is_static in (False, True):
        refused = new_training(f"required-{is_static}", encryption="required").start(is_static, secret=False)
        assert refused.wait() == [2] * SIZE, refused.log()
        assert "openssl rand -hex 32" in refused.log()


def test_a_node_with_another_setting_ends_all_with_a_clear_error(new_training: Callable[..., Training]) -> None:
    training = new_training().start(arguments={1: ["--set", "training.encryption=off"]})
    codes = training.wait()
    assert set(codes) <= {1, 2}, training.log()  # 1: another node has said why the job has failed
    assert 2 in codes
    error = training.job.result()["error"]
    assert "does not encrypt its connections" in error
    assert "must be the same on all nodes" in error


STRANGER = """
import socket, ssl, sys, time
sys.path.insert(0, sys.argv[1])
from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import LaunchSecret
context = LaunchCertificate(LaunchSecret(bytes.fromhex(sys.argv[2])), "test").client
until = time.monotonic() + 60
while time.monotonic() < until:
    for port in sys.stdin.readline().split():
        try:
            with socket.create_connection((sys.argv[3], int(port)), 1) as plain:
                with context.wrap_socket(plain) as here:
                    here.settimeout(5)
                    here.recv(1)
                    print("IN", here.version())
        except OSError as error:
            print(type(error).__name__, error)
    break
"""


def test_a_stranger_with_certificates_of_another_launch_is_refused_and_disturbs_nothing(
    new_training: Callable[..., Training], hosts: Hosts
) -> None:
    training = new_training(factory="user_parts:paced", max_steps=30).start()
    until(lambda: training.job.events("step"), training.log)
    [generation] = generations(training.job.rundir.storage)
    ports = " ".join(str(seat.port) for seat in generation.members[:1])
    root = str(Path(__file__).parents[2])
    command = ["ip", "netns", "exec", hosts.names[2], sys.executable, "-c", STRANGER, root]
    told = subprocess.run(
        [*command, secrets.token_hex(32), hosts.address(0)], input=ports, capture_output=True, text=True, timeout=100
    ).stdout
    assert "IN" not in told.split()
    assert "certificate verify failed" in told
    assert training.wait() == [0] * SIZE, training.log()
    # On a busy machine a member may be suspected for a moment; then all of them agree on another generation.
    assert {len(each.members) for each in generations(training.job.rundir.storage)} == {SIZE}

"""Strangers on the same host, without the secret of a launch: what they get told, and what they can hold up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from dtrain_dagster.clusters.base import JobSpec, JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.elastic_nodes import KILLED, QUICK, Nodes, assert_undisturbed
from harness.own_models import OWN_MODELS
from harness.waiting import until
from harness.worlds import Job, build
from tests.abuse.stranger import NOBODY, Stranger, besiege, stranger
from trainer.comm.channel import PeerError
from trainer.comm.handshake import PROOF_BYTES, REPLY, AuthenticationError
from trainer.comm.launch_secret import SECRET_FILE, write_launch_secret
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.socket_group import MeshGroup, connect_mesh, exchange_places
from trainer.comm.static_rendezvous import open_listener
from trainer.comm.torch_transport import make_torch_transport
from trainer.elastic.failure_detector import FailureDetector

HOST, KEY = "127.0.0.1", b"of this launch alone"
PATIENCE = 60.0
JOIN_SECONDS = 120.0
"""Seconds that those who belong there are given. 30 were once too few, on a loaded machine: a kernel whose backlog is
full drops a connection's first packet, and the sender repeats it after 1, 3, 7, 15 and 31 seconds."""


@pytest.fixture
def who() -> Iterator[Stranger]:
    with stranger() as found:
        assert found.user == (NOBODY if os.geteuid() == 0 else os.geteuid())
        yield found


def silent(answers: list[Any]) -> None:
    """Check that the stranger got nothing but what every listener answers to a well-formed hello: a challenge, and a
    proof of its own."""
    assert [answer for answer in answers if not answer[2].startswith(b"dtA1".hex())] == []
    assert [answer for answer in answers if len(answer[2]) != 2 * REPLY.size] == []


@pytest.mark.slow
def test_the_failure_detector_knows_no_stranger_and_still_hears_its_members(who: Stranger) -> None:
    """A stranger that was let in could pose as a member, or keep this one busy."""
    with contextlib.ExitStack() as stack:
        one = FailureDetector("n0p0-a", KEY, HOST, 0.1, 1000.0)
        stack.callback(one.close)
        silent(besiege(who, [one.address[1]], ["n0p0-a", "n1p0-b"]))
        other = FailureDetector("n1p0-b", KEY, HOST, 0.1, 1000.0)
        stack.callback(other.close)
        other.follow({"n0p0-a": one.address})
        until(lambda: other.statuses() == {"n0p0-a": "here"}, "the first to be known", JOIN_SECONDS)
        one.broadcast({"regroup": 1})
        until(other.take_messages, "a message", JOIN_SECONDS)
        assert not one.take_messages()


@pytest.mark.slow
def test_the_store_and_the_parameter_server_keep_out_strangers_and_nobody_else(who: Stranger) -> None:
    """A stranger that was let in could forge the addresses that ranks connect to, or add to a sum."""
    listener, star = open_listener(HOST), open_listener(HOST)
    address = listener.getsockname()
    served = AuthenticatedStore(address, 0, 3, KEY, JOIN_SECONDS, listener)
    try:
        with ThreadPoolExecutor(1) as pool:
            served.set("0", "honest")
            forming = pool.submit(ParameterServerGroup.serve, star, 2, KEY, JOIN_SECONDS)
            silent(besiege(who, [address[1], star.getsockname()[1]], ["0", "1", "store", "server"]))
            late = AuthenticatedStore(address, 1, 3, KEY, JOIN_SECONDS)
            late.set("1", "too")
            assert served.multi_get(["0", "1"]) == [b"honest", b"too"]
            assert served.num_keys() == 2
            joining = partial(ParameterServerGroup.connect_worker, star.getsockname(), 1, 2, KEY, JOIN_SECONDS)
            assert sums([lambda: forming.result(JOIN_SECONDS), joining])
    finally:
        served.close()


@pytest.mark.slow
def test_peers_find_each_other_though_a_stranger_comes_first(who: Stranger) -> None:
    """It comes to each port as soon as that is known; and with the place of a rank in gloo, it has not its key."""
    answers = list[Any]()

    class Told(dist.HashStore):
        def set(self, name: str, value: str) -> None:
            super().set(name, value)
            if name == "0":
                port = json.loads(value)[1]
                who.does("flood", ports=[port], count=500)
                answers.extend(who.does("hello", ports=[port], names=["1"], recorded="cd" * PROOF_BYTES))

    told = Told()

    def join(rank: int) -> MeshGroup:
        listener, places = exchange_places(told, rank, 2, HOST)
        return MeshGroup(rank, connect_mesh(places, rank, listener, KEY, JOIN_SECONDS), JOIN_SECONDS)

    assert sums([partial(join, rank) for rank in range(2)])
    silent(answers)
    found = dist.HashStore()
    refused = at_once(
        [
            partial(make_torch_transport, found, rank, 2, None, JOIN_SECONDS, JOIN_SECONDS, HOST, key=key)
            for rank, key in enumerate((KEY, b"a guess"))
        ]
    )
    for future in refused:
        with pytest.raises((AuthenticationError, PeerError)):
            future.result(JOIN_SECONDS)


def sums(openers: Sequence[Callable[[], Any]]) -> bool:
    """Return whether these ranks, each from its opener, compute the right sum."""
    links = [future.result(JOIN_SECONDS) for future in at_once(openers)]
    tensors = [torch.full((8,), rank + 1.0) for rank in range(len(links))]
    try:
        for future in at_once([lambda rank=rank: links[rank].all_reduce(tensors[rank]) for rank in range(len(links))]):
            future.result(JOIN_SECONDS)
    finally:
        for link in links:
            link.close()
    total = sum(range(1, len(links) + 1))
    return all(tensor.tolist() == [total] * 8 for tensor in tensors)


def at_once(actions: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(actions)) as pool:
        return [pool.submit(action) for action in actions]


SHOWS = """
import os, pathlib, time
from trainer.runtime.launch import Launch
launch = Launch.read(os.environ).number
out = pathlib.Path({out!r})
secret = pathlib.Path(os.environ["DTRAIN_LAUNCH_SECRET_FILE"])
(out / f"{{os.environ['RANK']}}-{{launch}}.tmp").write_text(f"{{secret}} {{secret.read_text()}}")
(out / f"{{os.environ['RANK']}}-{{launch}}.tmp").rename(
    out / f"{{os.environ['RANK']}}-{{launch}}")
while not (out / "go").exists():
    time.sleep(0.05)
if launch == 1:
    os.kill(os.getpid(), 9)
(pathlib.Path({run_dir!r}) / "result.json").write_text('{{"status": "succeeded", "launch": 2}}')
"""


def test_a_secret_is_in_one_file_of_its_launch_and_nowhere_else(tmp_path: Path, who: Stranger) -> None:
    """All nodes are killed at once: that is a second launch, with a secret of its own."""
    tmp_path.chmod(0o755)
    manager, shown = LocalClusterManager(tmp_path / "home"), tmp_path / "shown"
    shown.mkdir()
    run_dir = manager.folder / "shows"
    script = tmp_path / "shows.py"
    script.write_text(SHOWS.format(out=str(shown), run_dir=str(run_dir)))
    manager.submit_job(
        JobSpec(job_id="shows", run_dir=str(run_dir), command=(sys.executable, str(script)), node_count=2, elastic=True)
    )
    try:
        secrets = list[str]()
        for launch in (1, 2):
            told = {until((shown / f"{rank}-{launch}").exists, "a node") and (shown / f"{rank}-{launch}").read_text()
                    for rank in range(2)}  # fmt: skip
            [(path, secret)] = [text.split(" ") for text in told]
            secrets.append(secret)
            assert not Path(path).is_relative_to(run_dir)
            if who.user == NOBODY:
                assert who.does("read", path=path) is None
            assert_nowhere(secret, tmp_path / "home", besides=Path(path))
            (shown / "go").touch()
        assert len(set(secrets)) == 2
        until(lambda: manager.job_status("shows").state.is_final, "the end")
        assert manager.job_status("shows").state is JobState.SUCCEEDED, manager.job_status("shows")
        until(lambda: not Path(path).exists(), "the file to be removed")
        for secret in secrets:
            assert_nowhere(secret, tmp_path / "home")
    finally:
        manager.cancel_job("shows")


def assert_nowhere(secret: str, home: Path, besides: Path | None = None) -> None:
    """In no file below the home, and in no arguments or environment of a process."""
    for path in home.rglob("*"):
        if path != besides and path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            assert not any(secret in word for word in process.cmdline())
            assert not any(secret in word for word in process.environ().values())


class Siege:
    """Everything a stranger can do at every port of these processes, over and over, until it is closed."""

    def __init__(self, who: Stranger, nodes: Nodes) -> None:
        self.who, self.nodes = who, nodes
        self.answers, self.rounds = list[Any](), 0
        self.stands, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.is_set():
            ports = sorted(listening(self.nodes))
            if ports:
                members = [seat.member for generation in self.nodes.history()[-1:] for seat in generation.members]
                self.who.does("flood", ports=ports, count=700 * len(ports))
                self.stands.set()
                self.who.does("numbers", ports=ports, ranks=3)
                self.answers += besiege(self.who, random.sample(ports, 1), members[:1], 0)
                self.rounds += 1
                self.who.does("drop")


def listening(nodes: Nodes) -> set[int]:
    found = set[int]()
    for process in nodes.processes.values():
        with contextlib.suppress(psutil.Error, TypeError):
            for connection in psutil.Process(process.pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.port)
    return found


@pytest.mark.long
@pytest.mark.slow
def test_a_training_under_siege_ends_with_the_honest_weights(tmp_path: Path, who: Stranger) -> None:
    """A node is killed in the middle of it, so that the others regroup; and no process may have more than 512
    descriptors, so that raising the limit is of no help."""
    dataset = build(tmp_path)
    write_launch_secret(tmp_path / "secrets" / "launch")
    environment = {
        "DTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(OWN_MODELS),
        SECRET_FILE: str(tmp_path / "secrets" / "launch"),
    }  # fmt: skip
    training = {**QUICK, "epochs": 4, "collective_timeout_seconds": 10}

    def job(name: str, **args: float) -> Job:
        made = Job(tmp_path / name, dataset, training=training, environment=environment)
        made.sections["model"] = {"factory": "user_parts:paced", "args": args}
        return made

    whole = job("whole", seconds=0.0)
    assert whole.run_here() == 0, whole.result()
    nodes = Nodes(job("besieged", seconds=0.1)).start()
    siege = None
    try:
        nodes.until_step(2)
        for process in nodes.processes.values():
            assert process.pid is not None
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (512, 512))
        siege = Siege(who, nodes)
        assert siege.stands.wait(PATIENCE)
        nodes.signal(9, 1)
        assert nodes.wait() == [0, KILLED, 0], nodes.log()
    finally:
        if siege is not None:
            siege.close()
        nodes.kill()
    assert siege.rounds
    assert [answer for answer in siege.answers if not answer[2].startswith(b"dtA1".hex())] == []
    assert_undisturbed(nodes, whole)
    assert "NOT authenticated" not in nodes.log()

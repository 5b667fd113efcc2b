"""Trainings on several hosts: each machine of an engine has a network of its own, and they share nothing but files and
one switch (`harness.namespaces`). No host has a default route, and the first interface of each has an address at
which nobody reaches it: what a node takes for its own address matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import EngineClusterManager, LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from harness.engines.engine_training import NODES, STEPS, Outcome, Training, own_models, train_here, write_job
from harness.engines.machines import Machines, missing, open_machines
from harness.namespaces import Hosts, NoNamespacesError
from tests.engines.engine_trials import assert_nothing_is_left, assert_same, incarnations
from trainer.config import FactoryConfig
from trainer.elastic.generation_record import generations

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(340)]
SLOWER = FactoryConfig(factory="paced:tcn", args={"pause_seconds": 0.1})
"""Enough time for an engine to miss a machine that is cut off, and to have it back."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same training on the local cluster, on loopback."""
    return train_here(tmp_path_factory.mktemp("here"), SLOWER)


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests begin without any of our variables."""
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "paced")


@pytest.fixture(scope="module", params=["slurm", "kubernetes", "ray"])
def machines(request: pytest.FixtureRequest, expected: Outcome) -> Iterator[Machines]:
    if why := missing(request.param):
        pytest.skip(why)
    try:
        with own_models(), open_machines(request.param, NODES, on_hosts=True) as opened:
            yield opened
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.fixture
def training(machines: Machines, tmp_path: Path) -> Iterator[Training]:
    with open_training(machines, tmp_path) as made:
        yield made


@contextmanager
def open_training(machines: Machines, folder: Path, steps: int = STEPS, **options: Any) -> Iterator[Training]:
    settings = LaunchSettings(engine=machines.kind, cluster_name="engine", replacement_delay_seconds=0.0)
    given = machines.options(folder) | options
    made = Training(EngineClusterManager(folder, settings, given), write_job(folder, steps, model=SLOWER))
    yield made
    made.close()
    assert_nothing_is_left(made, machines)


def members(training: Training, generation: int = -1) -> dict[int, str]:
    """The addresses of a generation's members, by node, as its record has them."""
    return {member.node: member.host for member in generations(training.rundir.storage)[generation].members}


def places(machines: Machines, training: Training) -> dict[int, list[str]]:
    """The addresses of the machines on which the nodes run, by node."""
    running = [job for job in machines.jobs(training.launch()) if job.state == "running"]
    return {job.node_id: machines.addresses(job) for job in running}


def assert_own_addresses(machines: Machines, training: Training) -> None:
    """Each member of the newest generation meets the others at an address of its own machine."""
    own, met = places(machines, training), members(training)
    assert sorted(met) == list(range(NODES))
    assert len(set(met.values())) == NODES
    assert all(address in own[node] for node, address in met.items()), (met, own)
    assert not any(address.startswith("127.") for address in met.values())


def test_each_node_finds_the_address_of_its_own_host(machines: Machines, training: Training, expected: Outcome) -> None:
    training.submit()
    training.run_until(lambda: training.step() > 20, "a step")
    assert_own_addresses(machines, training)
    met = members(training)
    made = training.outcome()
    assert made[:3] == expected[:3]
    assert_same(training, expected, tolerance=0.0)
    assert {node.node_id: node.host for node in training.rundir.nodes()} == met
    assert len(generations(training.rundir.storage)) == 1


def test_a_host_is_cut_off_and_comes_back(machines: Machines, training: Training, expected: Outcome) -> None:
    """Nobody is told: no connection closes. The host is given up, and its node begins elsewhere. No engine can end what
    still runs there: it reads in the storage that it was given up. When the cable is back nothing of it is left."""
    training.submit()
    training.run_until(lambda: training.step() > 20, "a step")
    plug_in = machines.cut_node(node_of(machines, training, 1))
    try:
        training.run_until(lambda: list(members(training)) == [0], "the group without it")
        training.run_until(lambda: (1, 2) in incarnations(training), "a replacement")
        training.run_until(lambda: len(members(training)) == NODES, "its place in the group")
        assert_own_addresses(machines, training)
        training.run_until(lambda: not training.processes("--node 1 --incarnation 1"), "the end of what was cut off")
    finally:
        plug_in()
    assert_same(training, expected)
    assert incarnations(training) == [(0, 1), (1, 1), (1, 2)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(NODES) as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("setting", ["", "DTRAIN_INTERFACE=eth0", "DTRAIN_HOST=10.79.1.$((NODE_RANK + 1))"])
def test_nodes_of_the_local_cluster_on_hosts_of_their_own(
    hosts: Hosts, tmp_path: Path, expected: Outcome, setting: str
) -> None:
    steps = 60 if setting else STEPS
    place = ["sh", "-c", f'{setting} exec "$@"', "with", *hosts.local_cluster]
    training = Training(LocalClusterManager(tmp_path), write_job(tmp_path, steps, model=SLOWER), place=place)
    training.submit()
    try:
        assert training.end() == JobState.SUCCEEDED, training.said()
    finally:
        training.close()
    address = hosts.other_address if "HOST" in setting else hosts.address
    assert members(training) == {node: address(node) for node in range(NODES)}
    if not setting:
        assert_same(training, expected, tolerance=0.0)


def node_of(machines: Machines, training: Training, node: int) -> Any:
    return next(job for job in machines.jobs(training.launch()) if job.node_id == node)

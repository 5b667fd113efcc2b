from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.azure.azurite import Azurite, missing
from harness.azure.emulator import Emulator
from harness.azure.emulator.contract import schemas_folder, violations
from tests.azure.shell import MODEL, Shell
from tests.outcome import SERVICES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test asks first for a service starts it, which is slow."""
    for item in items:
        if {"cloud", "azurite"} & set(getattr(item, "fixturenames", ())) and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)


@contextlib.contextmanager
def shared(service: int) -> Iterator[None]:
    """What this process and its children do is counted with the tests that use them."""
    pids = {service, *(child.pid for child in psutil.Process(service).children())}
    SERVICES.update(pids)
    yield
    SERVICES.difference_update(pids)


@pytest.fixture(scope="session")
def azurite_installed() -> None:
    """Skips where storage cannot be emulated. A fixture, since the first one that asks installs it."""
    if why := missing():
        pytest.skip(why)


@pytest.fixture(scope="session")
def azurite(azurite_installed: None) -> Iterator[Azurite]:
    """A storage account for the whole session, found by key. Its containers are shared: make one of your own."""
    with Azurite() as account, shared(account.pid):
        yield account


@pytest.fixture
def container(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes containers; gives their addresses (``az://…``), which this process and its children can open."""
    for name in ("AZURE_STORAGE_ACCOUNT_URL", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)

    def make() -> str:
        name = f"c{uuid.uuid4().hex[:12]}"
        azurite.create_container(name)
        return f"az://{name}"

    return make


@pytest.fixture(scope="session")
def cloud(azurite_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator, which takes seconds to start; whoever uses them renews the workspace first."""
    with Emulator(tmp_path_factory.mktemp("emulator")) as started, shared(started.storage_pid):
        yield started


@pytest.fixture(scope="module")
def emulator(cloud: Emulator) -> Iterator[Emulator]:
    """A workspace for the tests of one file. In the end, whatever they PUT is held against our own schema,
    and against Azure's where these are at hand."""
    cloud.control("renew")
    yield cloud
    requests = cloud.control("requests")
    assert violations(requests, None) == []
    if (schemas := schemas_folder()) is not None:
        assert violations(requests, schemas) == []


@pytest.fixture(scope="module")
def client(emulator: Emulator) -> Iterator[Any]:
    """The SDK's client of that workspace, in a process that takes the emulator for Azure."""
    with pytest.MonkeyPatch.context() as patch:
        emulator.use(patch)
        yield new_client()


@pytest.fixture
def stage(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Any]:
    """A cluster's `Stage`. After each test: nothing left Failed, and everything that it bought given back."""
    from dtrain_dagster.clusters.azure_ml import client, jobs, provision  # and with them the client's packages
    from tests.azure.stage import TIMING, Stage

    monkeypatch.setattr(client, "RETRIES", dataclasses.replace(client.RETRIES, first_pause_seconds=0.1))
    monkeypatch.setattr(provision, "LOOK_SECONDS", 0.1)
    emulator.control("timing", **TIMING)
    emulator.use(monkeypatch)
    made = Stage(emulator, tmp_path, f"t{zlib.crc32(request.node.name.encode()) % 10**6}")
    monkeypatch.setattr(jobs, "stage_for_nodes", made.stage_code)
    yield made
    emulator.control("clear")
    states = {name: compute["state"] for name, compute in made.computes().items()}
    made.manager().cleanup_cluster()
    assert "Failed" not in states.values()
    assert not made.computes()
    assert not [name for name, job in made.jobs().items() if job["status"] not in ("Completed", "Failed", "Canceled")]


def new_client() -> Any:
    """Of the workspace that the environment names."""
    from azure.ai.ml import MLClient
    from azure.identity import DefaultAzureCredential

    where = [os.environ[f"DTRAIN_AZURE_{name}"] for name in ("SUBSCRIPTION_ID", "RESOURCE_GROUP", "WORKSPACE")]
    return MLClient(DefaultAzureCredential(), *where)


@pytest.fixture
def shell(cloud: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """`dtrain` before a workspace of this test's own."""
    cloud.control("renew")
    for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
        monkeypatch.delenv(name)
    cloud.use(monkeypatch)
    own = {
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_CLUSTER": "azure_ml",
        "DTRAIN_CLUSTER_NAME": "dtrain",
        "DTRAIN_STORAGE": "az://dtrain/team",
        "DTRAIN_AZURE_IMAGE": "emulated.azurecr.io/dtrain:1",
        "DTRAIN_THREADS_PER_RANK": "1",
        "DTRAIN_FACTORY_MODULES": "my_model",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "my_model.py").write_text(MODEL)
    return Shell(folder, cloud, dict(os.environ) | cloud.environment | own)

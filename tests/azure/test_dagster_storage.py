"""Dagster's own files on the Azure path: outputs of runs in Blob, values of assets in ADLS Gen2, by dagster-azure.

Real: dagster, dagster-azure, the clients of Azure, TLS, tokens, Azurite. Emulated: the DFS endpoint
(`harness.azure.data_lake`), and who gives out tokens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import requests
import yaml

from harness.azure.azurite import ACCOUNT
from harness.azure.data_lake import DataLake
from harness.azure.emulator import ENVIRONMENT_OF_OTHERS, Emulator
from tests.azure.planted import ENVIRONMENT
from tests.leaks import leaks
from trainer.storage.azure_account import service

ROOT = Path(__file__).parents[2]
TOKEN = re.compile(rb"Bearer [\w-]{8}|eyJ[\w-]{8,}\.eyJ|[?&]sig=")
"""A token of an identity, or a signature in an address."""
RUN = """
import os
import sys
import dagster as dg
from dtrain_dagster.definitions import build_defs

@dg.asset
def numbers(context: dg.AssetExecutionContext):
    print("said on the way", flush=True)
    return {"one": [1.5, 2.5], "two": "ü" * int(sys.argv[2])}

@dg.asset
def total(numbers):
    return sum(numbers["one"])

assets = [numbers, total]
resources = {"io_manager": build_defs().resources["io_manager"]}
with dg.DagsterInstance.get() as instance:
    done = dg.materialize(assets, resources=resources, instance=instance, selection=sys.argv[1])
    assert done.success
    print("run", done.run_id)
"""


@pytest.fixture
def lake(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataLake]:
    """An account with a file system «dagster», opened by an identity."""
    with DataLake(emulator.environment["AZURE_STORAGE_ACCOUNT_URL"], emulator.folder / "certificates") as account:
        emulator.use(monkeypatch)
        if not service().get_container_client("dagster").exists():
            service().create_container("dagster")
        yield account


@pytest.fixture
def environment(lake: DataLake, emulator: Emulator, tmp_path: Path) -> dict[str, str]:
    """Of a process that has the address, and secrets that it must tell nobody."""
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT_OF_OTHERS}
    own = {name: value for name, value in ENVIRONMENT.items() if name not in ENVIRONMENT_OF_OTHERS}
    return {
        **kept,
        **emulator.environment,
        **own,
        "PYTHONPATH": os.pathsep.join([emulator.environment["PYTHONPATH"], str(ROOT)]),
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DAGSTER_HOME": str(tmp_path / "home" / "dagster"),
        "DTRAIN_CLUSTER": "azure_ml",
        "DTRAIN_AZURE_IMAGE": "emulated.azurecr.io/dtrain:1",
        "DTRAIN_AZURE_DAGSTER_STORAGE": f"abfss://dagster@{ACCOUNT}.dfs.{lake.suffix}/team",
    }


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def blobs() -> dict[str, Any]:
    return {item.name: item for item in service().get_container_client("dagster").list_blobs(name_starts_with="team/")}


@pytest.mark.long
@pytest.mark.slow
def test_values_and_outputs_go_to_azure_and_are_read_on_another_machine(
    environment: dict[str, str], lake: DataLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = [sys.executable, "-m", "dtrain_dagster", "setup"]
    run(environment, *setup)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    first = run(environment, sys.executable, str(script), "numbers", "3000000")
    # Overwritten, and then read by a machine that has nothing but the address.
    run(environment, sys.executable, str(script), "numbers", "20")
    elsewhere = environment | {
        "DTRAIN_HOME": str(tmp_path / "other"),
        "DAGSTER_HOME": str(tmp_path / "other" / "dagster"),
    }
    run(elsewhere, *setup)
    second = run(elsewhere, sys.executable, str(script), "total", "0")
    assert "abfss://dagster@" in second, "where the value lies is said"

    found = blobs()
    assert {"team/numbers", "team/total"} <= set(found)
    assert found["team/numbers"].size < 1000, "the small value has replaced the large one"
    assert {kind for kind, *_ in lake.requests} == {"blob", "dfs"}
    homes = [tmp_path / "home", tmp_path / "other"]
    assert not [path for home in homes for path in home.rglob("*") if path.name in ("numbers", "total")]

    [run_id] = re.findall(r"^run (\S+)$", first, re.MULTILINE)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for home in homes:
        with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
            manager = instance.compute_log_manager
            assert type(manager).__name__ == "AzureBlobComputeLogManager"
            [key] = {
                tuple(name.removeprefix("team/storage/").removesuffix(".out").split("/"))
                for name in found
                if run_id in name and name.endswith(".out")
            }
            assert b"said on the way" in (manager.get_log_data(list(key)).stdout or b"")
            link = manager.get_log_metadata(list(key)).stdout_download_url
            assert link is not None
            assert requests.get(link, timeout=30).content == b"said on the way\n", "as a browser without identity does"
    # No token, key or signature in what was written here, stored there or printed.
    contents = tmp_path / "stored"
    contents.mkdir()
    for index, name in enumerate(found):
        (contents / str(index)).write_bytes(service().get_blob_client("dagster", name).download_blob().readall())
    (tmp_path / "printed.txt").write_text(first + second)
    assert not leaks([tmp_path], ENVIRONMENT.values())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.search(path.read_bytes())]


@pytest.mark.slow
def test_setup_writes_where_outputs_go_and_takes_it_away_again(environment: dict[str, str]) -> None:
    dtrain = [sys.executable, "-m", "dtrain_dagster", "setup"]
    file = Path(environment["DAGSTER_HOME"]) / "dagster.yaml"
    run(environment, *dtrain)
    written = yaml.safe_load(file.read_text())
    config = written.pop("compute_logs")["config"]
    assert config["default_azure_credential"] == {}
    assert not [name for name in config if "key" in name or "secret" in name]
    assert written == yaml.safe_load((ROOT / "dagster.yaml").read_text())
    changed = file.stat().st_mtime_ns
    run(environment, *dtrain)
    assert file.stat().st_mtime_ns == changed, "nothing to write"
    del environment["DTRAIN_AZURE_DAGSTER_STORAGE"]
    run(environment, *dtrain)
    assert yaml.safe_load(file.read_text()) == written

"""The emulator comes and goes: one command for a person, and nothing of it is left however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.azure.emulator import ROOT, Emulator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("azurite_installed")]


def submit_endless_job() -> None:
    from azure.ai.ml import MLClient, command
    from azure.ai.ml.entities import AmlCompute, Environment
    from azure.identity import DefaultAzureCredential

    where = [os.environ[f"DTRAIN_AZURE_{name}"] for name in ("SUBSCRIPTION_ID", "RESOURCE_GROUP", "WORKSPACE")]
    client = MLClient(DefaultAzureCredential(), *where)
    client.compute.begin_create_or_update(AmlCompute(name="cpu", size="Standard_DS3_v2", max_instances=2)).result()
    client.jobs.create_or_update(
        command(
            name="endless",
            command="setsid sleep 1000 & sleep 1000",
            environment=Environment(name="image", version="1", image="registry.example/image:1"),
            compute="cpu",
            instance_count=2,
        )
    )


def wait(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def test_nothing_is_left_of_its_jobs_if_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Emulator(tmp_path / "azure") as emulator:
        emulator.use(monkeypatch)
        submit_endless_job()
        wait(lambda: emulator.control("state")["jobs"]["endless"]["status"] == "Running")
        assert emulator.process is not None
        root = psutil.Process(emulator.process.pid)
        wait(lambda: sum(child.name() == "sleep" for child in root.children(recursive=True)) == 4)
        below = root.children(recursive=True)
        assert any("node" in child.name() for child in below), "Azurite"
        emulator.process.send_signal(signal.SIGKILL)
        emulator.process.wait()
        psutil.wait_procs(below)


def test_one_command_for_a_person(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness.azure.emulator"]
    folder = tmp_path / "azure"
    folder.mkdir()
    (folder / "azure.env").write_text("exit 1")  # of an emulator that was killed
    process = subprocess.Popen([*command, "--folder", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            break
    shell = f"set -eu; export PYTHONPATH=mine; . {folder}/azure.env; echo $PYTHONPATH"
    shell += "; curl -sS --cacert $SSL_CERT_FILE $ARM_CLOUD_METADATA_URL"
    shell += "; curl -sS -X POST $AZURE_EMULATOR_CONTROL/bought"
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert "EmulatedCloud" in said
    assert said.splitlines()[0].endswith("harness/azure/resolver:mine")
    assert '"alive_nodes":0' in said
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    process.stdout.close()
    assert not (folder / "azure.env").exists(), "it would lead nowhere"

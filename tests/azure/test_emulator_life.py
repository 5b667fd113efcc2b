"""The emulator comes and goes by one command for a person, which leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.azure.emulator import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("azurite_installed")]


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

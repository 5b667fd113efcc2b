"""A program under Horovod on an emulated workspace; `make test-engines` runs it, where Horovod is installed."""

from __future__ import annotations

import json
import re

import pytest

from tests.azure.shell import JOBS, Shell
from tests.frameworks.shell import SCRIPTS, needs
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@needs("horovod")
def test_horovod_on_nodes_of_a_workspace(shell: Shell) -> None:
    script = str(SCRIPTS / "horovod_script.py")
    said = shell("launch", "--engine", "horovod", "--nodes", "2", "--name", "h", script)
    assert "must be in the image" in said
    assert "job h: succeeded" in shell("status", "h")
    ends = dict(re.findall(r"rank (\d) loss [\d.]+ weights ([0-9a-f]{16})", shell("logs", "h")))
    assert set(ends) == {"0", "1"}
    assert ends["0"] == ends["1"]
    nodes = RunDir(f"{JOBS}/h").nodes()
    assert sorted((node.node_id, node.exit_codes) for node in nodes) == [(0, (0,)), (1, (0,))]
    assert json.loads(shell("cost", "h", "--json"))["total_usd"] > 0

    shell("launch", "--engine", "horovod", "--nodes", "2", "--name", "f", script, "--fail-at", "3", code=7)
    assert "job f: failed" in shell("status", "f")

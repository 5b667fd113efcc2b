"""Programs under a framework on clusters whose engine runs the nodes: real ones, all on this machine."""

from __future__ import annotations

import os
import re

import pytest

from harness.engines.machines import missing, open_machines, variables
from tests.frameworks.shell import SCRIPTS, Shell, needs

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(params=["slurm", "kubernetes", "ray"])
def on_engine(request: pytest.FixtureRequest, shell: Shell) -> Shell:
    """A shell whose cluster is a real one of this kind."""
    kind: str = request.param
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        own = {"DTRAIN_CLUSTER": kind, "DTRAIN_CLUSTER_NAME": "engine"}
        shell.env |= {**os.environ, **variables(kind, machines.options(shell.folder)), **own, **shell.env}
        for name in ("PATH", "LD_LIBRARY_PATH"):
            if name in os.environ:
                shell.env[name] = os.environ[name]
        yield shell


@needs("horovod")
def test_horovod_on_nodes_of_an_engine(on_engine: Shell):
    shell = on_engine
    command = ["--engine", "horovod", "--nodes", "2", "--procs-per-node", "1", "--name", "h"]
    said = shell("launch", *command, "--", "python", str(SCRIPTS / "horovod_script.py"))
    assert "note: the script and what it imports must be at the same path" in said
    assert "rank 1 of 2, 0 of 1 on node 1" in said
    ends = dict(re.findall(r"rank (\d) loss [\d.]+ weights ([0-9a-f]{16})", said))
    assert ends["0"] == ends["1"]
    shell.assert_accounted("h", nodes=2)
    said = shell("launch", *command[:-1], "m", "--", "/nowhere/s.py", code=2)
    assert "there is no script /nowhere/s.py on this node" in said

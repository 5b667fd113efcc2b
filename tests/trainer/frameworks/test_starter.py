"""The starter as a process: what it becomes, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.frameworks.__main__ import refuse_missing


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer.frameworks", *arguments], capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3]), **environment},
    )  # fmt: skip


def test_it_becomes_the_program_and_says_nothing_of_its_own(tmp_path: Path):
    script = tmp_path / "s.py"
    script.write_text("import sys; print(*sys.argv[1:]); sys.exit(7)")
    done = start("--engine", "torchrun", "--", sys.executable, str(script), "--engine", "x", "--")
    assert (done.returncode, done.stdout, done.stderr) == (7, "--engine x --\n", "")


def test_tensorflow_of_one_rank_needs_nobody(tmp_path: Path):
    script, package = tmp_path / "s.py", tmp_path / "lib" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the starter imports no framework')")
    script.write_text("import os; print(os.environ['TF_CONFIG'])")
    path = f"{Path(__file__).parents[3]}:{package.parent}"
    done = start("--engine", "tensorflow", "--", sys.executable, str(script), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('{"cluster": {"worker": ["')


def test_the_first_rank_of_horovod_serves_while_its_program_runs(tmp_path: Path):
    """With the rendezvous server of Horovod's that is pure Python, as a stand-in."""
    lib = tmp_path / "lib" / "horovod" / "runner"
    for folder in (lib / "http", lib / "common" / "util"):
        folder.mkdir(parents=True)
    (lib / "http" / "http_server.py").write_text(
        "from http.server import HTTPServer, SimpleHTTPRequestHandler as RendezvousHandler\n"
        "class RendezvousHTTPServer(HTTPServer):\n"
        "    __init__ = lambda self, address, handler, verbose: HTTPServer.__init__(self, address, handler)\n"
        "    init = lambda self, plan: print('serves', plan, flush=True)\n"
    )
    (lib / "common" / "util" / "hosts.py").write_text(
        "parse_hosts = str\nget_host_assignments = lambda *given: given\n"
    )
    (lib.parent / "__init__.py").touch()
    script = tmp_path / "s.py"
    script.write_text(
        "import os, socket; name = 'HOROVOD_GLOO_RENDEZVOUS_'\n"
        "socket.create_connection((os.environ[name + 'ADDR'], int(os.environ[name + 'PORT']))); raise SystemExit(9)"
    )
    path = f"{Path(__file__).parents[3]}:{tmp_path / 'lib'}"
    done = start("--engine", "horovod", "--", sys.executable, str(script), PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (9, "serves ('node-0:1', 1)\n"), done.stderr


def test_what_is_not_on_a_node_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no script /nowhere/s.py on this node.*at the same path"):
        refuse_missing([sys.executable, "/nowhere/s.py"])
    with pytest.raises(ConfigError, match="no program 'nothing'"):
        refuse_missing(["nothing", "s.py"])
    refuse_missing([sys.executable, "-m", "x.py"])
    done = start("--engine", "torchrun", "--", sys.executable, "/nowhere/s.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)

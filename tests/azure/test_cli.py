"""`dtrain launch` on an emulated workspace."""

from __future__ import annotations

import json

import pytest

from tests.azure.shell import JOBS, Shell
from trainer.rundir import RunDir

pytestmark = pytest.mark.long  # each time: the commands in cli/test_main.py, such jobs in test_manager.py


PROGRAM = """
import os, sys
from helper import WORDS

print(WORDS, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]))
"""


def test_a_program_goes_along_with_what_it_imports_and_is_paid_for(shell: Shell) -> None:
    (shell.folder / "program.py").write_text(PROGRAM)
    (shell.folder / "helper.py").write_text("WORDS = 'a program of my own'\n")
    assert "must be a Python script on this machine" in shell("launch", "--", "bash", "run.sh", code=2)

    done = shell.start("launch", "--nodes", "2", "--name", "own", "program.py", "0")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, out + err
    assert "must be in the image" in err
    for rank in (0, 1):
        assert f"a program of my own rank {rank} of 2 0" in shell("logs", "own")
    assert "job own: succeeded" in shell("status", "own")
    nodes = RunDir(f"{JOBS}/own").nodes()
    assert sorted((node.node_id, node.exit_codes) for node in nodes) == [(0, (0,)), (1, (0,))]
    assert json.loads(shell("cost", "own", "--json"))["total_usd"] > 0

    failed = shell.start("launch", "--nodes", "1", "--name", "bad", "program.py", "7")
    out, err = failed.communicate(timeout=120)
    assert failed.returncode != 0, out + err
    assert "job bad: failed" in shell("status", "bad")
    assert [node.exit_codes for node in RunDir(f"{JOBS}/bad").nodes()] == [(7,)]

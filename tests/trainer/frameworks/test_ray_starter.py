"""Two ranks of the starter with a stand-in for Ray's command; the real one is in tests/frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.worlds import free_port
from trainer.frameworks.ray import NAME_PREFIX

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[3])
RAY = """
import os, sys, time
print("said", "RAY_AUTH_TOKEN" in os.environ, "RANK" in os.environ, *sys.argv[1:])
if "busy" in os.environ["HOW"] and not os.path.exists(os.environ["TMPDIR"] + "/tried"):
    open(os.environ["TMPDIR"] + "/tried", "w").close()
    sys.exit("Exception: The current node timed out during startup. This could happen")
if "refuse" in os.environ["HOW"]:
    sys.exit(3)
print("Ray runtime started.")
time.sleep(1.0 if "short" in os.environ["HOW"] else 600.0)
"""
SCRIPT = """
import os, sys, time
print("address", os.environ["RAY_ADDRESS"], "RANK" in os.environ, flush=True)
time.sleep(600 if "short" in os.environ["HOW"] else 0)
sys.exit(5)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as made:
        yield Path(made)


def run_two(folder: Path, how: str) -> list[tuple[int, str]]:
    """The exit code and the output of each rank."""
    lib = folder / "lib"
    for package in ("ray", "ray/scripts", "ray/train"):
        (lib / package).mkdir(parents=True)
        (lib / package / "__init__.py").touch()
    (lib / "ray" / "scripts" / "scripts.py").write_text(RAY)
    (folder / "s.py").write_text(SCRIPT)
    (folder / "tmp").mkdir()
    port, ranks = free_port(), []
    for rank in range(2):
        own = {"RANK": rank, "WORLD_SIZE": 2, "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "trainer.frameworks", "--engine", "ray", "--", sys.executable, folder / "s.py"],
                env={
                    "PATH": os.environ["PATH"], "PYTHONPATH": f"{lib}:{ROOT}", "HOW": how,
                    "TMPDIR": str(folder / "tmp"),
                    **{name: str(value) for name, value in own.items()},
                },
                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def left(folder: Path) -> list[str]:
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or [])
    ]


def test_the_script_runs_once_and_all_ranks_end_as_it_does(folder: Path):
    (code, said), (other, nothing) = run_two(folder, "")
    assert code == other == 5
    assert said.startswith("address 127.0.0.1:")
    assert "RANK" not in said
    assert said.endswith("False\n"), "torchrun's variables are not for Ray's workers"
    assert nothing == ""
    assert left(folder) == []
    assert not list((folder / "tmp").glob(f"{NAME_PREFIX}*"))


def test_a_ray_that_ends_ends_the_script_that_would_wait_for_it(folder: Path):
    (code, said), (other, told) = run_two(folder, "short")
    assert code == other == 75
    assert (
        "the Ray of this job has ended before its program: `ray start` ended with exit code 0: said True False" in said
    )
    assert "the process that runs the program has ended" in told
    assert left(folder) == []


def test_a_machine_that_is_too_busy_at_first_is_tried_again(folder: Path):
    (code, said), (other, _) = run_two(folder, "busy")
    assert code == other == 5, said
    assert (folder / "tmp" / "tried").exists()


def test_a_ray_that_does_not_start_says_why(folder: Path):
    (code, said), (other, _) = run_two(folder, "refuse")
    assert (code, other) == (2, 75)
    assert (
        "the Ray of this job does not start: `ray start` ended with exit code 3: said True False start --head" in said
    )
    assert not said.startswith("address"), "the script did not begin"

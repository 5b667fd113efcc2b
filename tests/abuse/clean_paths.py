"""Run `make clean` with odd homes, and watch files placed where a path that is cut, expanded or run would lead."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.abuse.tally import Tally

ROOT = Path(__file__).parents[2]
ODD = (
    " ", "  ", "'", '"', "$", "$(touch executed)", "`touch executed`", ";touch executed;", "&", "|touch executed", "*",
    "?", "[a]", "{a,b}", "-rf", "--", "~", "#", "\\", "%", "ü", "\u00a0", "!", "(", ")", "<", ">", "=", "@", ":", "\t",
)  # fmt: skip
"""Pieces of names that are put together at random; none has a slash, which would only make one more folder."""


def copy_of_the_makefile(folder: Path) -> Path:
    """Return a folder in which this repository's Makefile runs, with the packages of the Python that runs this."""
    folder.mkdir(parents=True)
    for name in (
        "Makefile",
        "pyproject.toml",
        "dagster.yaml",
        *(path.name for path in ROOT.glob("requirements*.lock")),
    ):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
            os.utime(folder / name, (0, 0))  # older than what is installed: nothing is installed again
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries.parent / ".ready").touch()
    for name in ("dtrain", "python"):
        (binaries / name).symlink_to(Path(sys.executable).parent / name)
    return folder


def odd_name(random: random.Random) -> str:
    """Return a folder's name, made of ordinary and odd pieces."""
    pieces = [random.choice((*ODD, "home", "a", "thesis")) for _ in range(random.randint(2, 5))]
    name = "".join(pieces)
    return name if name.strip(".") else f"home{name}"


def canaries(parent: Path, name: str) -> list[Path]:
    """Make folders beside the home that a shell would reach if it cut the path or took a part of it as a pattern;
    return the file in each."""
    parts = {part for part in re.split(r"[\s;|&'\"`$()<>:*?{},\[\]\\#=@!%~]+", name) if part}
    parts |= {"thesis", "ab", "home0"}
    made = []
    for part in sorted(parts - {name, ".", ".."}):
        folder = parent / part
        folder.mkdir(exist_ok=True)
        (folder / "canary").write_text("alive")
        made.append(folder / "canary")
    return made


def attack(random: random.Random, rounds: int) -> Tally:
    """Make ``rounds`` homes by `make setup`, fill them, and remove them by `make clean`."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as scratch:
        repository = copy_of_the_makefile(Path(scratch) / "repository")
        beside_code = repository / "canary"
        beside_code.write_text("alive")
        for number in range(rounds):
            parent = Path(scratch) / f"round-{number}"
            parent.mkdir()
            name = odd_name(random) if number else "my home"
            home = parent / name
            alive = [*canaries(parent, name), beside_code]
            environment = {**os.environ, "DTRAIN_HOME": str(home)}
            environment.pop("DAGSTER_HOME", None)
            tally.tried += 1

            def make(target: str, environment: dict[str, str] = environment) -> int:
                return subprocess.run(
                    ["make", target], cwd=repository, env=environment, stdin=subprocess.DEVNULL, capture_output=True
                ).returncode

            made = make("setup")
            if made == 0:
                (home / "storage" / "jobs").mkdir(parents=True, exist_ok=True)
                (home / "storage" / "jobs" / "data").write_text("x")
                (home / "thesis.tex").write_text("alive")
                alive.append(home / "thesis.tex")
            cleaned = make("clean")
            lost = [path for path in alive if not path.exists()]
            if lost:
                tally.accepted += 1
                tally.findings.append(f"DTRAIN_HOME={name!r}: make clean removed {lost[0].relative_to(scratch)}")
            if (repository / "executed").exists():  # recipes run there
                tally.executed += 1
                tally.findings.append(f"DTRAIN_HOME={name!r}: a part of the path was run")
            if made == cleaned == 2 and not home.exists():
                pass  # a name that databases cannot hold: refused with a message, before anything was written
            elif made or cleaned or (home / "storage").exists():
                tally.outages += 1
                tally.findings.append(f"DTRAIN_HOME={name!r}: setup {made}, clean {cleaned}, or the home stayed")
            shutil.rmtree(parent, ignore_errors=True)
    return tally

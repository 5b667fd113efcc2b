"""Check that the requirements of the locked packages are met, as ``pip check`` does. Excepted are packages of which
only a file is read (``tool.dtrain.files-only`` in pyproject.toml), since what importing them needs is not installed,
and others, such as those that an earlier lock has left. Run by `make setup`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def find_broken(said: str, checked: Collection[str]) -> list[str]:
    """Return the lines of ``pip check`` (``PACKAGE VERSION requires …``) about packages that are to be checked."""
    lines = [line for line in said.splitlines() if line]
    return [line for line in lines if re.sub("[_.]+", "-", line.split()[0]).lower() in checked]


def main() -> int:
    """Run ``pip check``, print the broken requirements, and return 1 if there are any, else 0."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locks = "".join(path.read_text() for path in ROOT.glob("requirements*.lock"))
    checked = {project["project"]["name"], *re.findall("^([a-z0-9-]+)==", locks, re.MULTILINE)}
    checked.difference_update(project["tool"]["dtrain"]["files-only"])
    done = subprocess.run([sys.executable, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True)
    broken = find_broken(done.stdout, checked) if done.returncode else []
    if done.returncode and not done.stdout:
        broken = [f"pip check failed with exit code {done.returncode}"]
    print("\n".join(broken) or "No broken requirements found.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Check that the requirements of all installed packages are met, as ``pip check`` does. Packages of which only a file
is read (``tool.dtrain.files-only`` in pyproject.toml) are excepted: the requirements of importing them are not
installed. Run by `make setup`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def find_broken(said: str, files_only: Collection[str]) -> list[str]:
    """Return the lines of ``pip check`` (``PACKAGE VERSION requires …``) about packages that are not excepted."""
    lines = [line for line in said.splitlines() if line]
    return [line for line in lines if re.sub("[_.]+", "-", line.split()[0]).lower() not in files_only]


def main() -> int:
    """Run ``pip check``, print the broken requirements, and return 1 if there are any, else 0."""
    files_only = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dtrain"]["files-only"]
    done = subprocess.run([sys.executable, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True)
    broken = find_broken(done.stdout, files_only) if done.returncode else []
    if done.returncode and not done.stdout:
        broken = [f"pip check failed with exit code {done.returncode}"]
    print("\n".join(broken) or "No broken requirements found.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

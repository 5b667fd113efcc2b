"""Write the lock files from pyproject.toml: ``make lock``, where PyPI can be reached.

    requirements.lock                       all packages of this project's own environment but torch, with hashes
    requirements-torch.lock                 torch: its wheels on PyPI, and the CPU build that the tests run on
    requirements-cuda.lock                  packages that only a CUDA build of torch needs
    tools/supply/requirements.lock         packages that make and read lock files
    deploy/azure/requirements-*.lock        packages of the images

torch has a file of its own because one version of it has several builds, with different hashes and requirements. The
CPU build is not on PyPI: its hashes are copied from the present file, and computed from wheels that ``--torch-wheel``
names.

Packages of which only a file is read (``tool.dtrain.files-only`` in pyproject.toml) are locked without their
requirements.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = "https://pypi.org/simple"
EXTRAS = ("azure", "kubernetes", "postgres", "ray", "dev", "docs")
"""Extras that `make setup` installs."""
CUDA = re.compile(r"(?!nvidia-ml-py)(nvidia|cuda|triton)\b")  # nvidia-ml-py is required by this project
"""Pattern of packages that only a CUDA build of torch needs."""
HEADER = "# Made by `make lock` from {source}; do not edit.\n"
"""First line of a lock file."""


def main() -> None:
    """Compile all lock files with uv, and write them."""
    parser = argparse.ArgumentParser(prog="python tools/supply/lock.py", description=__doc__)
    parser.add_argument("--torch-wheel", type=Path, action="append", default=[], help="a CPU build whose hash is added")
    parser.add_argument("--keep", action="store_true", help="keep the versions of today; lock only what is new")
    options = parser.parse_args()
    uv = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--no-config", "--generate-hashes"]
    uv += ["--default-index", INDEX, "--no-header", "--no-annotate", "--python-version", "3.11"]
    with tempfile.TemporaryDirectory(prefix="dtrain-lock-") as scratch:
        whole, files = asked()
        if options.keep:
            uv += [f"--constraint={written(Path(scratch) / 'kept.txt', pins())}"]
        own = compiled([*uv, "--universal", written(Path(scratch) / "whole.in", whole)])
        own |= compiled([*uv, "--universal", "--no-deps", written(Path(scratch) / "files.in", files)])
        torch_lock = ROOT / "requirements-torch.lock"
        known = blocks(torch_lock.read_text() if torch_lock.exists() else "")
        torch = {name: block for name, block in own.items() if name == "torch"}
        hashes = set(hashes_of(known.get("torch", ""))) | {digest(wheel) for wheel in options.torch_wheel}
        cpu = sorted(hashes - set(hashes_of(torch["torch"])))
        version = re.search(r"==([\w.]+)", torch["torch"])
        assert version is not None
        lines = [f"torch=={version[1]}", *hashes_of(torch["torch"]), *cpu]
        cuda = {name: block for name, block in own.items() if CUDA.match(name)}
        rest = {name: block for name, block in own.items() if name not in torch and name not in cuda}
        write("requirements.lock", "pyproject.toml", rest.values())
        write("requirements-cuda.lock", "pyproject.toml", cuda.values())
        write("requirements-torch.lock", "pyproject.toml", [" \\\n    --hash=".join(lines) + "\n"])
        supply = compiled([*uv, "--universal", "--constraint=requirements.lock", supply_of(Path(scratch))])
        write("tools/supply/requirements.lock", "the extra supply", supply.values())
        image = [*uv, "--python-platform=x86_64-manylinux_2_28", "--constraint=requirements.lock"]
        nodes = compiled([*image, "deploy/azure/requirements-nodes.txt"])
        write("deploy/azure/requirements-nodes.lock", "requirements-nodes.txt", nodes.values())
        serving = compiled([*image, "deploy/azure/requirements-serving.txt"])
        serving = {name: block for name, block in serving.items() if not CUDA.match(name)}
        serving["torch"] = " \\\n    --hash=".join([f"torch=={version[1]}+cpu", *cpu]) + "\n"
        write("deploy/azure/requirements-serving.lock", "requirements-serving.txt", serving.values())


def pins() -> list[str]:
    """Return the requirements of this project's lock files, as they are now, without their hashes."""
    texts = [(ROOT / name).read_text() for name in ("requirements.lock", "requirements-cuda.lock")]
    return [
        line.removesuffix("\\").strip() for text in texts for line in text.splitlines() if re.match("[a-z0-9]", line)
    ]


def asked() -> tuple[list[str], list[str]]:
    """Return the requirements of this project's own environment: those to install with their own requirements, and
    without."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, files_only = document["project"], document["tool"]["dtrain"]["files-only"]
    whole = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    files = [line for line in whole if re.split(r"[^A-Za-z0-9._-]", line)[0] in files_only]
    return [*(line for line in whole if line not in files), "setuptools>=77"], files  # setuptools builds this project


def supply_of(scratch: Path) -> str:
    """Write the extra `supply` to a file of requirements, and return its path."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["supply"]
    return written(scratch / "supply.in", extra)


def written(path: Path, requirements: Iterable[str]) -> str:
    """Write a file of requirements, and return its path."""
    path.write_text("\n".join(requirements) + "\n")
    return str(path)


def compiled(command: Sequence[str]) -> dict[str, str]:
    """Run uv, and return its lines by package."""
    return blocks(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def blocks(text: str) -> dict[str, str]:
    """Return the lines of a lock file by package: the requirement and its hashes."""
    found: dict[str, str] = {}
    for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE):
        if match := re.match(r"([A-Za-z0-9._-]+)(\[[^]]*\])?==", block):
            lines = [line for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]
            found[match[1]] = found.get(match[1], "") + "\n".join(lines) + "\n"  # two, where Pythons differ
    return found


def hashes_of(block: str) -> list[str]:
    """Return the hashes in the lines of a package."""
    return re.findall(r"--hash=(sha256:[0-9a-f]{64})", block)


def digest(wheel: Path) -> str:
    """Return the hash of a wheel, as lock files write it."""
    with open(wheel, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def write(name: str, source: str, lines: Iterable[str]) -> None:
    """Write a lock file of this repository, with the lines in order."""
    (ROOT / name).write_text(HEADER.format(source=source) + "".join(sorted(lines)))


if __name__ == "__main__":
    main()

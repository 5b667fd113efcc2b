"""Make a release: ``make release VERSION=0.2.0``; ``make release VERSION=0.2.0 DRY_RUN=1`` changes nothing.

The version is in one place, `trainer/__init__.py`. A release sets it, gives the changelog's *Unreleased* section that
version and the date, builds the source distribution and from it the wheel, checks both, then commits, tags, and puts
them into ``dist``. All of it happens in a copy of the repository first, so that a release that fails leaves nothing
behind. Nothing is pushed: the last line says how.

Exit code 0: done; 2: refused, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION_FILE, CHANGELOG = "trainer/__init__.py", "CHANGELOG.md"
PACKAGES = ("trainer/", "dtrain_dagster/")
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
_VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)"$', re.MULTILINE)
_UNRELEASED = re.compile(r"^## Unreleased\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class ReleaseError(Exception):
    """A release that is refused. The message says why, and the remedy."""


def main() -> int:
    """Make the release, or try it, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/supply/release.py", description=__doc__)
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="build and check in a copy, and change nothing here")
    parser.add_argument("--sbom", type=Path, help="a bill of materials that goes beside the packages")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="dtrain-release-") as scratch:
            notes, made = prepare(options.version, Path(scratch))
            if not options.dry_run:
                publish(options.version, notes, Path(scratch), made, options.sbom)
    except (ReleaseError, OSError, subprocess.CalledProcessError) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 2
    print(f"\n{notes}\n\n{', '.join(path.name for path in made)}: built and checked")
    tag = f"v{options.version}"
    print("nothing was changed: this was a dry run" if options.dry_run else f"next: git push origin HEAD {tag}")
    return 0


def prepare(version: str, scratch: Path) -> tuple[str, list[Path]]:
    """Make the release in a copy below ``scratch``; return its notes, and the distributions. Raise `ReleaseError`."""
    if changed := git("status", "--porcelain"):
        raise ReleaseError(f"there are changes that are not committed:\n{changed}")
    if git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists already")
    copy = scratch / "copy"
    git("clone", "--quiet", "--local", "--no-hardlinks", str(ROOT), str(copy))
    source, changelog = (copy / VERSION_FILE).read_text(), (copy / CHANGELOG).read_text()
    (copy / VERSION_FILE).write_text(with_version(source, version))
    released, notes = with_release(changelog, version, datetime.now(UTC).strftime("%Y-%m-%d"))
    (copy / CHANGELOG).write_text(released)
    return notes, build(copy, scratch / "dist", version)


def with_version(source: str, version: str) -> str:
    """Return the module with this version. Raise `ReleaseError` for one that does not follow the present one. Pure."""
    found = _VERSION.search(source)
    if found is None:
        raise ReleaseError(f'{VERSION_FILE} has no line __version__ = "…"')
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"version {version!r} is not written as 0.2.0")
    # The first release may have the version that stands there from the beginning.
    if _numbers(version) < _numbers(found[1]):
        raise ReleaseError(f"version {version} comes before the present one, {found[1]}")
    return f'{source[: found.start()]}__version__ = "{version}"{source[found.end() :]}'


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def with_release(changelog: str, version: str, date: str) -> tuple[str, str]:
    """Return the changelog whose section *Unreleased* has become this version's, below an empty one, and the section.
    Raise `ReleaseError` if there is nothing in it. Pure."""
    found = _UNRELEASED.search(changelog)
    notes = found[1].strip() if found else ""
    if found is None or not notes:
        raise ReleaseError(f"{CHANGELOG} has nothing under '## Unreleased': say what has changed")
    if f"## {version} " in changelog:
        raise ReleaseError(f"{CHANGELOG} has a section {version} already")
    section = f"## Unreleased\n\n## {version} ({date})\n\n{notes}\n\n"
    return f"{changelog[: found.start()]}{section}{changelog[found.end() :]}".rstrip() + "\n", notes


def build(copy: Path, folder: Path, version: str) -> list[Path]:
    """Build the source distribution of a copy, and the wheel from that; return both. Raise `ReleaseError` if one of
    them is not complete."""
    folder.mkdir()
    at = git("log", "-1", "--format=%ct", at=copy)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": at}  # the same commit gives the same files
    run(sys.executable, "-c", BUILD_SDIST, str(folder), at=copy, env=environment)
    [sdist] = folder.glob("*.tar.gz")
    unpacked = folder.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    wheel_command = (sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q")
    run(*wheel_command, "-w", str(folder), at=folder, env=environment)
    [wheel] = folder.glob("*.whl")
    if wheel.name != f"dtrain-{version}-py3-none-any.whl" or sdist.name != f"dtrain-{version}.tar.gz":
        raise ReleaseError(f"{wheel.name} and {sdist.name} are not of version {version}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tracked = git("ls-files", "--", *PACKAGES, at=copy).splitlines()
    if missing := missing_of(tracked, names):
        raise ReleaseError(
            f"the wheel lacks {', '.join(missing)}: add them to tool.setuptools.package-data in pyproject.toml"
        )
    return [wheel, sdist]


def missing_of(tracked: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Return the files of the packages that were not packed. Pure."""
    return sorted(set(tracked) - set(packed))


def publish(version: str, notes: str, scratch: Path, made: Iterable[Path], sbom: Path | None) -> None:
    """Commit the two files of the copy here, tag, and put the distributions into ``dist``."""
    for name in (VERSION_FILE, CHANGELOG):
        shutil.copyfile(scratch / "copy" / name, ROOT / name)
    git("add", VERSION_FILE, CHANGELOG)
    git("commit", "--quiet", "--allow-empty", "-m", f"Release {version}")
    git("tag", "--annotate", f"v{version}", "--cleanup=verbatim", "-m", f"dtrain {version}\n\n{notes}")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for path in made:
        shutil.copy(path, dist)
    if sbom is not None:
        materials = json.loads(sbom.read_text())
        materials.setdefault("metadata", {}).setdefault("component", {})["version"] = version
        (dist / f"dtrain-{version}.cdx.json").write_text(json.dumps(materials, indent=1))


def git(*arguments: str, at: Path = ROOT) -> str:
    """Return what a command of git says. Raise `ReleaseError` if it fails."""
    return run("git", *arguments, at=at)


def run(*command: str, at: Path, env: dict[str, str] | None = None) -> str:
    """Return what a command prints, without blanks around it. Raise `ReleaseError` if it fails."""
    done = subprocess.run(command, cwd=at, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:3])} failed:\n{done.stdout.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

"""The lock files say all that is installed, by hash, and nothing about where from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.lint
ROOT = Path(__file__).parents[1]
OWN = ("requirements.lock", "requirements-torch.lock", "requirements-cuda.lock")
IMAGES = ("deploy/azure/requirements-nodes.lock", "deploy/azure/requirements-serving.lock")
LOCKS = (*OWN, *IMAGES, "tools/supply/requirements.lock")
INSTALLED = ("azure", "kubernetes", "postgres", "ray", "dev")
PYTHONS = ("3.11", "3.12", "3.13")


def locked(*names: str) -> list[Requirement]:
    """What lock files pin, a requirement for each package and condition."""
    text = "".join((ROOT / name).read_text() for name in names)
    lines = re.findall(r"^([A-Za-z0-9][^\\\n]*?)\s*\\?$", text, flags=re.MULTILINE)
    return [Requirement(line) for line in lines]


def version_of(pins: list[Requirement], name: str, environment: dict[str, str]) -> str | None:
    """The version of a package that is installed there; None where it is not."""
    for pin in pins:
        if canonicalize_name(pin.name) == canonicalize_name(name) and (
            not pin.marker or pin.marker.evaluate(environment)
        ):
            return str(pin.specifier).removeprefix("==")
    return None


def on(python: str) -> dict[str, str]:
    return {**default_environment(), "python_version": python, "python_full_version": f"{python}.7", "extra": ""}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_and_has_hashes(name: str):
    text = (ROOT / name).read_text()
    body = [line for line in text.splitlines() if line and not line.startswith("#")]
    blocks = re.split(r"\n(?=[A-Za-z0-9])", "\n".join(body))
    assert len(blocks) > 0
    for block in blocks:
        assert re.match(r"[A-Za-z0-9._-]+(\[[^]]*\])?==[\w.+!]+( ; [^\\]+)? \\\n", block), block[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block[:80]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_place_that_packages_come_from(name: str):
    text = (ROOT / name).read_text()
    for word in ("://", "index", "find-links", "file:", "/opt", "/tmp", "trusted-host", "@ "):
        assert word not in text, word


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_satisfies_what_the_project_asks_for(python: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for name in INSTALLED for line in project["optional-dependencies"][name])]
    pins, environment = locked(*OWN), on(python)
    for requirement in map(Requirement, asked):
        version = version_of(pins, requirement.name, environment)
        assert version is not None, f"{requirement.name} is not locked: make lock"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is locked at {version}"


def test_the_lock_is_complete():
    """By what the packages that are installed here ask for: `make setup` installs without looking for anything else.
    Packages of which only a file is read ask for nothing."""
    files_only = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dtrain"]["files-only"]
    pins, environment = locked(*OWN), dict(default_environment())
    waiting = [(name, frozenset[str]()) for name in {pin.name for pin in locked(OWN[0], OWN[1])}]
    waiting += [
        (Requirement(line).name, frozenset(Requirement(line).extras))
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or canonicalize_name(name) in files_only:
            continue
        seen.add((name, extras))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform
        for need in map(Requirement, needs):
            if need.marker and not any(need.marker.evaluate(environment | {"extra": extra}) for extra in {"", *extras}):
                continue
            version = version_of(pins, need.name, environment)
            assert version is not None, f"{name} needs {need}, which is not locked: make lock"
            waiting.append((need.name, frozenset(need.extras)))


def test_torch_is_locked_at_the_version_of_the_project_and_of_the_images():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [asked] = [Requirement(line) for line in project["dependencies"] if line.startswith("torch")]
    [own] = locked("requirements-torch.lock")
    [pin] = own.specifier
    assert asked.specifier.contains(pin.version)
    environment = on("3.11")
    for name in IMAGES:
        version = version_of(locked(name), "torch", environment)
        assert version is not None
        assert version.split("+")[0] == pin.version


@pytest.mark.parametrize("name", ["nodes", "serving"])
def test_the_locks_of_the_images_satisfy_their_ranges_and_agree_with_the_tests(name: str):
    pins, own, environment = locked(f"deploy/azure/requirements-{name}.lock"), locked(OWN[0]), on("3.11")
    for line in (ROOT / f"deploy/azure/requirements-{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            version = version_of(pins, requirement.name, environment)
            assert version is not None
            assert requirement.specifier.contains(version), line
            if requirement.name != "torch":
                assert version == version_of(own, requirement.name, environment), line


DOCKERFILES = ("azure/Dockerfile", "azure/serving.Dockerfile", "kubernetes/nodes.Dockerfile")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_built_on_a_digest_and_from_hashes(name: str):
    text = (ROOT / "deploy" / name).read_text()
    bases = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    assert bases
    assert all(base.endswith("@${BASE_DIGEST}") for base in bases)
    assert re.search(r"^ARG BASE_DIGEST$", text, flags=re.MULTILINE), (
        "a default would be a digest that nobody has checked"
    )
    installs = re.findall(r"pip install (?:.|\\\n)*?--requirement", text)
    assert len(installs) == 2
    assert all("--require-hashes --no-deps" in install for install in installs), "of the image, and of its materials"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_the_bill_of_the_very_packages_that_are_in_it_and_says_where(name: str):
    text = (ROOT / "deploy" / name).read_text()
    materials, image = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    [lock] = re.findall(r"^COPY (\S+) /tmp/requirements.lock$", image, flags=re.MULTILINE)
    assert f"COPY {lock} /tmp/requirements.lock\n" in materials
    [place] = re.findall(r"^COPY --from=materials /sbom.json (\S+)$", image, flags=re.MULTILINE)
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', image[image.index("LABEL") :]))
    assert labels["dtrain.sbom"] == place
    named = {"title", "version", "revision", "licenses", "base.name", "base.digest"}
    assert {f"org.opencontainers.image.{label}" for label in named} <= labels.keys()
    for argument in re.findall(r"\$\{(\w+)\}", " ".join(labels.values())):
        assert re.search(rf"^ARG {argument}\b", image, flags=re.MULTILINE), "empty in the image otherwise"


def test_setup_installs_from_the_locks_by_hash():
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^LOCKED := \./tools/supply/install\.sh \$\(BIN\)/python$", text, flags=re.MULTILINE)
    for name in OWN:
        assert f"$(LOCKED) {name}" in text
    script = (ROOT / "tools" / "supply" / "install.sh").read_text().splitlines()
    installs = [line for line in script if re.search(r"\bpip install\b", line) and not line.startswith("#")]
    assert len(installs) == 2, "uv's and pip's"
    assert all("--require-hashes --no-deps --requirement" in line for line in installs)


def test_packages_of_which_a_file_is_read_are_locked_without_what_they_need():
    code = "import json, lock; print(json.dumps(lock.asked()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools" / "supply", capture_output=True, check=True)
    whole, files = json.loads(done.stdout)
    assert sorted(Requirement(line).name for line in files) == ["skfolio"]
    assert {"torch", "azure-ai-ml", "pytest"} <= {Requirement(line).name for line in whole}
    assert not set(whole) & set(files)


def test_a_missing_package_is_found_but_not_what_others_than_the_checked_ones_need():
    said = (
        "skfolio 1.12.2 requires clarabel, which is not installed.\n"
        "mlflow 3.17.2 requires skops, which is not installed.\n"
    )
    code = f"import check; print(check.find_broken({said!r}, ['mlflow']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tools" / "supply", capture_output=True, text=True, check=True
    )
    assert done.stdout == "['mlflow 3.17.2 requires skops, which is not installed.']\n"


def test_an_audit_without_a_network_says_so_and_proves_nothing():
    code = "import sys, audit; audit.SERVICE = ('127.0.0.1', 9); sys.exit(audit.main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools" / "supply", capture_output=True, text=True)
    assert done.returncode == 2
    assert "not audited" in done.stdout


@pytest.mark.parametrize(
    ("dependencies", "code", "says"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "0 are known"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}], 1, "mended in 2"),
        ([{"name": "a", "skip_reason": "not found"}], 2, "not audited"),
        ([{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}], 2, "such as b"),
        ([], 2, "0 packages"),
    ],
)
def test_an_audit_that_asked_for_nothing_passes_nothing(dependencies: list[dict[str, object]], code: int, says: str):
    program = "import sys, json, audit; print(json.dumps(audit.verdict(json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps({"dependencies": dependencies})],
        cwd=ROOT / "tools" / "supply",
        capture_output=True,
        text=True,
    )
    found, lines = json.loads(done.stdout)
    assert found == code
    assert says in "\n".join(lines)

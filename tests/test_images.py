"""The images of nodes and endpoints are built from their Dockerfiles, without a Docker engine, and looked into.

buildah runs the steps of a Dockerfile in a chroot; this needs root, and packages from Debian's and from pip's usual
places. The base image cannot be pulled everywhere. A stand-in has its name here: Debian 12 with its own Python 3.11,
made by debootstrap. So what the base image itself brings (its Python, its pip) is not tested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
BASE = "docker.io/library/python:3.11-slim-bookworm"
OF_THE_BASE = {"pip", "setuptools", "wheel"}
"""Packages that the stand-in brings. Debian's are beside those of the lock, so their versions say nothing."""
LOOK = """
import getpass, glob, importlib.metadata as metadata, json
installed = {package.metadata["Name"]: package.version for package in metadata.distributions()}
[bill] = glob.glob("/usr/share/sbom/*.cdx.json")
print(json.dumps({"user": getpass.getuser(), "installed": installed, "bill": json.load(open(bill)), "place": bill}))
"""


class Image(NamedTuple):
    """A Dockerfile, and what its image is for."""

    dockerfile: str
    user: str
    works: str
    """A program that needs what the image is for."""


IMAGES = [
    Image("kubernetes/nodes.Dockerfile", "dtrain", "import torch, trainer.node; assert torch.cuda.nccl.version()"),
    Image("azure/Dockerfile", "root", "import torch, mlflow, azure.identity; assert torch.cuda.nccl.version()"),
    Image("azure/serving.Dockerfile", "server", "import torch, mlflow.pyfunc; assert torch.version.cuda is None"),
]


class Buildah:
    """buildah with a storage of its own, and with the settings of pip that this machine's environment has."""

    def __init__(self, folder: Path):
        self.folder = folder
        storage = f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
        (folder / "storage.conf").write_text(storage)
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        settings = {name.removeprefix("PIP_").lower().replace("_", "-"): value
                    for name, value in os.environ.items() if name.startswith("PIP_")}  # fmt: skip
        (folder / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {text}\n" for key, text in settings.items()))
        shared = [path for path in settings.values() if path.startswith("/") and Path(path).exists()]
        mounts = [f"{folder / 'pip.conf'}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in shared)]
        self.mounts = [word for mount in mounts for word in ("--volume", mount)]
        self.environment = dict(
            os.environ, CONTAINERS_STORAGE_CONF=str(folder / "storage.conf"), BUILDAH_ISOLATION="chroot",
            TMPDIR=str(folder),
        )  # fmt: skip

    def run(self, *words: str) -> str:
        made = subprocess.run(["buildah", *words], env=self.environment, cwd=ROOT, text=True, capture_output=True)
        assert made.returncode == 0, f"buildah {' '.join(words)}: {made.stdout[-2000:]}{made.stderr[-2000:]}"
        return made.stdout.strip()

    def commit_base(self) -> str:
        """Make the stand-in of the base image; return its digest."""
        system = self.folder / "system"
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=python3,python3-pip,ca-certificates", "bookworm", system],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        [marker] = system.glob("usr/lib/python3*/EXTERNALLY-MANAGED")
        marker.unlink()  # pip may install beside Debian's packages, as it may in the base image
        (system / "usr/bin/python").symlink_to("python3")
        container = self.run("from", "scratch")
        mounted = self.run("mount", container)
        subprocess.run(["cp", "--archive", f"{system}/.", mounted], check=True)  # devices as devices
        self.run("umount", container)
        self.run("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        self.run("commit", "--quiet", "--rm", container, BASE)
        return self.run("images", "--digests", "--format", "{{.Digest}}", BASE)

    def build(self, dockerfile: str, name: str, **arguments: str) -> None:
        words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        self.run("bud", "--pull-never", "--network", "host", *self.mounts, *words, "-f", dockerfile, "-t", name, ".")


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Buildah, str]]:
    """buildah, and the digest of the base image's stand-in."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap"))):
        pytest.skip("images are built by root with buildah and debootstrap (Debian packages), which are not here")
    folder = tmp_path_factory.mktemp("images")
    made = Buildah(folder)
    try:
        yield made, made.commit_base()
    finally:  # the images are gigabytes
        made.run("rm", "--all")
        made.run("rmi", "--all", "--force")
        shutil.rmtree(folder / "system", ignore_errors=True)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.dockerfile)
def test_an_image_is_built_with_its_bill_of_materials(buildah: tuple[Buildah, str], image: Image) -> None:
    builder, digest = buildah
    index = {"TORCH_INDEX": os.environ["TORCH_INDEX"]} if os.environ.get("TORCH_INDEX") else {}
    own = index if "serving" in image.dockerfile else {}
    builder.build(f"deploy/{image.dockerfile}", "image", BASE_DIGEST=digest, VERSION="1.2.3", REVISION="4567", **own)
    container = builder.run("from", "--pull-never", "localhost/image")
    found = json.loads(builder.run("run", container, "--", "python", "-c", LOOK).splitlines()[-1])
    builder.run("run", container, "--", "python", "-c", image.works)
    labels = json.loads(builder.run("inspect", container))["OCIv1"]["config"]["Labels"]
    builder.run("rm", container)

    assert found["user"] == image.user
    installed = {name.lower().replace("_", "-").replace(".", "-"): at for name, at in found["installed"].items()}
    bill = {part["name"].lower().replace("_", "-").replace(".", "-"): part["version"]
            for part in found["bill"]["components"]}  # fmt: skip
    assert {name: at for name, at in bill.items() if name not in OF_THE_BASE} == {
        name: at for name, at in installed.items() if name not in OF_THE_BASE
    }
    assert "dagster" not in installed
    assert labels["dtrain.sbom"] == found["place"]
    assert labels["org.opencontainers.image.version"] == "1.2.3"
    assert labels["org.opencontainers.image.base.digest"] == digest

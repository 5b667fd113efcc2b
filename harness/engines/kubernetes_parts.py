"""The programs of a real, small Kubernetes for tests: where they come from, and why they are absent where they are.

Kubernetes' own five programs are unpacked from a folder (``KUBERNETES_BINARIES``, else ``../shared/kube`` beside
the checkout), or `make kube` builds them from Debian's source package (``kubernetes_build.sh``). etcd, containerd,
runc, the network plugins and busybox are Debian's: downloaded by apt and unpacked into the same folder of the cache;
nothing is installed. Running them belongs in `kubernetes_cluster`.
"""

from __future__ import annotations

import functools
import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

VERSION = "1.20.2"
OWN = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
DEBIAN = ("etcd-server", "containerd", "runc", "containernetworking-plugins", "busybox-static")
TOOLS = ("unshare", "nsenter", "ip", "mount", "openssl")
"""What the machine itself must have, beside Debian's package tools."""
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
CGROUPS = Path("/sys/fs/cgroup")
ROOT = Path(__file__).parents[2]
_READY = ".ready"


@functools.cache
def missing() -> str:
    """Why no cluster can run on this machine; "" if one can. Unpacks what was not unpacked yet, and builds nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a cluster of containers needs Linux and root"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found: install util-linux, iproute2 and openssl"
    if absent := [name for name in CONTROLLERS if not (CGROUPS / name).is_dir()]:
        return f"Kubernetes {VERSION} is run on control groups of version 1; there is no {CGROUPS / absent[0]} here"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--net", "--cgroup", "--fork", "true"], capture_output=True)
    if tried.returncode:
        return f"no namespaces can be made here: {tried.stderr.decode(errors='replace').strip()}"
    try:
        install()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def cache_folder() -> Path:
    """The folder in which the programs lie, once `install` has returned."""
    cache = Path(os.environ.get("TEST_CACHE") or Path.home() / ".cache" / "dtrain-tests")
    return cache / f"kubernetes-{VERSION}"


def install() -> Path:
    """The folder with all programs: ``bin`` and ``cni``; made once, by whoever comes first.

    RuntimeError, which names the part, the cause and the remedy, where one cannot be had.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if (folder / _READY).exists():
            return folder
        (folder / "bin").mkdir(exist_ok=True)
        _take_own(folder / "bin")
        _take_debian(folder)
        (folder / _READY).touch()
    return folder


def _take_own(target: Path) -> None:
    if all((target / name).exists() for name in OWN):
        return  # as `kubernetes_build.sh` leaves them
    given = Path(os.environ.get("KUBERNETES_BINARIES") or ROOT.parent / "shared" / "kube")
    if not given.is_dir():
        raise RuntimeError(
            f"Kubernetes {VERSION} is not here: `make kube` builds it from Debian's source package (25 minutes on two "
            f"cores), or give a folder with {OWN[0]}.xz and the others in KUBERNETES_BINARIES"
        )
    sums = {name: digest for digest, name in map(str.split, (given / "SHA256SUMS").read_text().splitlines())}
    for name in OWN:
        digest = hashlib.sha256()
        with lzma.open(given / f"{name}.xz") as packed, open(target / f"{name}.part", "wb") as out:
            while block := packed.read(1 << 20):
                digest.update(block)
                out.write(block)
        if digest.hexdigest() != sums.get(name):
            raise RuntimeError(
                f"{given / name}.xz is not what {given}/SHA256SUMS says: build it again with `make kube`"
            )
        (target / f"{name}.part").chmod(0o755)
        (target / f"{name}.part").rename(target / name)


def _take_debian(folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise RuntimeError(f"{', '.join(DEBIAN)} come from Debian, and there is no apt-get here")
    with tempfile.TemporaryDirectory(dir=folder) as here:
        # As root, apt would hand the download to a user who cannot write here.
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *DEBIAN]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"apt-get could not download {', '.join(DEBIAN)}:\n{done.stderr[-2000:]}")
        unpacked = Path(here) / "unpacked"
        for package in Path(here).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True, timeout=120)
        for programs in ("usr/bin", "usr/sbin", "bin"):
            for program in (unpacked / programs).glob("*"):
                program.rename(folder / "bin" / program.name)
        shutil.rmtree(folder / "cni", ignore_errors=True)
        (unpacked / "usr" / "lib" / "cni").rename(folder / "cni")


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    print(cache_folder())

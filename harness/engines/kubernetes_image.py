"""The image of the test cluster's containers, and the folders of this machine that they need beside it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path

IMAGE = "localhost/dtrain:test"
"""An image with a shell and folders to mount into; Python and this project come from the machine, by `host_volumes`."""


def host_volumes(*writable: Path) -> list[tuple[str, bool]]:
    """The folders of this machine that a container needs to run this checkout's Python: (path, read-only)."""
    checkout = Path(__file__).parents[2]
    needed = {Path("/usr"), Path("/lib"), Path("/lib64"), checkout, Path(sys.base_prefix), Path(sys.prefix)}
    needed |= {Path(path) for path in sys.path if os.path.isdir(path) and os.path.isabs(path)}
    tops = [path for path in needed if not any(other != path and path.is_relative_to(other) for other in needed)]
    return [*((str(path), True) for path in sorted(tops) if path.exists()), *((str(path), False) for path in writable)]


def write_image(path: Path, name: str, busybox: Path, command: list[str]) -> None:
    """Write an image of one layer, as `docker save` would: busybox as the shell, and the folders of any system."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("bin", "etc", "dev", "proc", "sys", "tmp", "root", "run", "usr", "lib", "lib64", "work"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        program = tarfile.TarInfo("bin/busybox")
        program.mode, program.size = 0o755, busybox.stat().st_size
        with open(busybox, "rb") as file:
            tar.addfile(program, file)
        for tool in ("sh", "sleep", "cat", "env", "echo", "kill"):
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        users = b"root:x:0:0:root:/root:/bin/sh\ndtrain:x:1000:1000:dtrain:/tmp:/bin/sh\n"
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(users)
        tar.addfile(entry, io.BytesIO(users))
    content = layer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    config = json.dumps({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": command, "Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }).encode()  # fmt: skip
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]).encode()
    with tarfile.open(path, mode="w") as tar:
        for member, data in ((config_name, config), (f"{digest}/layer.tar", content), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

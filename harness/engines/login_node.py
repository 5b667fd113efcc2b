"""A real login node for tests: an sshd on loopback with keys of its own, which lets this user in and runs SLURM's
commands of a test cluster.

It listens on a free port, and its host key, its configuration and the key that it accepts lie in a folder of its own.
``ssh`` on the path is the real client with a configuration file that knows the node as ``login``. As root, sshd runs in
a mount namespace where its folder and its user are there; nothing of this machine is changed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil
from filelock import FileLock

from harness.engines.slurm_cluster import cache_folder
from trainer.runtime.parent_death import die_with

NAME = "login"
_FETCH = Path(__file__).with_name("fetch_slurm.sh")


def missing() -> str:
    """Why no login node can run here; "" if one can. Unpacks what was not unpacked yet."""
    if shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "no ssh on this machine: install openssh-client"
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        done = subprocess.run([_FETCH, folder, "--with-ssh"], capture_output=True, text=True, timeout=600)
    return f"no sshd for tests: {done.stderr.strip()[-2000:]}" if done.returncode else ""


class LoginNode:
    """A login node as a context manager; when it is left nothing of it runs, and its folder is gone."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """``variables``: what sessions find in their environment, as from a profile there."""
        self.folder = Path(tempfile.mkdtemp(prefix="dtrain-login-"))
        self.variables = variables
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.programs = self.folder / "programs"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LoginNode:
        try:
            self._prepare()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start sshd, and return when it lets this user in."""
        sshd, log, config = (f"{cache_folder()}/usr/sbin/sshd", f"{self.folder}/log", f"{self.folder}/sshd_config")
        command = [sshd, "-D", "-E", log, "-f", config]
        if os.geteuid() == 0:
            passwd = self.folder / "passwd"
            passwd.write_text(f"{Path('/etc/passwd').read_text()}sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n")
            prepare = f"mount --bind {passwd} /etc/passwd && mount -t tmpfs run /run && mkdir /run/sshd"
            script = f"{prepare} && exec {shlex.join(command)}"
            command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script]
        library = next((cache_folder() / "usr" / "lib").glob("*-linux-gnu"))
        with open(self.folder / "out", "ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "LD_LIBRARY_PATH": str(library)}, preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip
        deadline = time.monotonic() + 30
        knock = [self.programs / "ssh", "-o", "BatchMode=yes", NAME, "true"]
        while subprocess.run(knock, capture_output=True, timeout=30).returncode:
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill sshd and every session, as where the login node loses power."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for each in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """End sshd with its sessions, and take the folder away."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """What sshd has said."""
        return "".join(path.read_text() for name in ("out", "log") if (path := self.folder / name).exists())

    def _prepare(self) -> None:
        for name in ("host", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name]
            subprocess.run(command, check=True, capture_output=True)
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        known = (self.folder / "host.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {known}")
        variables = " ".join(f'"{name}={value}"' for name, value in self.variables.items())
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPasswordAuthentication no\nStrictModes no\n"
            f"KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nLogLevel VERBOSE\n"
            f"SetEnv {variables}\n"
        )
        (self.folder / "ssh_config").write_text(
            f"Host {NAME}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {pwd.getpwuid(os.geteuid()).pw_name}\n"
            f"  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
        )
        self.programs.mkdir()
        ssh = self.programs / "ssh"  # the client reads ~/.ssh alone, whatever HOME says
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

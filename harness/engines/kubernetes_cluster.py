"""A real, small Kubernetes for tests: etcd, the API server, controllers, a scheduler, and machines with a kubelet each.

`KubernetesCluster` starts it without Docker, in namespaces of its own; only the API is to be reached from outside, on a
free loopback port. Each machine is in a network namespace of its own, and its pods have addresses in the same network.
Machines are killed and brought back, and their links cut and restored. Where the programs come from belongs in
`kubernetes_parts`, what is done inside of the namespaces in `kubernetes_init`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from harness.engines import kubernetes_init as init
from harness.engines.kubernetes_image import write_image
from harness.engines.kubernetes_parts import CGROUPS, CONTROLLERS, install

START_SECONDS = 60.0
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_CGROUP = "dtrain-test-kube-"


class KubernetesCluster:
    """A cluster as a context manager; when it is left nothing of it runs, and its folder is gone."""

    def __init__(self, nodes: int = 2) -> None:
        self.nodes = [f"node-{index}" for index in range(nodes)]
        self.folder = Path(tempfile.mkdtemp(prefix="dtrain-kube-"))
        self.kubeconfig = self.folder / "kubeconfig.yaml"
        """As a person would use it: verified TLS, the loopback port, and the token of an administrator."""
        self.url = ""
        self.process: subprocess.Popen[str] | None = None
        self._cgroup = f"{_CGROUP}{os.getpid()}-{secrets.token_hex(4)}"
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", "system")}
        self._context = ssl.create_default_context()

    def __enter__(self) -> KubernetesCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster, and take away its control groups and its folder."""
        if self.process is not None:
            self.process.kill()  # unshare; the first process inside dies with it, and everything with that one
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + 20
        while not _remove_cgroups(self._cgroup) and time.monotonic() < deadline:
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the programs

    def start(self, name: str) -> None:
        """Start a program of the control plane, or a machine."""
        self._tell({"start": name, "command": self._command(name)})

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """Kill a program of the control plane, or a machine with all that runs on it, and return when it is gone."""
        self._tell({"kill": name, "signal": int(how)})

    def cut(self, node: str) -> None:
        """Take down the link of a machine, and so that of its pods, as a cable that is pulled."""
        self._tell({"link": node, "state": "down"})

    def restore(self, node: str) -> None:
        """Bring the link of a machine up again."""
        self._tell({"link": node, "state": "up"})

    def restart_api(self) -> None:
        """Kill the API server, start it again, and return when it answers."""
        self.kill("kube-apiserver")
        self.start("kube-apiserver")
        self.wait_for_api()

    def processes(self, text: str) -> list[int]:
        """The processes inside the cluster whose command line has this text; ids as this machine sees them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    inside = self._cgroup in (entry / "cgroup").read_text()
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if inside and text in line:
                        found.append(int(entry.name))
        return found

    def log(self, name: str) -> str:
        """What a program has said."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- the API

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, token: str = "admin") -> Any:
        """Ask the API as the administrator, and return the decoded answer. urllib's HTTPError where it refuses."""
        request = urllib.request.Request(
            self.url + path, method=method, data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"Bearer {self._tokens[token]}", "Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            error.msg += f": {error.read().decode(errors='replace')}"
            raise
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def wait(self, holds: Callable[[], object], what: str, program: str = "") -> None:
        """Return when this holds; a request that fails does not. RuntimeError, with the program's last words, where it
        takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if holds():
                    return
            if time.monotonic() > deadline:
                said = f" {program}:\n{self.log(program)[-3000:]}" if program else ""
                raise RuntimeError(f"not seen within {START_SECONDS:.0f} s: {what}.{said}")
            time.sleep(0.1)

    def wait_for_api(self) -> None:
        self.wait(lambda: self.ask("GET", "/readyz") == "ok", "the API server", "kube-apiserver")

    def wait_for_node(self, name: str, ready: bool = True) -> None:
        """Return when the control plane takes this machine for ready, or not ready."""
        self.wait(lambda: self.node_is_ready(name) == ready, f"{name} (ready: {ready})", f"kubelet-{name}")

    def node_is_ready(self, name: str) -> bool:
        conditions = self.ask("GET", f"/api/v1/nodes/{name}")["status"].get("conditions", [])
        return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)

    # ---

    def _start(self) -> None:
        programs = install()
        self.programs = programs
        for part in ("logs", "images", "etcd"):
            (self.folder / part).mkdir()
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        self._write_credentials()
        for name, command in (("pause", ["/bin/busybox", "sleep", "1000000000"]), ("dtrain", ["/bin/sh"])):
            write_image(
                self.folder / "images" / f"{name}.tar", f"localhost/{name}:test", programs / "bin/busybox", command
            )
        _remove_cgroups(f"{_CGROUP}*")
        for controller in CONTROLLERS:
            group = CGROUPS / controller / self._cgroup
            group.mkdir()
            if controller == "cpuset":
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (group / name).write_text((group.parent / name).read_text())
                (group / "cgroup.clone_children").write_text("1")
        given = {
            "folder": str(self.folder), "listener": listener.fileno(), "controllers": CONTROLLERS, "nodes": self.nodes,
        }  # fmt: skip
        join = (
            'for group; do [ "$group" = -- ] && break; echo $$ > "$group/cgroup.procs"; shift; done; shift; exec "$@"'
        )
        groups = [str(CGROUPS / controller / self._cgroup) for controller in CONTROLLERS]
        namespaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"]
        self.process = subprocess.Popen(
            ["sh", "-c", join, "join", *groups, "--", *namespaces, "--propagation", "private",
             sys.executable, "-P", init.__file__, "cluster", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[listener.fileno()],
            env=self._environment(), start_new_session=True, preexec_fn=init.die_with_parent,
        )  # fmt: skip
        listener.close()
        self._answer()
        self.start("etcd")
        self.start("kube-apiserver")
        for node in self.nodes:
            self.start(node)
        self.wait_for_api()
        self.start("kube-controller-manager")
        self.start("kube-scheduler")
        for node in self.nodes:
            self.wait_for_node(node)
        self.wait(lambda: self.ask("GET", "/api/v1/namespaces/default/serviceaccounts/default"), "accounts",
                   "kube-controller-manager")  # fmt: skip

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "HOME") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.programs / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _tell(self, order: Mapping[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> Any:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the cluster's first process has ended ({self.process.wait()})")
        return json.loads(line)

    def _command(self, name: str) -> list[str]:
        here, api = self.folder, f"{init.NETWORK}.0.1"
        if name in self.nodes:
            given = {
                "folder": str(here), "name": name, "index": self.nodes.index(name), "programs": str(self.programs),
            }  # fmt: skip
            spaces = "unshare --mount --pid --uts --ipc --fork --kill-child --propagation private"
            network = ["nsenter", f"--net=/run/netns/{name}", "--"]
            return [*network, *spaces.split(), sys.executable, "-P", init.__file__, "node", json.dumps(given)]
        common = [f"--kubeconfig={here / 'inside.yaml'}", "--leader-elect=false", "--port=0", f"--bind-address={api}"]
        return {
            "etcd": [
                "etcd", f"--data-dir={here / 'etcd'}", "--unsafe-no-fsync",
            ],
            "kube-apiserver": [
                "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--bind-address={api}",
                f"--advertise-address={api}", f"--tls-cert-file={here / 'server.pem'}",
                f"--tls-private-key-file={here / 'server.key'}", f"--cert-dir={here / 'certs'}",
                "--kubelet-preferred-address-types=InternalIP", "--service-cluster-ip-range=10.78.0.0/24",
                "--service-account-issuer=https://dtrain.test",
                f"--service-account-signing-key-file={here / 'accounts.key'}",
                f"--service-account-key-file={here / 'accounts.key'}", "--authorization-mode=RBAC",
                f"--token-auth-file={here / 'tokens.csv'}", "--feature-gates=TTLAfterFinished=true",
            ],
            "kube-controller-manager": [
                "kube-controller-manager", *common, f"--service-account-private-key-file={here / 'accounts.key'}",
                f"--root-ca-file={here / 'authority.pem'}", f"--cert-dir={here / 'certs-controllers'}",
                "--node-monitor-period=1s", "--node-monitor-grace-period=8s", "--pod-eviction-timeout=3s",
                "--feature-gates=TTLAfterFinished=true",
                "--controllers=*,-nodeipam,-cloud-node-lifecycle,-service,-route,-csrsigning,-csrapproving,-csrcleaner,"
                "-horizontalpodautoscaling,-bootstrapsigner,-tokencleaner",
            ],
            "kube-scheduler": ["kube-scheduler", *common, f"--cert-dir={here / 'certs-scheduler'}"],
        }[name]  # fmt: skip

    def _write_credentials(self) -> None:
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1", f"{init.NETWORK}.0.1", "10.78.0.1", "kubernetes.default.svc")
        authority.cert_pem.write_to_path(self.folder / "authority.pem")
        authority.configure_trust(self._context)
        server.private_key_pem.write_to_path(self.folder / "server.key")
        (self.folder / "server.pem").write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "accounts.key").write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        ))  # fmt: skip
        rows = [f'{token},{name},{name},"system:masters"' for name, token in self._tokens.items()]
        (self.folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        self.kubeconfig.write_text(self.write_kubeconfig(self._tokens["admin"], self.url))
        inside = f"https://{init.API[0]}:{init.API[1]}"
        (self.folder / "inside.yaml").write_text(self.write_kubeconfig(self._tokens["system"], inside))

    def write_kubeconfig(self, token: str, server: str) -> str:
        """A kubeconfig with this bearer token."""
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": server, "certificate-authority": str(self.folder / "authority.pem"),
            }}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }  # fmt: skip
        return json.dumps(document)  # which is YAML, too


def _remove_cgroups(pattern: str) -> bool:
    """Remove control groups of clusters that are gone. Whether none is left of the pattern; one in use stays."""
    left = False
    for controller in CONTROLLERS:
        for top in (CGROUPS / controller).glob(pattern):
            owner = top.name.removeprefix(_CGROUP).split("-")[0]
            if "*" in pattern and Path("/proc", owner).exists():
                continue
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            left = left or top.exists()
    return not left

"""The first process of a test cluster, and of each of its machines: ``python kubernetes_init.py cluster|node …``.

It runs in namespaces of its own (processes, mounts, network, control groups), so that all that it starts, containers
included, ends with it: the kernel kills whatever is left in a namespace whose first process is gone. It prepares the
namespaces, starts and kills programs by name as it is told, and passes connections of the tests on to the API server.
It imports nothing of the project. What the tests may ask for belongs in `kubernetes_cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.77"
API = (f"{NETWORK}.0.1", 6443)
BRIDGE = "pods0"
CGROUPS = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def die_with_parent() -> None:
    """In a child: be killed when the process that starts it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(command: Sequence[str], log: Path) -> int:
    """Start a program in a group of its own; the process id."""
    with open(log, "ab") as out:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0)
    started.returncode = 0  # reaped below, with all others; Popen would warn of it
    return started.pid


def reap() -> list[int]:
    """The processes that have ended since the last call, orphans of containers among them."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.append(pid)
    return ended


def own_mounts() -> None:
    """Processes as seen here, and empty, private folders for all that is written outside of the cluster's own."""
    run("mount", "-t", "proc", "proc", "/proc")
    for folder in ("/run", "/var/lib", "/var/log"):
        run("mount", "-t", "tmpfs", "tmpfs", folder)
    run("mount", "--make-rshared", "/")


def own_system(controllers: Sequence[str]) -> None:
    """Devices and control groups as seen here: the cluster's group is the root of each hierarchy."""
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    run("mount", "-t", "tmpfs", "tmpfs", str(CGROUPS))
    for name in controllers:
        (CGROUPS / name).mkdir()
        options = "none,name=systemd" if name == "systemd" else name
        run("mount", "-t", "cgroup", "-o", options, "cgroup", str(CGROUPS / name))


def cluster(folder: Path, listener: int, controllers: Sequence[str], nodes: Sequence[str]) -> None:
    """Be the first process of the cluster until standard input ends."""
    own_mounts()
    own_system(controllers)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{NETWORK}.0.1/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for index, name in enumerate(nodes):
        make_machine(name, f"{NETWORK}.0.{11 + index}")
    asyncio.run(Cluster(folder).serve(listener))


def make_machine(name: str, address: str) -> None:
    """Make the network of a machine: a namespace whose bridge, for itself and its pods, has one link to the cluster."""
    run("ip", "netns", "add", name)
    run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", f"to-{name}", "master", BRIDGE, "up")
    run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", name, "link", "add", BRIDGE, "type", "bridge")
    run("ip", "-n", name, "link", "set", "eth0", "master", BRIDGE, "up")
    run("ip", "-n", name, "address", "add", f"{address}/16", "dev", BRIDGE)
    run("ip", "-n", name, "link", "set", BRIDGE, "up")


class Cluster:
    """Programs by name, started and killed, and links of machines, cut and restored, by lines of JSON on standard
    input; each is answered by one on standard output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, int] = {}

    async def serve(self, listener: int) -> None:
        await asyncio.start_server(self._pass_on, sock=socket.socket(fileno=listener))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self._answer("ready")
        asyncio.get_running_loop().create_task(self._reap())
        while line := await reader.readline():
            order = json.loads(line)
            if "start" in order:
                name = order["start"]
                self.running[name] = spawn(order["command"], self.folder / "logs" / f"{name}.log")
            elif "kill" in order:
                if (pid := self.running.get(order["kill"])) is not None:
                    os.kill(pid, order["signal"])
                while order["kill"] in self.running:
                    self._look()
                    await asyncio.sleep(0.02)
            elif "link" in order:
                run("ip", "link", "set", f"to-{order['link']}", order["state"])
            self._answer(sorted(self.running))

    def _answer(self, what: object) -> None:
        print(json.dumps(what), flush=True)

    async def _reap(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.2)

    def _look(self) -> None:
        ended = set(reap())
        self.running = {name: pid for name, pid in self.running.items() if pid not in ended}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a test: the listener is the machine's, the API server's address is in here only."""
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection(*API)
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
    writer.close()


def node(folder: Path, name: str, index: int, programs: Path) -> None:
    """Be the first process of a machine: containerd, then a kubelet, until either ends or this is killed."""
    own_mounts()
    run("hostname", name)
    here = folder / name
    for part in ("root", "kubelet", "cni"):
        (here / part).mkdir(parents=True, exist_ok=True)
    (here / "containerd.toml").write_text(_CONTAINERD.format(here=here, cni=programs / "cni"))
    address, pods = f"{NETWORK}.0.{11 + index}", f"{NETWORK}.{index + 1}"
    plugins = [{
        "type": "bridge", "bridge": BRIDGE, "isGateway": False, "ipMasq": False,
        "ipam": {
            "type": "host-local", "dataDir": "/run/addresses", "ranges": [[
                {"subnet": f"{NETWORK}.0.0/16", "rangeStart": f"{pods}.1", "rangeEnd": f"{pods}.250"}
            ]],
        },
    }]  # fmt: skip
    network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    (here / "cni" / "pods.conflist").write_text(json.dumps(network))
    socket_path = "/run/containerd.sock"
    watched = {
        spawn(["containerd", "--config", str(here / "containerd.toml")], folder / "logs" / f"containerd-{name}.log")
    }
    ctr = ["ctr", "--address", socket_path, "--namespace", "k8s.io"]
    while subprocess.run([*ctr, "version"], capture_output=True).returncode:
        time.sleep(0.1)
    for image in sorted(folder.glob("images/*.tar")):
        run(*ctr, "images", "import", str(image))
    # Often enough for controllers that miss a machine after seconds; there is no flag for it.
    often = {"nodeLeaseDurationSeconds": 4, "nodeStatusUpdateFrequency": "1s", "nodeStatusReportFrequency": "2s"}
    kind = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    (here / "kubelet.json").write_text(json.dumps(kind | often))
    watched.add(spawn([
        "kubelet", f"--config={here / 'kubelet.json'}", f"--kubeconfig={folder / 'inside.yaml'}",
        f"--hostname-override={name}", f"--node-ip={address}",
        f"--address={address}", "--container-runtime=remote",
        f"--container-runtime-endpoint=unix://{socket_path}", "--pod-infra-container-image=localhost/pause:test",
        "--cgroup-driver=cgroupfs", "--cgroups-per-qos=false", "--enforce-node-allocatable=", "--fail-swap-on=false",
        f"--root-dir={here / 'kubelet'}", f"--cert-dir={here / 'kubelet' / 'pki'}", "--read-only-port=0",
        "--healthz-port=0", "--authorization-mode=AlwaysAllow", "--anonymous-auth=true", "--resolv-conf=",
        "--make-iptables-util-chains=false", "--eviction-hard=",
        "--image-gc-high-threshold=100", "--image-gc-low-threshold=99", "--register-node=true", "--max-pods=30",
        f"--node-labels=dtrain.test/index={index}",
    ], folder / "logs" / f"kubelet-{name}.log"))  # fmt: skip
    while not watched & set(reap()):
        time.sleep(0.1)


_CONTAINERD = """version = 2
root = "{here}/root"
state = "/run/containerd"
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:test"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{here}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    disable_snapshot_annotations = true
"""


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if sys.argv[1] == "cluster":
        cluster(Path(given["folder"]), given["listener"], given["controllers"], given["nodes"])
    else:
        node(Path(given["folder"]), given["name"], given["index"], Path(given["programs"]))

"""A real, small SLURM for tests: munged, slurmctld and several slurmd on one host, on loopback only; or with ``hosts``
each on a host of its own (`harness.namespaces`), slurmctld on the first, which is also where its commands are run.

`SlurmCluster` starts it from programs that ``fetch_slurm.sh`` has unpacked; nothing is installed, and it runs as
whoever starts it. A machine of it is a slurmd with all that it runs; `SlurmCluster.kill` ends one as a machine that
loses power. There are no control groups: memory is not limited. There is no accounting.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from filelock import FileLock

from harness.namespaces import Hosts

START_SECONDS = 40.0
_MARK = "DTRAIN_TEST_SLURM"
_FETCH = Path(__file__).with_name("fetch_slurm.sh")
_NAMES = ("slurmctld", "slurmd", "slurmstepd")
"""Programs that Debian's alternatives name; packages that are only unpacked have them as NAME-wlm."""


def cache_folder() -> Path:
    """The folder in which the programs lie, once `missing` has returned ""."""
    cache = Path(os.environ.get("TEST_CACHE") or Path.home() / ".cache" / "dtrain-tests")
    return cache / "slurm"


@functools.cache
def missing() -> str:
    """Why no cluster can run on this machine; "" if one can. Unpacks what was not unpacked yet."""
    if sys.platform != "linux":
        return "SLURM runs on Linux only"
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        done = subprocess.run([_FETCH, folder], capture_output=True, text=True, timeout=600)
        if done.returncode:
            return f"no SLURM for tests: {done.stderr.strip()[-2000:]}"
        for name in _NAMES:
            link = folder / "usr" / "sbin" / name
            if not link.exists():
                link.symlink_to(f"{name}-wlm")
    return ""


class SlurmCluster:
    """A cluster as a context manager; when it is left nothing of it runs, and its folder is gone."""

    def __init__(self, nodes: int = 3, hosts: Hosts | None = None) -> None:
        """``hosts``: one for slurmctld, and one for each machine."""
        self.hosts = hosts
        self.nodes = [f"n{index}" for index in range(1, nodes + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="dtrain-slurm-"))
        self.name = f"t{secrets.token_hex(6)}"
        self.conf = self.folder / "slurm.conf"
        self._root = cache_folder()
        self._host = socket.gethostname().split(".")[0]
        self._user = pwd.getpwuid(os.geteuid()).pw_name
        self._ports = _free_ports(1 + nodes)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster and of its jobs, and take its folder away."""
        for name in list(self._running):
            self.kill(name)
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            _kill(left)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the programs

    def environment(self, **more: str) -> dict[str, str]:
        """The environment in which SLURM's commands talk to this cluster, and to no other."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SQUEUE"))}
        path = f"{self._root}/usr/bin:{self._root}/usr/sbin:{own['PATH']}"
        return own | {"PATH": path, "LD_LIBRARY_PATH": self._libraries, "SLURM_CONF": str(self.conf)} | more

    def ask(self, *command: str, check: bool = True) -> str:
        """Run one of SLURM's commands, and return what it prints."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(), timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start(self, name: str) -> None:
        """Start slurmctld or munged, or the machine of this name."""
        commands = {
            "munged": [
                *("munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock"),
                *(f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munge.pid"),
                *(f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed"),
            ],
            "slurmctld": ["slurmctld", "-D", "-f", str(self.conf)],
        }
        if name in self.nodes:
            (self.folder / "spool" / name).mkdir(parents=True, exist_ok=True)
        stepd = str(self._root / "usr" / "sbin" / "slurmstepd")
        command = commands.get(name) or ["slurmd", "-D", "-f", str(self.conf), "-N", name, "-d", stepd]
        if self.hosts:
            # Each machine has its name, and knows those of all by its /etc/hosts, as those of a real cluster do.
            named = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
            own = ("--mount", "--uts", "--propagation", "private", "sh", "-c", named, str(self.folder / "hosts"))
            hostname = name if name in self.nodes else self._host
            command = [*self.hosts.command(self.host_of(name)), "unshare", *own, hostname, *command]
        with open(self.folder / f"{name}.out", "ab") as out:
            mark = {_MARK: f"{self.name}/{name}"}
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment(**mark),
                start_new_session=True,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a program, or a machine with all that runs on it, and return when it is gone."""
        process = self._running.pop(name)
        process.kill()
        process.wait()
        if name in self.nodes:
            while left := self.processes(name):
                _kill(left)
                time.sleep(0.01)

    def restart(self, name: str) -> None:
        """End a program as an administrator does, start it again, and return when the cluster answers. (A slurmctld
        that is killed forgets what it did within its last seconds.)"""
        self._running[name].terminate()
        self._running.pop(name).wait(30)
        self.start(name)
        self.wait_for_answer()

    def processes(self, node: str = "") -> list[int]:
        """The ids of the processes of a machine and of its jobs; without ``node``, of all machines and programs."""
        marks = [f"{_MARK}={self.name}/{node}".encode()]
        job = [f"SLURM_CLUSTER_NAME={self.name}".encode(), f"SLURMD_NODENAME={node}".encode()]
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    if any(each.startswith(tuple(marks)) for each in variables) or (
                        job[0] in variables and (not node or job[1] in variables)
                    ):
                        found.append(int(entry.name))
        return found

    def log(self, name: str) -> str:
        """What a program has said."""
        path = self.folder / f"{name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def host_of(self, name: str) -> int:
        """Return the host of a machine, or of a program, with ``hosts``."""
        return self.nodes.index(name) + 1 if name in self.nodes else 0

    def address(self, name: str) -> str:
        """Return the address of a machine, or of a program."""
        return self.hosts.address(self.host_of(name)) if self.hosts else "127.0.0.1"

    # --- waiting

    def wait(self, holds: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Return as soon as this holds; AssertionError with the control program's last words if it never does."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.log('slurmctld')[-1500:]}"
            time.sleep(0.1)

    def wait_for_answer(self) -> None:
        """Return as soon as slurmctld answers."""
        self.wait(lambda: "UP" in self.ask("scontrol", "ping", check=False), "slurmctld", START_SECONDS)

    def wait_for_nodes(self) -> None:
        """Return as soon as all machines can take jobs."""
        self.wait(
            lambda: (
                set(self.ask("sinfo", "-h", "-N", "-o", "%t", check=False).split()) <= {"idle", "mix", "alloc"}
                and len(set(self.ask("sinfo", "-h", "-N", "-o", "%N", check=False).split())) == len(self.nodes)
            ),
            "the machines",
            START_SECONDS,
        )

    # ---

    @property
    def _libraries(self) -> str:
        library = next((self._root / "usr" / "lib").glob("*-linux-gnu"))
        return f"{library}:{library}/slurm-wlm"

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged refuses sockets below a folder that others cannot enter
        self.conf.write_text(self._configuration())
        known = "".join(f"{self.address(name)} {name}\n" for name in self.nodes)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address('slurmctld')} {self._host}\n{known}")
        self.start("munged")
        self.wait((self.folder / "munge.sock").exists, "munged")
        self.start("slurmctld")
        for node in self.nodes:
            self.start(node)
        self.wait_for_answer()
        self.wait_for_nodes()

    def _configuration(self) -> str:
        here, plugins = self.folder, next((self._root / "usr" / "lib").glob("*-linux-gnu")) / "slurm-wlm"
        lines: Mapping[str, object] = {
            "ClusterName": self.name, "SlurmctldHost": f"{self._host}({self.address('slurmctld')})",
            "SlurmctldPort": self._ports[0],
            "SlurmUser": self._user, "SlurmdUser": self._user, "PluginDir": plugins,
            "AuthType": "auth/munge", "AuthInfo": f"socket={here}/munge.sock", "CredType": "cred/munge",
            "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
            "StateSaveLocation": here / "state", "SlurmdSpoolDir": here / "spool" / "%n",
            "SlurmctldPidFile": here / "slurmctld.pid", "SlurmdPidFile": here / "slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none",
            "SwitchType": "switch/none", "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides", "ReturnToService": 2, "InactiveLimit": 0, "KillWait": 3,
            "SlurmdTimeout": 6, "MinJobAge": 30, "JobRequeue": 1, "PreemptType": "preempt/partition_prio",
            "PreemptMode": "CANCEL", "SchedulerParameters": "bf_interval=1,sched_interval=1,batch_sched_delay=0",
            "JobAcctGatherType": "jobacct_gather/none",
            "JobCompType": "jobcomp/none", "AccountingStorageType": "accounting_storage/none",
        }  # fmt: skip
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        for node, port in zip(self.nodes, self._ports[1:], strict=True):
            hostname = node if self.hosts else self._host
            text += f"NodeName={node} NodeHostname={hostname} NodeAddr={self.address(node)} Port={port} "
            text += "CPUs=2 RealMemory=2000\n"
        nodes = f"Nodes={','.join(self.nodes)} State=UP"
        return (
            f"{text}PartitionName=main {nodes} Default=YES MaxTime=1:00:00 PriorityTier=1\n"
            f"PartitionName=urgent {nodes} PriorityTier=9 PreemptMode=OFF\n"
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    print(cache_folder())

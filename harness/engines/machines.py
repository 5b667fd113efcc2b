"""The real engines as tests and benchmarks use them: options of small, quick nodes, and what can be taken away."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psutil

from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.kubernetes.objects import LOST_MACHINE
from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.supervision.engine import Engine, EngineJob, EngineUnreachableError
from dtrain_dagster.settings.engines import ENGINE_SETTINGS
from dtrain_dagster.settings.environment import variable_of
from dtrain_dagster.settings.kubernetes import KubernetesSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings
from harness.engines import kubernetes_parts, ray_cluster, slurm_cluster
from harness.engines.kubernetes_access import NAMESPACE, deploy, make_engine, make_options, pod_template
from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_image import IMAGE, host_volumes
from harness.engines.ray_cluster import RayCluster
from harness.engines.slurm_cluster import SlurmCluster
from harness.namespaces import Hosts
from harness.own_models import OWN_MODELS

ROOT = Path(__file__).parents[2]


class Machines(Protocol):
    """What a test may do to a real engine."""

    kind: str
    full: str
    """Words of the reason that is told while others have all the room."""
    bad_settings: list[tuple[dict[str, str], str]]
    """Variables that cannot work here, and words of the refusal."""

    def options(self, folder: Path) -> dict[str, Any]:
        """The options of nodes that reach this folder."""
        ...

    def too_large(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Options of nodes that no machine has room for, and words of the reason that is told."""
        ...

    def jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        """What the engine knows of a launch."""
        ...

    def all_jobs(self) -> set[str]:
        """What the engine knows at all."""
        ...

    def fill(self) -> Callable[[], None]:
        """Take all room of all machines by work of another, and return what gives it back."""
        ...

    def kill_node(self, job: EngineJob) -> Callable[[], None]:
        """Take away the machine of a node, and return what gives it back."""
        ...

    def cut_node(self, job: EngineJob) -> Callable[[], None]:
        """Pull the cable of the machine of a node, and return what plugs it in again. Needs hosts of their own."""
        ...

    def addresses(self, job: EngineJob) -> list[str]:
        """Return the addresses that ranks of a node may have: those of its machine, or of its pod."""
        ...

    def kill_control_plane(self) -> Callable[[], None]:
        """Kill what the engine is asked through, and return what starts it again."""
        ...


class Pods:
    """The machines of a Kubernetes: kubelets."""

    kind = "kubernetes"
    full = "cpu"
    bad_settings: ClassVar = [
        ({"DTRAIN_KUBERNETES_IMAGE": ""}, "DTRAIN_KUBERNETES_IMAGE"),
        ({"DTRAIN_KUBERNETES_VOLUMES": "nix"}, "is not a volume"),
        ({"DTRAIN_KUBERNETES_OPTIONS": "namespace=absent"}, "deploy/kubernetes has the rights"),
    ]

    def __init__(self, cluster: KubernetesCluster, kubeconfig: Path) -> None:
        self.cluster, self.kubeconfig = cluster, kubeconfig

    def options(self, folder: Path) -> dict[str, Any]:
        volumes = [
            {"mount": path, "source": {"hostPath": {"path": path}}, "read_only": read_only}
            for path, read_only in host_volumes(folder)
        ]
        python = (
            folder / "python"
        )  # what an image has: an interpreter that finds this project, as it is in this checkout
        python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:{OWN_MODELS} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        user = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), os.getuid()) | {"runAsNonRoot": os.getuid() != 0}
        lost = [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1} for key in LOST_MACHINE
        ]
        return {
            "kubeconfig": str(self.kubeconfig), "namespace": NAMESPACE, "image": IMAGE, "cpus": 0.1, "memory_gib": 1.0,
            "volumes": volumes, "python": str(python),
            "pod_template": pod_template({"securityContext": user, "tolerations": lost}, imagePullPolicy="Never"),
        }  # fmt: skip

    def too_large(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        return options | {"cpus": 500.0}, "cpu"

    def jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        options = KubernetesSettings.of({"kubeconfig": str(self.kubeconfig), "namespace": NAMESPACE, "image": IMAGE})
        return KubernetesEngine(options, "", lambda *_: ()).list_jobs(launch)

    def all_jobs(self) -> set[str]:
        return {job["metadata"]["uid"] for job in self.cluster.ask("GET", "/apis/batch/v1/jobs")["items"]}

    def fill(self) -> Callable[[], None]:
        nodes = self.cluster.ask("GET", "/api/v1/nodes")["items"]
        cpus = min(int(node["status"]["allocatable"]["cpu"]) for node in nodes)
        engine = make_engine(make_options(self.kubeconfig, cpus=cpus - 0.05), "sleep 1000")
        return _fill(engine, len(nodes))

    def kill_node(self, job: EngineJob) -> Callable[[], None]:
        self.cluster.kill(job.host)

        def give_back() -> None:
            self.cluster.start(job.host)
            self.cluster.wait_for_node(job.host)

        return give_back

    def cut_node(self, job: EngineJob) -> Callable[[], None]:
        self.cluster.cut(job.host)

        def give_back() -> None:
            self.cluster.restore(job.host)
            self.cluster.wait_for_node(job.host)

        return give_back

    def addresses(self, job: EngineJob) -> list[str]:
        pods = self.cluster.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=job-name={job.id}")["items"]
        return [pod["status"]["podIP"] for pod in pods]

    def kill_control_plane(self) -> Callable[[], None]:
        self.cluster.kill("kube-apiserver")
        return lambda: self.cluster.start("kube-apiserver")


class Slurmds:
    """The machines of a SLURM: slurmd with all that it runs."""

    kind = "slurm"
    full = "no machine is free"
    bad_settings: ClassVar = [
        ({"DTRAIN_SLURM_CPUS": "2"}, "is DTRAIN_NODE_CPUS now"),
        ({"DTRAIN_SLURM_OPTIONS": "extra=--array=1-3"}, "nodes are jobs of their own"),
        ({"DTRAIN_SLURM_PARTITION": "nix"}, "correct DTRAIN_SLURM_PARTITION"),
    ]

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster

    def options(self, folder: Path) -> dict[str, Any]:
        return {"cpus": 1, "extra": ["--exclusive"]}

    def too_large(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        return options | {"cpus": 64}, "PartitionConfig: no node of the partition is large enough"

    def jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        return SlurmEngine(SlurmSettings(), ".", lambda *_: ()).list_jobs(launch)

    def all_jobs(self) -> set[str]:
        return set(self.cluster.ask("squeue", "--noheader", "--states=all", "--format=%i").split())

    def fill(self) -> Callable[[], None]:
        engine = SlurmEngine(
            SlurmSettings(extra=("--exclusive",)), str(self.cluster.folder), lambda *_: ("sleep", "1000")
        )
        return _fill(engine, len(self.cluster.nodes))

    def kill_node(self, job: EngineJob) -> Callable[[], None]:
        self.cluster.kill(job.host)

        def give_back() -> None:
            self.cluster.start(job.host)
            self.cluster.wait_for_nodes()

        return give_back

    def cut_node(self, job: EngineJob) -> Callable[[], None]:
        hosts = self.cluster.hosts
        assert hosts is not None
        hosts.cut(self.cluster.host_of(job.host))

        def give_back() -> None:
            hosts.restore(self.cluster.host_of(job.host))
            self.cluster.wait_for_nodes()

        return give_back

    def addresses(self, job: EngineJob) -> list[str]:
        return [self.cluster.address(job.host)]

    def kill_control_plane(self) -> Callable[[], None]:
        time.sleep(6)  # slurmctld writes its state every 5 s, and forgets later jobs if it is killed
        self.cluster.kill("slurmctld")

        def start() -> None:
            self.cluster.start("slurmctld")
            self.cluster.wait_for_answer()

        return start


class Raylets:
    """The machines of a Ray cluster: raylets with all that they run."""

    kind = "ray"
    full = "no machine is free"
    bad_settings: ClassVar = [
        ({"DTRAIN_NODE_CPUS": "0"}, "DTRAIN_NODE_CPUS"),
        ({"DTRAIN_RAY_OPTIONS": "resources=CPU=3"}, "has a setting of its own"),
        ({"DTRAIN_RAY_ADDRESS": "nowhere"}, "DTRAIN_RAY_ADDRESS"),
    ]

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.asked = RayEngine(RaySettings(**self.options(Path())), "/nowhere", lambda *_: ())

    def options(self, folder: Path) -> dict[str, Any]:
        return {
            "address": self.cluster.address, "dashboard": self.cluster.dashboard, "cpus": 2.0,
        }  # fmt: skip

    def too_large(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        return options | {"cpus": 64.0}, "lower DTRAIN_NODE_CPUS"

    def jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        try:
            return self.asked.list_jobs(launch)
        except EngineUnreachableError:  # the connection is one to a head that was restarted
            return self.asked.list_jobs(launch)

    def all_jobs(self) -> set[str]:
        return {actor["name"] for actor in self.asked._ask("list_actors", prefix="")["actors"]}

    def fill(self) -> Callable[[], None]:
        engine = RayEngine(RaySettings(**self.options(Path())), str(self.cluster.folder), lambda *_: ("sleep", "1000"))
        release = _fill(engine, len(self.cluster.names) - 1)

        def give_back() -> None:
            release()
            engine.close()

        return give_back

    def kill_node(self, job: EngineJob) -> Callable[[], None]:
        name = self._machine_of(job)
        self.cluster.kill(name)
        return lambda: self.cluster.start(name)

    def cut_node(self, job: EngineJob) -> Callable[[], None]:
        hosts, name = self.cluster.hosts, self._machine_of(job)
        assert hosts is not None
        hosts.cut(self.cluster.names.index(name))

        def give_back() -> None:
            hosts.restore(self.cluster.names.index(name))
            self.cluster.wait_for_end(name)  # a raylet that was given up ends when it hears of it
            self.cluster.start(name)

        return give_back

    def addresses(self, job: EngineJob) -> list[str]:
        return [self.cluster.address_of(self._machine_of(job))]

    def _machine_of(self, job: EngineJob) -> str:
        """Return the machine on which a node runs, by the processes above it."""
        outputs = [process for process in psutil.process_iter() if _writes_to(process, f"ray-{job.id}.out")]
        above = {parent.pid for process in outputs for parent in process.parents()}
        names = [name for name, process in self.cluster.processes.items() if process.pid in above]
        assert len(names) == 1, (job, names, outputs)
        return names[0]

    def kill_control_plane(self) -> Callable[[], None]:
        self.cluster.kill(self.cluster.names[0])

        def start() -> None:
            for name in self.cluster.names:  # without a memory of its own, a new head knows none of the others
                if name in self.cluster.processes:
                    self.cluster.kill(name)
            for name in self.cluster.names:
                self.cluster.start(name)

        return start


def _fill(engine: Engine, count: int) -> Callable[[], None]:
    """Have an engine run so many nodes of another's launch, and return what ends them."""
    launch = {"job_id": "others", "token": os.urandom(24).hex(), "launch": 1, "node_count": count, "env": {}}
    names = [engine.submit(launch, node, 1) for node in range(count)]
    deadline = time.monotonic() + 120
    while len([job for job in engine.list_jobs(launch) if job.state == "running"]) < count:
        assert time.monotonic() < deadline, engine.list_jobs(launch)
        time.sleep(0.2)
    return lambda: engine.cancel(names, force=True)


def _writes_to(process: psutil.Process, name: str) -> bool:
    """Whether the output of a process is a file of this name."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1").endswith(name)
    except OSError:
        return False


def variables(kind: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The environment that gives these options."""
    given = {name: value for name, value in options.items() if name not in ("volumes", "pod_template")}
    texts_of = {name: " ".join(value) if isinstance(value, list) else str(value) for name, value in given.items()}
    own, words = ENGINE_SETTINGS[kind].OPTIONS, list[str]()
    found = {variable_of(ENGINE_SETTINGS[kind], name): text for name, text in texts_of.items() if name not in own}
    words += [f"{name}={text}" for name, text in texts_of.items() if name in own]
    if template := options.get("pod_template"):
        file = Path(options["python"]).with_name("pod-template.yaml")
        file.write_text(json.dumps(template))
        words.append(f"pod_template={file}")
    if volumes := options.get("volumes"):
        texts = [
            f"host:{one['source']['hostPath']['path']}:{one['mount']}{':ro' if one['read_only'] else ''}"
            for one in volumes
        ]
        found["DTRAIN_KUBERNETES_VOLUMES"] = ",".join(texts)
    if words:
        found[f"DTRAIN_{kind.upper()}_OPTIONS"] = shlex.join(words)
    return found


def missing(kind: str) -> str:
    """Why this engine cannot run here; "" if it can."""
    parts = {"kubernetes": kubernetes_parts.missing, "slurm": slurm_cluster.missing, "ray": ray_cluster.missing}
    return parts[kind]()


@contextmanager
def open_machines(
    kind: str, nodes: int = 2, on_hosts: bool = False, variables: Mapping[str, str] | None = None
) -> Iterator[Machines]:
    """Start an engine with room for so many nodes and one more, and set the variables by which it is used.

    ``on_hosts``: each machine is a host of its own, and this thread is on that of the control plane. (Machines of a
    Kubernetes always are, and their API is to be reached from here.) ``variables``: as of `RayCluster`. Raise
    `NoNamespacesError` where there can be no hosts."""
    before = dict(os.environ)
    with contextlib.ExitStack() as stack:
        stack.callback(_set_environment, before)
        if kind == "kubernetes":
            kubernetes = stack.enter_context(KubernetesCluster(nodes=2))
            yield Pods(kubernetes, deploy(kubernetes))
            return
        machines = nodes + (1 if kind == "slurm" else 2)  # the head of a Ray cluster takes no node
        hosts = stack.enter_context(Hosts(machines + (kind == "slurm"))) if on_hosts else None
        if hosts:
            stack.enter_context(hosts.inside(0))
        if kind == "slurm":
            slurm = stack.enter_context(SlurmCluster(nodes=machines, hosts=hosts))
            os.environ.update(slurm.environment())
            yield Slurmds(slurm)
            return
        ray = stack.enter_context(RayCluster(nodes=machines, hosts=hosts, variables=variables))
        os.environ.update(ray.access)
        raylets = Raylets(ray)
        stack.callback(raylets.asked.close)
        yield raylets


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)

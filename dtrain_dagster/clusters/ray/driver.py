"""The driver: a process of its own that talks with a Ray cluster, and through a pipe with the engine.

``python -m dtrain_dagster.clusters.ray.driver PIPE ADDRESS [DASHBOARD]``. A driver of Ray ends with the cluster's head,
and must not take the supervisor with it. Nodes are detached actors: they outlive drivers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

ACTOR = "DtrainNode"
"""The class of nodes in Ray's lists."""
ADDRESS_VARIABLES = ("DTRAIN_HOST", "DTRAIN_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables of a machine that say at which of its addresses a node is reached; else it is Ray's own."""
NAMESPACE = "dtrain"
"""Ray's namespace of all that is created."""
NODE_LABEL = "ray.io/node-id"
"""The label that each machine has with its id, which is another one once its Ray was started again."""
ASK_SECONDS = 8.0
END_CALL_SECONDS = 5.0


def make_actor_class(ray: Any) -> Any:
    """Return the class of nodes. It is made here, so that Ray sends it by value: nodes need not import this project."""

    class DtrainNode:
        """A node: it runs the agent as a process that the kernel kills with this one, and ends when it has ended."""

        def __init__(self) -> None:
            self.process: Any = None
            self.is_ended = False

        def run(self, command: Sequence[str], output: str) -> None:
            def die_with_parent() -> None:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)

            environment = {name: value for name, value in os.environ.items() if name != "DTRAIN_JOB_TOKEN"}
            if not any(environment.get(name) for name in ADDRESS_VARIABLES):
                environment["DTRAIN_HOST"] = ray.util.get_node_ip_address()
            with open(output, "ab") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            if self.is_ended:  # asked to end before it began
                self.process.terminate()
            code = self.process.wait()
            with open(f"{output}.code.new", "w") as file:
                file.write(str(code))
            os.replace(f"{output}.code.new", f"{output}.code")
            ray.actor.exit_actor()

        def end(self) -> None:
            self.is_ended = True
            if self.process is not None:
                self.process.terminate()

    DtrainNode.__name__ = DtrainNode.__qualname__ = ACTOR
    return ray.remote(DtrainNode)


def host_of(node: Mapping[str, Any]) -> str:
    """Return what a machine is called: the name that `ray start` was given, which is its address unless it was."""
    return str(node.get("NodeName") or node.get("NodeManagerAddress") or "")


def actor_options(name: str, demand: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of the actor of a node, as Ray takes them. ``demand``: by Ray's names of resources. Pure."""
    resources = dict(demand)
    return {
        "name": name,
        "lifetime": "detached",
        "namespace": NAMESPACE,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 4,
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "get_if_exists": True,
    }


class Driver:
    """One connection to a cluster."""

    def __init__(self, address: str, dashboard: str | None = None) -> None:
        import ray

        self.ray = ray
        joined = ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        # Without an address Ray's lists are those of whichever cluster runs on this machine.
        self.dashboard = dashboard or (f"http://{joined.dashboard_url}" if joined.dashboard_url else None)
        self.actor_class = make_actor_class(ray)

    def submit(
        self, options: Mapping[str, Any], command: Sequence[str], output: str, excluded: Sequence[str] = ()
    ) -> str:
        """Create the actor of a node, unless there is or was one of that name, on none of the ``excluded`` machines.
        ``options``: of `actor_options`."""
        name = str(options["name"])
        if not self._actors([("name", "=", name)]):
            ids = [node["NodeID"] for node in self.ray.nodes() if node["Alive"] and host_of(node) in excluded]
            apart = {"label_selector": {NODE_LABEL: f"!in({','.join(ids)})"}} if ids else {}
            made = self.actor_class.options(**options, **apart).remote()
            made.run.remote(list(command), output)
        return name

    def list_actors(self, prefix: str) -> dict[str, Any]:
        """Return the nodes whose names begin so, and what the cluster has room for."""
        nodes = {node["NodeID"]: node for node in self.ray.nodes()}
        found = []
        for actor in self._actors([("class_name", "=", ACTOR)]):
            if actor.name and actor.name.startswith(prefix):
                cause: Any = next(iter((actor.death_cause or {}).values()), None)
                found.append(
                    {
                        "name": actor.name,
                        "state": actor.state,
                        "host": host_of(nodes.get(actor.node_id, {})),
                        "why": cause.get("error_message", "") if isinstance(cause, dict) else "",
                        "demand": actor.required_resources or {},
                    }
                )
        alive = [node for node in nodes.values() if node["Alive"]]
        return {"actors": found, "largest": [node["Resources"] for node in alive]}

    def end(self, names: Sequence[str], force: bool) -> None:
        """End these nodes: with SIGTERM to the agent, or at once. Those that wait for a place are withdrawn."""
        states = {actor.name: actor.state for actor in self._actors([("class_name", "=", ACTOR)])}
        for name in names:
            if states.get(name) in (None, "DEAD"):
                continue
            with contextlib.suppress(ValueError):
                actor = self.ray.get_actor(name, namespace=NAMESPACE)
                if force or states[name] != "ALIVE":
                    self.ray.kill(actor, no_restart=True)
                else:
                    with contextlib.suppress(self.ray.exceptions.RayError):
                        self.ray.get(actor.end.remote(), timeout=END_CALL_SECONDS)

    def _actors(self, filters: Sequence[tuple[str, str, str]]) -> Sequence[Any]:
        from ray.util.state import list_actors

        own: list[Any] = [*filters, ("ray_namespace", "=", NAMESPACE)]
        found: Sequence[Any] = list_actors(
            address=self.dashboard,
            filters=own,
            detail=True,
            limit=10_000,
            timeout=int(ASK_SECONDS),
            raise_on_missing_output=False,
        )
        return found


def main(arguments: Sequence[str]) -> int:
    """Answer requests (a method of `Driver` and its arguments) with what was found and what went wrong, until the
    other end of the pipe closes."""
    engine: Connection[Any, Any] = Connection(int(arguments[0]))
    driver: Driver | None = None
    with contextlib.suppress(EOFError):
        while True:
            do, given = engine.recv()
            try:
                driver = driver or Driver(*arguments[1:])
                engine.send((getattr(driver, do)(**given), ""))
            except Exception as error:  # whatever it is, the engine has to know
                engine.send((None, f"{type(error).__name__}: {error}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

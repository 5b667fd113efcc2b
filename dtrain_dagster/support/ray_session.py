"""A connection to Ray: to a cluster that exists, by its address, or to one that is started here and ended again.

What is computed on it belongs in its users' rooms. A cluster that is started here is bounded in CPUs and memory, has no
dashboard, and listens on this machine's loopback alone. Its files are in a folder of its own, which is removed with it.
"""

from __future__ import annotations

import os
import secrets
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dtrain_dagster.support.ray_guard import MARK, guarded

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else it tells its makers of each start
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else it takes an address that others reach, and listens on it
    "RAY_AUTH_MODE": "token",  # else other users of this machine could have it run their code
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
"""Variables of a Ray that is started here."""
LEAST_STORE_BYTES = 80 << 20
"""The smallest object store that Ray starts with, in bytes."""


class RayError(RuntimeError):
    """A refusal of Ray. The message says what is missing, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPlace:
    """Which Ray is meant."""

    address: str | None = None
    """The address of a cluster's head, ``host:port``; None: one is started here."""
    cpus: int = 1
    """CPUs of one that is started here."""
    store_bytes: int = LEAST_STORE_BYTES
    """Bytes of shared memory that it keeps objects in, before it spills."""


def imported_ray() -> Any:
    """Return the module ``ray``. Raise `RayError` where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise RayError(f"Ray cannot be imported ({error}): install this project with its extra `ray`") from None
    return ray


@contextmanager
def ray_session(place: RayPlace, spill: Path, namespace: str = "dtrain") -> Iterator[Any]:
    """Yield the module ``ray``, connected; at the end the connection is closed, and what was started here is ended.

    ``spill``: a folder for objects for which there is no memory, removed with a Ray that was started here. A connection
    that this process has already is used and kept. Raise `RayError` where there is no Ray or no cluster at the address.
    """
    wanted = {"RAY_DISABLE_IMPORT_WARNING": "1"} if place.address else {**QUIET, "RAY_AUTH_TOKEN": _own_token()}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)  # before the import, which reads some of them
    try:
        ray = imported_ray()
        if ray.is_initialized():
            yield ray
            return
        with _own_folder() as folder, ExitStack() as stack:
            if not place.address:
                stack.enter_context(guarded(str(folder), [folder, spill]))
                os.environ[MARK] = str(folder)
                stack.callback(os.environ.pop, MARK, None)  # before the guard acts
            try:
                with _signals_kept():  # Ray puts a handler of its own in the place of ours
                    _connect(ray, place, namespace, folder, spill)
                yield ray
            finally:
                ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _own_token() -> str:
    """Return this process's token: one for all that it starts, as Ray reads it once."""
    return secrets.token_hex(32)


def _connect(ray: Any, place: RayPlace, namespace: str, folder: Path, spill: Path) -> None:
    common = {"namespace": namespace, "log_to_driver": False, "logging_level": "error", "configure_logging": True}
    try:
        if place.address:
            ray.init(address=place.address, **common)
            return
        if ray.util.get_node_ip_address() != "127.0.0.1":
            raise RayError(
                "code of this process imported Ray before, so it would listen beyond loopback: start "
                "this process with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or set DTRAIN_RAY_ADDRESS"
            )
        ray.init(
            address="local",
            num_cpus=place.cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=max(place.store_bytes, LEAST_STORE_BYTES),
            object_spilling_directory=str(spill),
            _temp_dir=str(folder),
            **common,
        )
    except RayError:
        raise
    except Exception as error:  # of any kind: Ray says with a bare one that it did not start in time
        where = f"no Ray answers at DTRAIN_RAY_ADDRESS={place.address}" if place.address else "Ray does not start here"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "this machine must be a node of that cluster: `ray start --address=…`" if place.address else ""
        raise RayError(f"{where}: {reason}" + (f"; {remedy}" if remedy else "")) from error


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for the sockets that Ray keeps there (107 characters)."""
    from dtrain_dagster.support.building import building_in

    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > len("/var/tmp"):
        parent = Path("/tmp")
    parent /= f"dray-{os.getuid()}"
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RayError(f"{parent} is not a folder of this user alone: remove it")
    with building_in(parent) as folder:
        yield folder


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore this process's handler of SIGTERM at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)

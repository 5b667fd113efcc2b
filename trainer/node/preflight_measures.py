"""Measures a node before its ranks start: ``python -m trainer.node.preflight_measures``, a process of its own, since
what is broken may hang. It prints each figure as soon as it has it, a line of JSON each; `preflight` judges.

On GPUs it only reads, by NVML, unless the mode is ``full``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from trainer.node.preflight import COMMAND_SECONDS, LIMIT_SECONDS, CommandEnd, Disk, Measured, Mode, Peer, bus_of
from trainer.runtime.host_memory import available_bytes
from trainer.runtime.parent_death import die_with

MODULE = "trainer.node.preflight_measures"
PEERS = 3
"""Peers that are tried."""
PEER_SECONDS = 2.0
COPY_BYTES = 64 << 20
GPU_SECONDS = 4.0
"""Seconds of matrix products on each GPU in the mode ``full``."""
XID_SECONDS = 7200.0
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)")
_THROTTLES = {
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat",
    "HwPowerBrakeSlowdown": "the power brake",
    "HwSlowdown": "the hardware",
}
"""NVML's names of reasons that tell of trouble, beside those of an idle GPU or of a power cap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """What is to be measured."""

    run_dir: str
    mode: Mode = "quick"
    command: str = ""
    """A site's own check, for the shell."""
    peers: tuple[str, ...] = ()
    """The addresses of nodes that are there already."""
    port: int = 29500
    """A port at which to try them: a refused connection is an answer, too."""


class Measuring:
    """A process that measures this node, while its parent goes on."""

    def __init__(self, errand: Errand, environment: Mapping[str, str]) -> None:
        self.limit = LIMIT_SECONDS[errand.mode] + (COMMAND_SECONDS if errand.command else 0.0)
        self._output = _open_scratch()
        parent = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, json.dumps(asdict(errand))],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),
        )
        self._begun = time.monotonic()

    def is_over(self) -> bool:
        """Return whether it has ended, or has had its time."""
        return self._process.poll() is not None or time.monotonic() - self._begun > self.limit

    def result(self) -> Measured:
        """Return what it found, and end it."""
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # of a process that hangs in the kernel nobody waits
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.close()
        return read_output(text, code)


def read_output(text: str, code: int | None) -> Measured:
    """Return what the lines of a measuring process say, which ended with this exit code; None: it hung. Pure."""
    found: dict[str, Any] = {}
    skipped: list[str] = []
    said: list[str] = []
    at, is_done = "", False
    for line in text.splitlines():
        try:
            item = json.loads(line)
        except ValueError:
            said.append(line.strip())  # a library's own words
            continue
        if isinstance(item, dict):
            at = item.pop("at", at)
            is_done = item.pop("done", is_done)
            skipped += item.pop("skipped", [])
            found |= item
    hung = ""
    if not is_done and (code is None or code < 0):
        hung = at or "its Python"
    elif not is_done:
        last = next((line for line in reversed(said) if line), f"exit code {code}")
        skipped.append(f"what follows {at or 'the start'}: {last}")
    return Measured.of({**found, "skipped": skipped, "hung": hung})


def measure(errand: Errand) -> Iterator[dict[str, Any]]:
    """Yield what is found, as the fields of `Measured`; ``at`` names what comes next."""
    yield {"memory_bytes": available_bytes()}
    yield {"at": "the folders"}
    yield {"disks": [asdict(_look_at_disk(path)) for path in folders_of(errand.run_dir)]}
    if errand.mode != "light":
        for name, look in _CHECKS.items():
            yield {"at": name}
            try:
                yield look(errand)
            except Exception as error:  # what is not there is skipped, whatever a library makes of that
                yield {"skipped": [f"{name}: {type(error).__name__}: {error}".splitlines()[0]]}
    if errand.command:
        yield {"at": "the site's own check"}
        yield {"command": asdict(run_command(errand.command, COMMAND_SECONDS))}
    yield {"done": True}


def folders_of(run_dir: str) -> list[str]:
    """Return the folders that a node writes to."""
    try:
        scratch = tempfile.gettempdir()
    except FileNotFoundError:  # none can be written
        scratch = "/tmp"
    cache = os.environ.get("DTRAIN_CACHE", "")
    return list(dict.fromkeys((run_dir, scratch, *([cache] if os.path.isdir(cache) else []))))


def run_command(command: str, seconds: float) -> CommandEnd:
    """Run a site's own check in a shell, and return how it ended, with the last line that it printed."""
    with _open_scratch() as output:
        process = subprocess.Popen(command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None  # `Measuring.result` ends what is left of it, its children included
        output.seek(0)
        lines = output.read()[-4096:].decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return CommandEnd(code=code, last_line=said if code is not None else "it did not end in time")


def _open_scratch() -> IO[bytes]:
    """Return an empty file for what a process prints, in memory where that is possible: a full disk is to be told."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("pre-flight"), "w+b")
    return tempfile.TemporaryFile()


def _look_at_disk(path: str) -> Disk:
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".preflight-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        stat = os.statvfs(path)
    except OSError as error:
        return Disk(path=path, error=error.strerror or str(error))
    return Disk(path=path, free_bytes=stat.f_bavail * stat.f_frsize)


def _look_at_clock(errand: Errand) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(dir=errand.run_dir, prefix=".preflight-") as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        after = time.time()
        there = os.stat(file.name).st_mtime
    # Between the two the storage wrote its time: what lies between is no difference of clocks.
    return {"skew_seconds": before - there if there < before else after - there if there > after else 0.0}


def _look_at_cpu(errand: Errand) -> dict[str, Any]:
    import numpy as np

    size = 512
    # Whole numbers this small give sums that a float64 holds exactly, in any order.
    left = np.arange(size * size, dtype=np.float64).reshape(size, size) % 97
    right = (np.arange(size * size, dtype=np.float64) % 89).reshape(size, size).T.copy()
    expected = left @ right.sum(axis=1)
    is_right, begun = True, time.perf_counter()
    count = 0
    while count < 2 or (time.perf_counter() - begun < 0.2 and count < 50):
        is_right = is_right and bool(((left @ right).sum(axis=1) == expected).all())
        count += 1
    seconds = time.perf_counter() - begun
    source = np.ones(COPY_BYTES // 8)
    target = np.zeros_like(source)
    begun = time.perf_counter()
    np.copyto(target, source)
    copy_seconds = time.perf_counter() - begun
    return {
        "product_is_right": is_right and bool((target == source).all()),
        "product_gflops": 2e-9 * size**3 * count / max(seconds, 1e-9),
        "copy_gb_per_second": 1e-9 * COPY_BYTES / max(copy_seconds, 1e-9),
    }


def _look_at_peers(errand: Errand) -> dict[str, Any]:
    return {"peers": [asdict(_reach(address, errand.port)) for address in errand.peers[:PEERS]]}


def _reach(address: str, port: int) -> Peer:
    try:
        socket.create_connection((address, port), PEER_SECONDS).close()
    except ConnectionRefusedError:  # its machine answers
        return Peer(address=address, how="reached")
    except TimeoutError:  # a firewall may be silent about ports that nobody uses
        return Peer(address=address, how="silent", error=f"nothing within {PEER_SECONDS:g} s")
    except OSError as error:
        return Peer(address=address, how="unreachable", error=error.strerror or str(error))
    return Peer(address=address, how="reached")


def _look_at_gpus(errand: Errand) -> dict[str, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # Images may have CUDA without NVML, which then tells nothing of the GPUs.
        is_there = error.value not in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION)
        return {"gpus": [], "driver_errors": [f"GPUs: {error}"]} if is_there else {"skipped": [f"GPUs: {error}"]}
    skipped: list[str] = []
    lost: list[str] = []
    gpus = []
    for index in _visible(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            is_lost = error.value != pynvml.NVML_ERROR_NO_PERMISSION
            (lost if is_lost else skipped).append(f"GPU {index}: {error}")
            continue
        gpus.append(_ask_gpu(pynvml, handle, index, skipped))
    return {"gpus": gpus, "driver_errors": lost, "skipped": skipped}


def _visible(count: int) -> list[int]:
    """Return the numbers of the GPUs that this node may use. Names that are no numbers are left aside, and all are
    looked at."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return list(range(count))
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if not all(name.isdigit() for name in names):
        return list(range(count))
    return [int(name) for name in names if int(name) < count]


def _ask_gpu(nvml: Any, handle: Any, index: int, skipped: list[str]) -> dict[str, Any]:
    """Return the fields of `Gpu` that this one tells."""
    told: dict[str, Any] = {}

    def ask(what: str, question: Callable[[], Mapping[str, Any]]) -> None:
        try:
            told.update(question())
        except Exception as error:  # an old GPU, one in parts, or a right that is missing
            skipped.append(f"GPU {index}, {what}: {error}")

    def name() -> Mapping[str, Any]:
        found = nvml.nvmlDeviceGetName(handle)
        return {"name": found.decode() if isinstance(found, bytes) else found}

    def memory() -> Mapping[str, Any]:
        found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)  # without what the driver reserves
        return {"memory_bytes": int(found.total), "used_bytes": int(found.used)}

    def errors() -> Mapping[str, Any]:
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return {"uncorrected_errors": int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))}

    def rows() -> Mapping[str, Any]:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        return {"remap_pending": bool(pending), "remap_failed": bool(failed)}

    def pages() -> Mapping[str, Any]:
        causes = (
            nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        )
        return {"retired_pages": sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)}

    def throttles() -> Mapping[str, Any]:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        found = [
            words
            for reason, words in _THROTTLES.items()
            if bits & int(getattr(nvml, f"nvmlClocksThrottleReason{reason}", 0))
        ]
        return {"throttled": list(dict.fromkeys(found))}

    def parts() -> Mapping[str, Any]:
        return {"is_split": nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE}

    def has_parts() -> Mapping[str, Any]:
        with contextlib.suppress(nvml.NVMLError):  # of a kind that cannot be divided
            return parts()
        return {"is_split": False}

    def bus() -> Mapping[str, Any]:
        found = nvml.nvmlDeviceGetPciInfo(handle).busId
        return {"bus": bus_of(found.decode() if isinstance(found, bytes) else found)}

    ask("name", name)
    ask("PCI address", bus)
    ask("instances", has_parts)
    ask("memory", memory)
    ask("memory errors", errors)
    ask("remapped rows", rows)
    if "remap_failed" not in told:  # later GPUs remap rows and retire no pages
        ask("retired pages", pages)
    ask("throttling", throttles)
    return told


def _look_at_kernel_log(errand: Errand) -> dict[str, Any]:
    if not Path("/proc/driver/nvidia").exists():
        return {}
    records = []
    with open(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as log:
        while True:
            try:
                record = log.read(8192)  # one record each
            except OSError:  # it was overwritten meanwhile
                break
            if not record:
                break
            records.append(record.decode(errors="replace"))
    return {"xids": xids_in(records, time.monotonic())}


def xids_in(records: Sequence[str], now: float) -> list[tuple[str, int]]:
    """Return the errors of NVIDIA's driver, by PCI address, within two hours before ``now`` (seconds since the
    machine's start) from records of the kernel's log. Pure."""
    found = []
    for record in records:
        head, _, said = record.partition(";")
        with contextlib.suppress(IndexError, ValueError):  # a line that continues another
            if (match := _XID.search(said)) and now - int(head.split(",")[2]) / 1e6 < XID_SECONDS:
                found.append((bus_of(match[1]), int(match[2])))
    return found


def _load_gpus(errand: Errand) -> dict[str, Any]:
    """Return the GPUs again, with their speeds in a matrix product, a copy from the host and one to the next GPU."""
    if errand.mode != "full":
        return {}
    found = _look_at_gpus(errand)
    if not found.get("gpus") or any(gpu.get("is_split") for gpu in found["gpus"]):
        return {}
    import pynvml
    import torch

    if torch.version.cuda is None:
        return {"skipped": ["the GPUs under load: this torch is a build without CUDA"]}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in _visible(pynvml.nvmlDeviceGetCount())]
        if torch.cuda.device_count() < len(handles):
            raise RuntimeError(f"torch sees {torch.cuda.device_count()} of {len(handles)}")
        count = len(handles)
        with ThreadPoolExecutor(count) as pool:  # all at once, as in a training
            speeds = list(pool.map(lambda number: _load_gpu(torch, pynvml, number, handles[number]), range(count)))
        for number, speed in enumerate(speeds):
            found["gpus"][number] |= speed
            if count > 1:
                found["gpus"][number]["peer_gb_per_second"] = _copy_to_peer(torch, number, (number + 1) % count)
    except (RuntimeError, pynvml.NVMLError) as error:  # one that does not compute is of no use
        told = f"the GPUs under load: {error}".splitlines()[0]
        return {"driver_errors": [*found["driver_errors"], told]}
    return {"gpus": found["gpus"]}


def _load_gpu(torch: Any, nvml: Any, number: int, handle: Any) -> dict[str, Any]:
    size = 8192
    with torch.cuda.device(number), torch.no_grad():
        is_right = multiplies_rightly(torch, size, "cuda")
        left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.mm(left, right)
        torch.cuda.synchronize()
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < GPU_SECONDS:
            for _ in range(10):
                torch.mm(left, right, out=out)
            torch.cuda.synchronize()
            count += 10
        seconds = time.perf_counter() - begun
        pinned = torch.empty(COPY_BYTES * 4, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(pinned, device="cuda")
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            target.copy_(pinned, non_blocking=True)
        width = {}
        with contextlib.suppress(nvml.NVMLError):
            width = {
                "pcie_width": int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
                "pcie_most": int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            }
        torch.cuda.synchronize()
        copy_seconds = time.perf_counter() - begun
    return {
        "tflops": 2e-12 * size**3 * count / seconds,
        "copy_gb_per_second": 10e-9 * pinned.numel() / copy_seconds,
        "product_is_right": is_right,
        **width,
    }


def multiplies_rightly(torch: Any, size: int, device: str) -> bool:
    """Return whether a product of bfloat16 matrices on a device is the one that this machine's CPU computes. Of the
    factors at most 256 terms of each sum are not zero, and each is 1 or -1: bfloat16 holds every partial sum exactly,
    whatever the order in which a library adds."""
    place = torch.arange(size, device=device)
    period = max(1, size // 256)
    left = (place[:, None] % period == place[None, :] % period).bfloat16()
    right = ((place[:, None] // period + place[None, :]) % 3 - 1).bfloat16()
    found = torch.mm(left, right)[-256:].cpu().float()
    return bool(torch.equal(found, left[-256:].cpu().float() @ right.cpu().float()))


def _copy_to_peer(torch: Any, number: int, other: int) -> float:
    source = torch.empty(COPY_BYTES * 4, dtype=torch.uint8, device=f"cuda:{number}")
    target = torch.empty_like(source, device=f"cuda:{other}")
    target.copy_(source)
    torch.cuda.synchronize(number)
    torch.cuda.synchronize(other)
    begun = time.perf_counter()
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(number)
    torch.cuda.synchronize(other)
    return 10e-9 * source.numel() / (time.perf_counter() - begun)


_CHECKS: Mapping[str, Callable[[Errand], dict[str, Any]]] = {
    "the clock": _look_at_clock,
    "the CPU": _look_at_cpu,
    "the peers": _look_at_peers,
    "the GPUs": _look_at_gpus,
    "the kernel's log": _look_at_kernel_log,
    "the GPUs under load": _load_gpus,
}


def main(arguments: Sequence[str]) -> int:
    """Measure what an `Errand`, in JSON, asks for."""
    told = json.loads(arguments[0])
    errand = Errand(**{**told, "peers": tuple(told.get("peers", ()))})
    for line in measure(errand):
        print(json.dumps(line), flush=True)  # noqa: T201 - the process that started this one reads it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

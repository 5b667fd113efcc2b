"""The pre-flight of a node: what is looked at before its ranks start, and what follows from what was found. Pure.

`trainer.node.preflight_measures` measures. What cannot be measured is skipped and said; it never fails a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

MIB, GIB = 1 << 20, 1 << 30
Mode = Literal["off", "light", "quick", "full"]
MODES = ("off", "quick", "full")
"""What people may choose; ``light`` is what costs nothing, for nodes that share this machine."""
LIMIT_SECONDS: Mapping[str, float] = {"light": 10.0, "quick": 45.0, "full": 180.0}
"""Seconds after which the checks of a mode have hung, without a site's own."""
COMMAND_SECONDS = 60.0
"""Seconds that a site's own check may take."""
FREE_MEMORY_BYTES = 256 * MIB
"""Free memory for each rank below which none could load torch."""
FREE_DISK_BYTES, LITTLE_DISK_BYTES = 64 * MIB, 2 * GIB
"""Free space of a folder below which a node fails, and is warned of."""
SKEW_SECONDS, LITTLE_SKEW_SECONDS = 60.0, 2.0
"""Difference from the clock of the run directory's storage at which a node fails, and is warned of."""
SLOW_COPY_GB_PER_SECOND = 0.5
SLOW_PRODUCT_GFLOPS = 1.0
RETIRED_PAGES = 62
"""Retired pages of an old GPU from which on it is to be replaced, as AzureHPC's checks have it."""
XIDS = frozenset({48, 56, 57, 58, 62, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 119, 120})
"""Errors of NVIDIA's driver that stand for a broken GPU, as AzureHPC's checks have them, but for 63: it tells of a
remap that is pending, of which NVML's word counts."""
USED_SHARE, LITTLE_USED_BYTES = 0.5, GIB
"""The share of a GPU's memory that others hold for which a node fails, and the bytes for which it is warned of."""
FAIL_SHARE, WARN_SHARE = 0.7, 0.9
"""Shares of a GPU's usual speed below which it fails, and is warned of."""
USUAL_TFLOPS: Mapping[str, float] = {
    "NVIDIA A100-SXM4": 271,
    "NVIDIA A100-PCIE": 253,
    "NVIDIA A100 80GB PCIE": 253,
    "NVIDIA H100 80GB HBM3": 794,
    "NVIDIA GH200": 829,
}
"""Measured TFLOP/s of a bf16 matrix product, by the start of a GPU's name."""
USUAL_COPY_GB_PER_SECOND: Mapping[str, float] = {
    "TESLA V100-PCIE": 10,
    "NVIDIA A100": 21,
    "NVIDIA H100 80GB HBM3": 48,
    "NVIDIA H200": 48,
}
"""Measured GB/s of a copy from pinned memory of the host to the GPU, likewise."""
USUAL_PEER_GB_PER_SECOND: Mapping[str, float] = {"NVIDIA A100-SXM4": 238, "NVIDIA H100 80GB HBM3": 335}
"""Measured GB/s of a copy between two GPUs of a node, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A folder that a node writes to."""

    path: str
    free_bytes: int | None = None
    error: str = ""
    """Why no file could be written there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a GPU says of itself. None: it, or its driver, does not tell."""

    name: str = "GPU"
    bus: str = ""
    """Its PCI address, as `bus_of` gives it."""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    uncorrected_errors: int | None = None
    """Memory errors that could not be corrected since the driver was loaded."""
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    retired_pages: int | None = None
    throttled: tuple[str, ...] = ()
    """Why it runs slower than it could: heat, power."""
    tflops: float | None = None
    """Of a bf16 matrix product."""
    copy_gb_per_second: float | None = None
    peer_gb_per_second: float | None = None
    """To the next GPU of the node."""
    product_is_right: bool | None = None
    is_split: bool | None = None
    """Whether it is divided into instances (MIG), of which a node may have several."""
    pcie_width: int | None = None
    """Lanes in use under load."""
    pcie_most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A node that is there already."""

    address: str
    how: Literal["reached", "silent", "unreachable"]
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """The end of a site's own check."""

    code: int | None
    """None: it did not end in time."""
    last_line: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNeeds:
    """What a launch wants of a node."""

    ranks: int = 1
    gpus: int = 0
    """0: as many as there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found on a node. None: not looked at."""

    memory_bytes: int | None = None
    """Memory that may still be filled."""
    disks: tuple[Disk, ...] = ()
    skew_seconds: float | None = None
    """Its clock minus that of the run directory's storage."""
    product_is_right: bool | None = None
    product_gflops: float | None = None
    copy_gb_per_second: float | None = None
    gpus: tuple[Gpu, ...] | None = None
    driver_errors: tuple[str, ...] = ()
    """What keeps GPUs from being used: a driver that is not loaded, a GPU that is lost, one that does not compute."""
    xids: tuple[tuple[str, int], ...] = ()
    """The errors that the driver has written into the kernel's log within two hours: PCI address and number. Those of
    GPUs that other jobs have are among them."""
    peers: tuple[Peer, ...] = ()
    command: CommandEnd | None = None
    skipped: tuple[str, ...] = ()
    """What could not be looked at, and why."""
    hung: str = ""
    """The check that did not end in time, or was killed."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Measured:
        """Return what `trainer.node.preflight_measures` has printed, of JSON's types."""
        known: dict[str, Any] = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        known["xids"] = tuple((bus, xid) for bus, xid in found.get("xids", ()))
        for name, kind in (("disks", Disk), ("gpus", Gpu), ("peers", Peer)):
            if known.get(name) is not None:
                known[name] = tuple(_make(kind, item) for item in known[name])
        if known.get("command") is not None:
            known["command"] = _make(CommandEnd, known["command"])
        return cls(**{name: _frozen(each) for name, each in known.items()})


@dataclass(slots=True)
class Judgement:
    """What follows from what was found, in sentences."""

    failed: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        """Return what failed as one text; "" where nothing did."""
        return "; ".join(self.failed)


def read_setting(text: str) -> tuple[Mode, str]:
    """Return the mode and the site's own check of a setting as ``quick`` or ``full: /opt/check-node``; an empty one is
    ``quick``. Raise ValueError for another, with the remedy."""
    mode, _, command = text.partition(":")
    if (mode := mode.strip() or "quick") not in MODES:
        raise ValueError(
            f"the mode {mode!r} is not known: give {', '.join(MODES)}, and a command of your own after a colon, as in "
            "'quick: /opt/check-node'"
        )
    if mode == "off" and command.strip():
        raise ValueError("off runs no command: give quick in its place")
    return cast("Mode", mode), command.strip()


def judge_node(found: Measured, wanted: NodeNeeds) -> Judgement:
    """Return what of a node fails it, what is only warned of, and what was skipped. Pure."""
    judged = Judgement(skipped=list(found.skipped))
    fail, warn = judged.failed.append, judged.warned.append
    if found.hung:
        fail(f"the check of {found.hung} did not end: the machine or its driver hangs")
    least = FREE_MEMORY_BYTES * wanted.ranks
    if found.memory_bytes is not None and found.memory_bytes < least:
        free, needed = found.memory_bytes // MIB, least // MIB
        fail(f"{free} MiB of memory are free, of {needed} that {wanted.ranks} rank(s) need")
    for disk in found.disks:
        if disk.error:
            fail(f"{disk.path} cannot be written: {disk.error}")
        elif disk.free_bytes is not None and disk.free_bytes < FREE_DISK_BYTES:
            fail(f"{disk.path} has {disk.free_bytes // MIB} MiB free: make room there")
        elif disk.free_bytes is not None and disk.free_bytes < LITTLE_DISK_BYTES:
            warn(f"{disk.path} has only {disk.free_bytes // MIB} MiB free")
    if found.skew_seconds is not None and abs(found.skew_seconds) > LITTLE_SKEW_SECONDS:
        tell = fail if abs(found.skew_seconds) > SKEW_SECONDS else warn
        tell(f"its clock is {found.skew_seconds:+.1f} s off that of the run directory's storage: set both by NTP")
    if found.product_is_right is False:
        fail("a matrix product on the CPU was wrong")
    if found.product_gflops is not None and found.product_gflops < SLOW_PRODUCT_GFLOPS:
        warn(f"a matrix product on the CPU ran at {found.product_gflops:.2g} GFLOP/s")
    if found.copy_gb_per_second is not None and found.copy_gb_per_second < SLOW_COPY_GB_PER_SECOND:
        warn(f"memory was copied at {found.copy_gb_per_second:.2g} GB/s")
    _judge_gpus(found, wanted, judged)
    if found.peers and all(peer.how == "unreachable" for peer in found.peers):
        fail("; ".join(f"node at {peer.address} cannot be reached: {peer.error}" for peer in found.peers))
    else:
        for peer in found.peers:
            if peer.how != "reached":
                warn(f"node at {peer.address} does not answer: {peer.error}")
    if found.command is not None and found.command.code != 0:
        how = "did not end in time" if found.command.code is None else f"exit code {found.command.code}"
        fail(f"the site's own check: {found.command.last_line or how}")
    return judged


def _judge_gpus(found: Measured, wanted: NodeNeeds, judged: Judgement) -> None:
    fail, warn = judged.failed.append, judged.warned.append
    if found.gpus is None:
        return
    count = len(found.gpus)
    for error in found.driver_errors:  # a node may train on its CPUs
        (fail if count or wanted.gpus else judged.skipped.append)(error)
    is_split = any(gpu.is_split for gpu in found.gpus)
    if count < wanted.gpus and not is_split:
        fail(f"{count} of {wanted.gpus} GPUs are there")
    elif 0 < count < wanted.ranks and not is_split:
        warn(f"{count} GPUs are there for {wanted.ranks} ranks")
    for number, gpu in enumerate(found.gpus):
        name = f"GPU {number} ({gpu.name})"
        if broken := sorted({xid for bus, xid in found.xids if bus == gpu.bus} & XIDS):
            fail(f"{name}: XID {', '.join(map(str, broken))} within two hours")
        if gpu.uncorrected_errors:
            fail(f"{name}: {gpu.uncorrected_errors} uncorrected memory errors")
        if gpu.remap_failed:
            fail(f"{name}: a broken row of its memory could not be remapped")
        if gpu.remap_pending:
            warn(f"{name}: a row of its memory is remapped at the next reset")
        if (gpu.retired_pages or 0) >= RETIRED_PAGES:
            fail(f"{name}: {gpu.retired_pages} retired pages")
        if gpu.throttled:
            warn(f"{name}: slowed down by {', '.join(gpu.throttled)}")
        if gpu.used_bytes is not None and gpu.memory_bytes and not gpu.is_split:
            if gpu.used_bytes > USED_SHARE * gpu.memory_bytes:
                fail(f"{name}: others hold {gpu.used_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB")
            elif gpu.used_bytes > LITTLE_USED_BYTES:
                warn(f"{name}: others hold {gpu.used_bytes / GIB:.1f} GiB")
        if gpu.product_is_right is False:
            fail(f"{name}: a matrix product was wrong")
        if gpu.pcie_width is not None and gpu.pcie_most is not None and gpu.pcie_width < gpu.pcie_most:
            warn(f"{name}: {gpu.pcie_width} of {gpu.pcie_most} PCIe lanes under load")
        for rate, table, unit in (
            (gpu.tflops, USUAL_TFLOPS, "TFLOP/s in a matrix product"),
            (gpu.copy_gb_per_second, USUAL_COPY_GB_PER_SECOND, "GB/s from the host"),
            (gpu.peer_gb_per_second, USUAL_PEER_GB_PER_SECOND, "GB/s to the next GPU"),
        ):
            usual = usual_of(gpu.name, table)
            if rate is None:
                continue
            if usual is None:
                judged.skipped.append(f"{name}: {rate:.0f} {unit}, and no figure to compare with")
            elif rate < WARN_SHARE * usual:
                tell = fail if rate < FAIL_SHARE * usual else warn
                tell(f"{name}: {rate:.0f} {unit}, usually {usual:.0f}")


def bus_of(text: str) -> str:
    """Return a PCI address as ``0000:3b:00``, from NVML's ``00000000:3B:00.0`` or the kernel's ``0000:3b:00``."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def usual_of(name: str, table: Mapping[str, float]) -> float | None:
    """Return the figure of a GPU with this name, of the longest entry that it begins with; None where none does."""
    entries = [entry for entry in table if name.upper().startswith(entry.upper())]
    return table[max(entries, key=len)] if entries else None


def _make(kind: type, item: Mapping[str, Any]) -> Any:
    return kind(**{each.name: _frozen(item[each.name]) for each in fields(kind) if each.name in item})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

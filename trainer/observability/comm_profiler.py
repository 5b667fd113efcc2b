"""`CommunicationProfiler`: the time that communication costs, apart from waiting for slower ranks.

A rank that waits for a slow one looks, to itself, as if its network were slow. Yet all ranks leave a sum at about the
same time, so the one that came last has not waited: the time that it spent there is the network's. Hence, in each step,

    communication   exposed communication of the rank that has least of it (see `trainer.runtime.step_timer` for
                    exposed)
    waiting         what another rank has more than that
    lateness        of a rank: what the rank that waits longest has more than this one

and the same for each collective by itself. The minimum is one of a step, then means are taken over steps: a minimum of
means would be too large where ranks take turns in being late. Every rank measures with its own clock only.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.comm.group import Collective
from trainer.comm.world import World
from trainer.performance.link import bytes_carried
from trainer.runtime.cores import available_cores, machine_number
from trainer.runtime.packages import load
from trainer.runtime.step_timer import SEGMENTS, Mark, StepTimer, computed_at, durations, moments

FIELDS = (*SEGMENTS, "samples")
MOST_STEPS = 1000
"""The most steps in a window: of a longer one, only the last are measured."""
EAGER_WINDOWS, WINDOW_SECONDS = 20, 1.0
"""The first windows of a world, this many, end with the next report; later ones last at least the second, in seconds,
because the cost of a window does not grow with its steps."""
PROBE_SHARE = 0.1
"""The exposed communication time, as a share of a step's, above which links are probed one by one."""
PROBE_EVERY, PROBE_REST, PROBE_WINDOWS = 200, 1000, 3
"""The least steps between two probes; how many times as long as the probe they last at least; and the windows whose
mean decides."""
LINK_PROBE = "trainer.observability.link_probe:time_links"
DIGITS = 7


@dataclass(frozen=True, slots=True)
class TimingWindow:
    """The measurements of all ranks in the steps since the last exchange, of these the last `MOST_STEPS`; the same on
    every rank."""

    values: NDArray[np.float64]
    """(ranks, steps, fields), seconds: `FIELDS`, then for each collective its own duration and the part of it that the
    backward computation hid; NaN in a step that had no such collective."""
    collectives: tuple[tuple[str, int], ...] = ()
    """(name, bytes)"""
    totals: tuple[float, ...] = ()
    """The sums over ranks of the values that were given."""
    hosts: tuple[tuple[int, int], ...] = ()
    """Of each rank: its machine, numbered in order of appearance, and the cores that it may use; empty: not known."""

    def field(self, name: str) -> NDArray[np.float64]:
        """Return the values of a field, (ranks, steps)."""
        return self.values[:, :, FIELDS.index(name)]

    @property
    def network(self) -> NDArray[np.float64]:
        """Exposed communication of each step (steps,), without waiting; a single rank has none."""
        exposed = self.field("exposed")
        return exposed.min(axis=0) if len(exposed) > 1 else np.zeros(exposed.shape[1])

    @property
    def seconds(self) -> float:
        """Mean time of a step."""
        return float(self.values[:, :, : len(SEGMENTS)].sum(axis=2).mean())


class CommunicationProfiler:
    """Collects what each step of this rank took, in one world; a new world has a new one.

    The times of collectives are those of `trainer.comm.group.InterruptibleGroup.collectives`; those of a GPU are read
    at the end of a window.
    """

    def __init__(self, world: World, timer: StepTimer, probe_at: int = 0) -> None:
        """``probe_at``: steps to be done before links are probed; the same on all ranks."""
        self.world, self.timer, self.probe_at = world, timer, probe_at
        self._steps: deque[tuple[list[Mark], list[Collective], int]] = deque(maxlen=MOST_STEPS)
        self._windows, self._due_at = 0, 0
        self._shares: deque[float] = deque(maxlen=PROBE_WINDOWS)
        self._step_seconds = 0.0
        self._host = machine_number(), available_cores()
        timer.drop()

    def add(self, samples: int) -> None:
        """Add a completed step with ``samples`` samples on this rank."""
        if self.timer.enabled:
            marks = self.timer.take()
            self._steps.append((marks, self._collectives_of(marks), samples))

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return whether ranks exchange their measurements now. After the same steps all ranks answer the same."""
        return self.timer.enabled and (is_last or self._windows < EAGER_WINDOWS or step >= self._due_at)

    def exchange(self, step: int, totals: Sequence[float] = ()) -> TimingWindow:
        """Return the steps since the last call, of all ranks, and sums over ranks of ``totals``. One collective."""
        if self.world.group is not None:
            self.world.group.settle([item for _, collectives, _ in self._steps for item in collectives])
        sizes: dict[str, int] = {}
        for _, collectives, _ in self._steps:
            sizes |= {name_of(item.what): item.bytes for item in collectives}
        names = list(sizes)
        size, given = self.world.world_size, len(totals)
        shape = (size, len(self._steps), len(FIELDS) + 2 * len(names))
        numbers = np.zeros(given + 2 * size + math.prod(shape))
        hosts = numbers[given : given + 2 * size].reshape(size, 2)
        numbers[:given], values = totals, numbers[given + 2 * size :].reshape(shape)
        hosts[self.world.rank] = self._host
        values[self.world.rank] = [row_of(*step, names) for step in self._steps]
        self._steps.clear()
        self.world.all_reduce(torch.from_numpy(numbers))
        window = TimingWindow(values, tuple(sizes.items()), tuple(numbers[:given].tolist()), hosts_of(hosts.tolist()))
        self._step_seconds = max(window.seconds, 1e-9)
        self._windows += 1
        self._due_at = step + min(MOST_STEPS, math.ceil(WINDOW_SECONDS / self._step_seconds))
        self._shares.append(float(window.network.mean()) / self._step_seconds)
        return window

    def report(
        self, window: TimingWindow, samples_at_once: int, micro_batches: int, parameters_bytes: int
    ) -> dict[str, Any]:
        """Return the fields of the ``timing`` event of a window, of this world and of its work. To be called between
        two steps: on a GPU, what this process holds there then is told as ``held_bytes``.

        ``samples_at_once``: the most samples that this rank puts through its model at once. ``micro_batches``: of a
        step, over all ranks. ``parameters_bytes``: the size of the parameters that are trained.
        """
        return {
            **summarize_window(window, self.world.topology),
            "topology": "star" if self.world.topology == "star" else "all-reduce",
            "backend": self.world.backend,
            "device": self.world.device.type,
            "local_samples_per_micro_batch": samples_at_once,
            "micro_batches": micro_batches,
            "parameters_bytes": parameters_bytes,
            **self._held(),
        }

    def _held(self) -> dict[str, int]:
        device = self.world.device
        return {"held_bytes": torch.cuda.memory_allocated(device)} if device.type == "cuda" else {}

    def probe(self, step: int) -> dict[str, Any] | None:
        """Probe the links at the end of a window, if that is due; return a ``link`` event's fields, or None. A
        collective.

        All ranks decide alike, because all have the same windows. Nothing is done in parameter-server mode, where all
        data goes through one host anyway, nor with NCCL, which takes other ways than gloo's messages.
        """
        if self.world.topology == "star" or self.world.backend != "gloo":
            return None
        if not is_probe_due(self._shares, step, self.probe_at):
            return None
        assert self.world.group is not None
        self.probe_at = step + PROBE_EVERY  # where the probe fails too
        look = partial(load(LINK_PROBE), rank=self.world.rank, size=self.world.world_size)
        bytes_, seconds, took = self.world.group.run("probe of the links", look)
        self.probe_at = next_probe(step, took, self._step_seconds)
        return {
            "step": step,
            "bytes": bytes_,
            "seconds": [[*link, round(value, DIGITS)] for link, value in seconds.items()],
            "reason": f"exposed communication takes {np.mean(self._shares):.0%} of a step",
        }

    def _collectives_of(self, marks: Sequence[Mark]) -> list[Collective]:
        """Return the collectives of a step: those submitted after its batch was there."""
        if self.world.group is None:
            return []
        began = math.inf
        for mark in marks:
            if mark.segment == "input":
                began = mark.at
        found: list[Collective] = []
        for item in reversed(self.world.group.collectives):
            if item.submitted < began:
                break
            found.insert(0, item)
        return found


@lru_cache(maxsize=4096)
def name_of(what: str) -> str:
    """Return a collective's name in events: ``bucket 0``, ``commit``, else what it does."""
    found = re.search(r"\b(bucket \d+|commit)\b", what)
    return found[0] if found else what


def row_of(marks: Sequence[Mark], collectives: Sequence[Collective], samples: int, names: Sequence[str]) -> list[float]:
    """Return one step of one rank, as in `TimingWindow.values`; ``names``: of the window's collectives."""
    when = moments(marks)
    computed = computed_at(marks, when)
    own: dict[str, tuple[float, float]] = {}
    for item in collectives:
        assert item.began is not None
        assert item.ended is not None
        hidden = max(0.0, min(item.ended, computed) - item.began - item.computing)
        own[name_of(item.what)] = item.ended - item.began - item.computing, hidden
    nothing = (np.nan, np.nan)
    pairs = [value for name in names for value in own.get(name, nothing)]
    return [*durations(marks, when).values(), samples, *pairs]


def hosts_of(rows: Sequence[Sequence[float]]) -> tuple[tuple[int, int], ...]:
    """Return (machine, cores) of each rank, with machines numbered from 0 in order of appearance. ``rows``: the same
    with `trainer.runtime.cores.machine_number`."""
    places: dict[float, int] = {}
    return tuple((places.setdefault(machine, len(places)), int(cores)) for machine, cores in rows)


def summarize_window(window: TimingWindow, topology: str) -> dict[str, Any]:
    """Return the figures of each rank in a window, as the ``timing`` event has them."""
    exposed, network = window.field("exposed"), window.network
    means = dict(zip(FIELDS, window.values.mean(axis=1).T, strict=False))
    alone, own = len(exposed) == 1, means.pop("exposed")
    communication = np.full_like(own, network.mean())
    segments: dict[str, Any] = {name: means[name] for name in SEGMENTS if name != "exposed"}
    segments |= {"communication": communication, "waiting": np.zeros_like(own) if alone else own - communication}
    if alone:
        segments["other"] = segments["other"] + own  # nobody to talk to: what is left is bookkeeping
    compute = window.field("forward") + window.field("backward") + window.field("optimizer")
    rows = {"input": window.field("input"), "compute": compute, "late": exposed.max(axis=0) - exposed}
    shared: dict[str, Any] = {}
    if window.hosts:
        machines, cores = zip(*window.hosts, strict=True)
        shared = {"machines": list(machines), "cores": list(cores)}
    medians = np.median(list(rows.values()), axis=2)
    return {
        "steps": exposed.shape[1],
        "seconds": round(window.seconds, DIGITS),
        "samples": [int(value) for value in window.field("samples").sum(axis=1)],
        "segments": dict(zip(segments, rounded(np.stack(list(segments.values()))), strict=True)),
        "typical": dict(zip(rows, rounded(medians), strict=True)),
        **shared,
        "collectives": collectives_of(window, topology),
    }


def collectives_of(window: TimingWindow, topology: str) -> list[dict[str, Any]]:
    """Return each collective over the steps that had it. Its bandwidth is that of the bus: what each rank's link
    carries in an all-reduce, 2 (W - 1) / W of the data, for each second on the network. Through one host that is no
    measure of a link."""
    own, hidden = window.values[:, :, len(FIELDS) :: 2], window.values[:, :, len(FIELDS) + 1 :: 2]
    network_times = own.min(axis=0)
    had = ~np.isnan(network_times)
    counts = had.sum(axis=0)
    network = np.where(had, network_times, 0.0).sum(axis=0) / counts
    waiting = np.where(had, own - network_times, 0.0).sum(axis=1) / counts
    overlapped = np.where(had, hidden, 0.0).sum(axis=1) / counts
    carried = bytes_carried(len(own))
    return [
        {
            "name": name,
            "bytes": bytes_,
            "wire_seconds": seconds,
            "waiting_seconds": waited,
            "overlapped_seconds": covered,
            "bandwidth_bytes_per_second": round(carried * bytes_ / seconds) if seconds and topology != "star" else None,
        }
        for (name, bytes_), seconds, waited, covered in zip(
            window.collectives, rounded(network), rounded(waiting.T), rounded(overlapped.T), strict=True
        )
    ]


def is_probe_due(shares: Sequence[float], step: int, probe_at: int) -> bool:
    """Return whether the links should be probed. ``shares``: exposed communication of the latest windows, as a share of
    a step's time."""
    return len(shares) == PROBE_WINDOWS and step >= probe_at and sum(shares) / len(shares) > PROBE_SHARE


def next_probe(step: int, took: float, step_seconds: float) -> int:
    """Return the step before which there is no other probe, after one that took ``took`` seconds."""
    return step + max(PROBE_EVERY, math.ceil(PROBE_REST * took / step_seconds))


def rounded(seconds: NDArray[np.float64]) -> list[Any]:
    """Return seconds to a tenth of a microsecond: events are read over and over."""
    return seconds.round(DIGITS).tolist()

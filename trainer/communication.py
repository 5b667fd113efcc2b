"""`CommunicationProfiler`: what communication costs, told apart from waiting for slower ranks (F4, R3.2).

A rank that waits for a slow one looks, to itself, as if its network were slow. Yet all ranks leave a sum at about the
same time, so the one that came last has waited for nobody: what it spent there is the wire's time. Hence, in each step,

    communication   exposed communication of the rank that has least of it (see `trainer.timing` for «exposed»)
    waiting         what another rank has more than that
    lateness        of a rank: what the rank that waits longest has more than this one

and the same for each collective by itself. The minimum is one of a step, then means are taken over steps: a minimum of
means would be too large where ranks take turns in being late. Every rank measures with its own clock only.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.group import Collective, GroupError, TorchTransport, Transport
from trainer.timing import SEGMENTS, Mark, StepTimer, computed_at, durations, moments
from trainer.world import World

FIELDS = (*SEGMENTS, "loss_sum", "samples")
PROBE_SHARE = 0.2
"""Exposed wire time, as a share of a step's, above which links are looked at one by one."""
PROBE_EVERY, PROBE_WINDOWS = 200, 3
"""Steps between two probes at least, and the windows whose mean decides."""
PROBE_BYTES, PROBE_SECONDS = 1 << 20, 2.0


@dataclass(frozen=True, slots=True)
class Window:
    """What all ranks measured in the steps since the last report; the same on every rank."""

    values: NDArray[np.float64]
    """(ranks, steps, fields), seconds: `FIELDS`, then for each collective its own duration and the part of it that the
    backward computation hid; NaN in a step that had no such collective."""
    collectives: tuple[tuple[str, int], ...] = ()
    """(name, bytes)"""

    def field(self, name: str) -> NDArray[np.float64]:
        """(ranks, steps)"""
        return self.values[:, :, FIELDS.index(name)]

    @property
    def wire(self) -> NDArray[np.float64]:
        """Exposed communication of each step (steps,), without waiting; a single rank has none."""
        exposed = self.field("exposed")
        return exposed.min(axis=0) if len(exposed) > 1 else np.zeros(exposed.shape[1])

    @property
    def seconds(self) -> float:
        """Mean time of a step."""
        return float(self.values[:, :, : len(SEGMENTS)].sum(axis=2).mean())


class CommunicationProfiler:
    """Collects what each step of this rank took, in one world; a new world has a new one.

    The times of collectives are those of `trainer.group.Group.collectives`. On GPUs the communication thread waits for
    the device, so that they are the collectives' own there too.
    """

    def __init__(self, world: World, timer: StepTimer) -> None:
        self.world, self.timer = world, timer
        self._steps: list[tuple[list[Mark], list[Collective], float, int]] = []
        self._shares: deque[float] = deque(maxlen=PROBE_WINDOWS)
        self._probed_at: int | None = None
        self._bandwidth: float | None = None
        timer.drop()

    def add(self, loss_sum: float, samples: int) -> None:
        """A step is done. ``loss_sum`` and ``samples`` are this rank's."""
        if self.timer.enabled:
            marks = self.timer.take()
            self._steps.append((marks, self._collectives_of(marks), loss_sum, samples))

    def exchange(self) -> Window:
        """The steps since the last call, of all ranks: one collective."""
        steps, self._steps = self._steps, []
        sizes: dict[str, int] = {}
        for _, collectives, _, _ in steps:
            sizes |= {name_of(item.what): item.bytes for item in collectives}
        names = list(sizes)
        values = np.zeros((self.world.world_size, len(steps), len(FIELDS) + 2 * len(names)))
        values[self.world.rank] = [row_of(*step, names) for step in steps]
        self.world.sum(torch.from_numpy(values))
        window = Window(values, tuple(sizes.items()))
        self._shares.append(float(window.wire.mean()) / max(window.seconds, 1e-9))
        self._bandwidth = bandwidth_of(window, self.world.topology)
        return window

    def report(self, window: Window) -> dict[str, Any]:
        """What a ``timing`` event says of a window and of this world."""
        return {
            **summary(window, self.world.topology),
            "topology": "star" if self.world.topology == "star" else "all-reduce",
            "backend": self.world.backend,
            "device": self.world.device.type,
        }

    def probe(self, step: int) -> dict[str, Any] | None:
        """At the end of a window: a ``link`` event's fields, where the links are worth a look; a collective then.

        All ranks decide alike, for all have the same windows. In parameter-server mode there is one host to look at
        whatever the links are, and nothing is done."""
        if self.world.topology == "star" or not is_probe_due(self._shares, step, self._probed_at):
            return None
        assert self.world.group is not None
        self._probed_at = step
        size = self.world.world_size
        bytes_ = probe_bytes(self._bandwidth, len(links(size)))
        look = partial(time_links, rank=self.world.rank, size=size, bytes_=bytes_)
        seconds = self.world.group.run("probe of the links", look)
        return {
            "step": step,
            "bytes": bytes_,
            "seconds": [[*link, rounded(value)] for link, value in zip(links(size), seconds, strict=True)],
            "reason": f"exposed communication takes {np.mean(self._shares):.0%} of a step",
        }

    def _collectives_of(self, marks: Sequence[Mark]) -> list[Collective]:
        """Those of a step: what was submitted after its batch was there."""
        if self.world.group is None:
            return []
        began = max(mark.at for mark in marks if mark.segment == "input")
        found: list[Collective] = []
        for item in reversed(self.world.group.collectives):
            if item.submitted < began:
                break
            found.insert(0, item)
        return found


def name_of(what: str) -> str:
    """A collective's name in events: «bucket 0», «commit», else what it does."""
    found = re.search(r"\b(bucket \d+|commit)\b", what)
    return found[0] if found else what


def row_of(
    marks: Sequence[Mark], collectives: Sequence[Collective], loss_sum: float, samples: int, names: Sequence[str]
) -> list[float]:
    """One step of one rank, as in `Window.values`; ``names``: of the window's collectives."""
    when = moments(marks)
    computed = computed_at(marks, when)
    own: dict[str, tuple[float, float]] = {}
    for item in collectives:
        assert item.began is not None
        assert item.ended is not None
        hidden = max(0.0, min(item.ended, computed) - item.began)
        own[name_of(item.what)] = item.ended - item.began, hidden
    nothing = (np.nan, np.nan)
    pairs = [value for name in names for value in own.get(name, nothing)]
    return [*durations(marks, when).values(), loss_sum, samples, *pairs]


def summary(window: Window, topology: str) -> dict[str, Any]:
    """What a window says of each rank: the ``timing`` event's figures."""
    exposed, wire = window.field("exposed"), window.wire
    segments: dict[str, Any] = {name: window.field(name) for name in SEGMENTS if name != "exposed"}
    segments["communication"] = np.broadcast_to(wire, exposed.shape)
    segments["waiting"] = exposed - wire if len(exposed) > 1 else np.zeros_like(exposed)
    if len(exposed) == 1:
        segments["other"] = segments["other"] + exposed  # nobody to talk to: what is left is bookkeeping
    typical = {
        "input": segments["input"],
        "compute": segments["forward"] + segments["backward"] + segments["optimizer"],
        "late": exposed.max(axis=0) - exposed,
    }
    return {
        "steps": exposed.shape[1],
        "seconds": rounded(window.seconds),
        "samples": [int(value) for value in window.field("samples").sum(axis=1)],
        "segments": {name: _listed(values.mean(axis=1)) for name, values in segments.items()},
        "typical": {name: _listed(np.median(values, axis=1)) for name, values in typical.items()},
        "collectives": [_collective(window, number, topology) for number in range(len(window.collectives))],
    }


def bandwidth_of(window: Window, topology: str) -> float | None:
    """Bytes per second of the window's largest all-reduce; None where there is none."""
    if not window.collectives:
        return None
    largest = max(range(len(window.collectives)), key=lambda number: window.collectives[number][1])
    return _collective(window, largest, topology)["bandwidth_bytes_per_second"]


def _collective(window: Window, number: int, topology: str) -> dict[str, Any]:
    """One collective over the steps that had it. Its bandwidth is that of the bus: what each rank's link carries in an
    all-reduce, 2 (W - 1) / W of the data, for each second of wire. Through one host that is no measure of a link."""
    name, bytes_ = window.collectives[number]
    at = len(FIELDS) + 2 * number
    own, hidden = window.values[:, :, at], window.values[:, :, at + 1]
    had = ~np.isnan(own[0])
    own, hidden = own[:, had], hidden[:, had]
    wire = own.min(axis=0)
    size, seconds = len(own), float(wire.mean())
    carried = 2 * (size - 1) / size * bytes_
    return {
        "name": name,
        "bytes": bytes_,
        "wire_seconds": rounded(seconds),
        "waiting_seconds": _listed((own - wire).mean(axis=1)),
        "overlapped_seconds": _listed(hidden.mean(axis=1)),
        "bandwidth_bytes_per_second": round(carried / seconds) if seconds > 0 and topology != "star" else None,
    }


def is_probe_due(shares: Sequence[float], step: int, probed_at: int | None) -> bool:
    """Are the links worth a look? ``shares``: exposed wire time of the latest windows, as a share of a step's."""
    if len(shares) < PROBE_WINDOWS or (probed_at is not None and step - probed_at < PROBE_EVERY):
        return False
    return sum(shares) / len(shares) > PROBE_SHARE


def links(size: int) -> list[tuple[int, int]]:
    """(from, to) of the links to probe: around the ring, and between every other rank."""
    return [(rank, (rank + offset) % size) for offset in (1, 2)[: size - 1] for rank in range(size)]


def probe_bytes(bandwidth: float | None, transfers: int) -> int:
    """How much to send over each link, so that all of them take `PROBE_SECONDS` at most. An all-reduce is as fast as
    the slowest link in it, so ``bandwidth`` is on the safe side."""
    if bandwidth is None:
        return 1 << 14
    return max(1 << 12, min(PROBE_BYTES, int(bandwidth * PROBE_SECONDS / transfers)))


def time_links(transport: Transport, rank: int, size: int, bytes_: int) -> list[float]:
    """Seconds that so many bytes and a short answer take over each of the `links`, one after the other."""
    if not isinstance(transport, TorchTransport):
        raise GroupError("links can be probed in a group of torch's only")
    seconds = torch.zeros(len(links(size)), dtype=torch.float64)
    data, word = torch.zeros(bytes_, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for number, (source, target) in enumerate(links(size)):
        transport.sum(torch.zeros(1))  # nobody else is talking
        if rank == source:
            for message in (word, data):  # the word first, so that both are there when the clock starts
                began = time.monotonic()
                transport.send(message, target)
                transport.receive(word, target)
                seconds[number] = time.monotonic() - began
        elif rank == target:
            for message in (word, data):
                transport.receive(message, source)
                transport.send(word, source)
    transport.sum(seconds)
    return seconds.tolist()


def rounded(seconds: float) -> float:
    """To a tenth of a microsecond: events are read over and over."""
    return round(float(seconds), 7)


def _listed(seconds: NDArray[np.float64]) -> list[float]:
    return [rounded(value) for value in seconds]

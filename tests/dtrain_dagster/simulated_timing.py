"""Events of trainings that never ran: steps with log-normal noise and outliers, and one cause planted in them.

The arithmetic is that of the definitions: ranks begin a step together, whoever arrives last at the collectives makes
the others wait, and minima over ranks are taken step by step before anything is averaged.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import Any

LATENCY, SECONDS_PER_BYTE = 0.0004, 1 / 1.2e9
STEPS_PER_WINDOW = 10


@dataclass(kw_only=True)
class Simulation:
    """A job. Seconds are per step."""

    ranks: int = 3
    windows: int = 20
    seed: int = 0
    computing: float = 0.1
    """Of one rank with an even share of the samples."""
    noise: float = 0.05
    """Standard deviation of the logarithm of a rank's times; a third of it is common to all ranks."""
    outliers: float = 0.01
    """Chance that a rank's step takes two to six times as long."""
    buckets: tuple[int, ...] = (1_000_000, 1_000_000)
    latency: float = LATENCY
    input: float = 0.0005
    optimizer: float = 0.004
    late_compute: dict[int, float] = field(default_factory=dict)
    late_input: dict[int, float] = field(default_factory=dict)
    since: int = 0
    """First window in which somebody is late."""
    pauses_only: bool = False
    """The lateness of ten steps comes in one of them."""
    micro_batches: tuple[int, ...] | None = None
    """Of each rank; None: two each."""
    slow_link_of: int | None = None
    save_every: int = 0
    """Steps; 0: never. A save holds rank 0 up and is written during the next ten steps."""
    stall: float = 0.0
    cores: int = 0
    """Of the one machine of all ranks; 0: the trainer is an older one that tells nothing of cores."""

    def events(self) -> list[dict[str, Any]]:
        chance = random.Random(self.seed)
        clock, events, writing_until = 1_000_000.0, [], -1
        for window in range(self.windows):
            rows = []
            for place in range(STEPS_PER_WINDOW):
                step = window * STEPS_PER_WINDOW + place
                saves = bool(self.save_every) and step > 0 and step % self.save_every == 0
                if saves:
                    writing_until = step + STEPS_PER_WINDOW
                    began = clock
                row = self._step(chance, window, place, saves)
                clock += sum(row["segments"][name][0] for name in row["segments"])
                rows.append(row)
                if step == writing_until - 1:
                    events.append(
                        {"kind": "checkpoint", "time": clock, "rank": 0, "generation": 1, "step": step,
                         "seconds": clock - began, "stall_seconds": self.stall}
                    )  # fmt: skip
            events.append(self._window(rows, (window + 1) * STEPS_PER_WINDOW, clock))
        if self.slow_link_of is not None:
            pairs = [(a, b) for a in range(self.ranks) for b in range(self.ranks) if a != b]
            seconds = [
                [a, b, 0.004 * (5.0 if self.slow_link_of in (a, b) else 1.0) * chance.lognormvariate(0, self.noise)]
                for a, b in pairs
            ]
            link = {"kind": "link", "rank": 0, "generation": 1, "step": 50, "bytes": 4_000_000, "seconds": seconds}
            events.append(
                link | {"time": events[len(events) // 2]["time"], "reason": "exposed communication above 20 %"}
            )
        return sorted(events, key=lambda event: event["time"])

    def _step(self, chance: random.Random, window: int, place: int, saves: bool) -> dict[str, Any]:
        common = chance.lognormvariate(0, self.noise / 3)
        dealt = self.micro_batches or (2,) * self.ranks
        segments: dict[str, list[float]] = {name: [] for name in ("input", "forward", "backward", "optimizer")}
        for rank in range(self.ranks):
            own = common * chance.lognormvariate(0, self.noise)
            own *= chance.uniform(2, 6) if chance.random() < self.outliers else 1.0
            late = window >= self.since
            times = STEPS_PER_WINDOW * (place == 4) if self.pauses_only else 1
            seconds = self.computing * dealt[rank] / 2 * own
            segments["forward"].append(0.35 * seconds)
            segments["backward"].append(0.65 * seconds + late * times * self.late_compute.get(rank, 0.0))
            waits = late * times * self.late_input.get(rank, 0.0)
            segments["input"].append(self.input * chance.lognormvariate(0, 0.5) + waits)
            segments["optimizer"].append(self.optimizer * chance.lognormvariate(0, self.noise))
        segments["checkpoint"] = [self.stall if saves and rank == 0 else 0.0 for rank in range(self.ranks)]
        sizes = [*self.buckets, 48]
        network_times = [
            (self.latency + size * SECONDS_PER_BYTE) * chance.lognormvariate(0, self.noise)
            * (5.0 if self.slow_link_of is not None else 1.0)
            for size in sizes
        ]  # fmt: skip
        # All but the last bucket and the commit are hidden as far as the backward pass lasts.
        hidden = min(sum(network_times[:-2]), 0.5 * min(segments["backward"]))
        network = sum(network_times) - hidden
        arrivals = [sum(values) for values in zip(*segments.values(), strict=True)]
        exposed = [max(arrivals) - own + network * chance.lognormvariate(0, 0.02) for own in arrivals]
        segments["communication"] = [min(exposed)] * self.ranks
        segments["waiting"] = [value - min(exposed) for value in exposed]
        segments["other"] = [0.0002] * self.ranks
        late_by = [max(exposed) - value for value in exposed]
        return {
            "segments": segments, "late": late_by, "network_times": network_times, "hidden": hidden, "sizes": sizes
        }  # fmt: skip

    def _window(self, rows: list[dict[str, Any]], step: int, clock: float) -> dict[str, Any]:
        def over_steps(how: Any, values: Any) -> list[float]:
            return [how(values(row, rank) for row in rows) for rank in range(self.ranks)]

        names = list(rows[0]["segments"])
        segments = {
            name: over_steps(statistics.fmean, lambda row, rank, name=name: row["segments"][name][rank])
            for name in names
        }
        typical = {
            "input": over_steps(statistics.median, lambda row, rank: row["segments"]["input"][rank]),
            "compute": over_steps(
                statistics.median,
                lambda row, rank: sum(row["segments"][name][rank] for name in ("forward", "backward", "optimizer")),
            ),
            "late": over_steps(statistics.median, lambda row, rank: row["late"][rank]),
        }
        shared: dict[str, Any] = {}
        if self.cores:
            shared = {"machines": [0] * self.ranks, "cores": [self.cores] * self.ranks}
        labels = [f"bucket {place}" for place in range(len(self.buckets))] + ["commit"]
        dealt = self.micro_batches or (2,) * self.ranks
        waiting = segments["waiting"]
        collectives = []
        for place, (label, size) in enumerate(zip(labels, rows[0]["sizes"], strict=True)):
            network = statistics.fmean(row["network_times"][place] for row in rows)
            can_hide = sum(
                statistics.fmean(row["network_times"][number] for row in rows) for number in range(len(labels) - 2)
            )
            hides = place < len(self.buckets) - 1
            part = statistics.fmean(row["hidden"] for row in rows) / can_hide if hides else 0.0
            waits = [value / len(labels) for value in waiting]
            collectives.append({
                "name": label, "bytes": size, "wire_seconds": network, "waiting_seconds": waits,
                "overlapped_seconds": [(network + wait) * part for wait in waits],
                "bandwidth_bytes_per_second": 2 * (self.ranks - 1) / self.ranks * size / network,
            })  # fmt: skip
        return {
            "kind": "timing", "time": clock, "rank": 0, "generation": 1, "step": step, "steps": STEPS_PER_WINDOW,
            "seconds": statistics.fmean(sum(values[0] for values in row["segments"].values()) for row in rows),
            "nodes": list(range(10, 10 + self.ranks)), "samples": [128 * STEPS_PER_WINDOW * count for count in dealt],
            "segments": segments, "typical": typical, "collectives": collectives, "topology": "all-reduce",
            "backend": "gloo", "device": "cpu", "local_samples_per_micro_batch": 128,
            "micro_batches": sum(dealt), "parameters_bytes": sum(self.buckets), **shared,
        }  # fmt: skip

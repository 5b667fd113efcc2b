"""The diagnosis of a slow training: from its events to one cause, its cost, and the evidence in a sentence. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dtrain_dagster.monitoring.hangs import hang_verdict, unresolved
from dtrain_dagster.monitoring.stragglers import (
    FEWEST_WINDOWS,
    LATE_SHARE,
    Straggler,
    dealt_seconds,
    stragglers,
)
from dtrain_dagster.monitoring.windows import (
    COMMUNICATION_LIMIT,
    collective_link,
    exceeds_limit,
    is_steadily_above,
    latency_share,
    ranks_that_share_cores,
    seconds_of,
    settled,
    shares,
    shares_by_window,
    typical_collectives,
    typical_share,
    windows,
    worlds,
)
from trainer.documents.events import CheckpointEvent, LinkEvent, OutOfMemoryEvent, TimingEvent, read_events
from trainer.performance.link import bytes_carried

INPUT_SHARE = 0.05
"""Share of the step, on all ranks, from which input counts. Batches are gathered while the step before computes: input
costs next to nothing."""
CHECKPOINT_SHARE = 0.02
"""Share of training time from which saves count."""
LATENCY_BOUND = 2 / 3
"""Share of latency from which communication is a matter of small batches. Below, fewer bytes help as well; and where
cores are missing, threads that wait for one look like latency, up to 0.6 of 24 ms of bytes beside half a core of other
work."""
FIXED_SHARE = 0.16
"""Share of the step that does not depend on its samples, from which it counts. The stock model at its default batch has
a tenth, on a CPU."""
TAKING_TURNS = 0.10
"""Share of training time from which waiting is mentioned though no rank is to blame."""
SLOW_LINK = 2.0
"""Time of a link relative to the others from which it is slow."""
LINK_EXPLAINS = 0.08
"""Share of the exposed communication time that a step's gradients must take over a slow link for the link to be the
cause."""


class SlowdownCause(StrEnum):
    """The cause of a slow training."""

    HEALTHY = "healthy"
    HANG = "hang"
    SLOW_COMPUTE = "slow compute"
    SLOW_INPUT = "slow input"
    SLOW_RANK = "slow rank"
    """A rank is late for another reason than input and computation."""
    INPUT = "input slow on all ranks"
    UNEVEN = "work divided unevenly"
    SLOW_LINK = "slow link"
    COMMUNICATION = "communication-bound"
    SMALL_BATCHES = "small batches"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"
    CROWDED = "ranks share cores"
    """Ranks are more than the cores of their machine."""
    UNKNOWN = "unknown"
    """The records do not tell: no timing was recorded, or hardly any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """One cause, its place, its cost and its evidence."""

    cause: SlowdownCause
    share: float
    """Share of training time that it costs, or an upper bound of what can be won back."""
    evidence: str
    """One sentence, with figures."""
    rank: int | None = None
    node_id: int | None = None
    since_step: int | None = None
    """First step affected within the run; None: from the start."""
    also: tuple[Diagnosis, ...] = ()
    """Other diagnoses, the costliest first."""

    @property
    def where(self) -> str:
        """Return the cause and its place: ``slow compute on rank 1 (node 1)``."""
        place = f" of rank {self.rank}" if self.cause is SlowdownCause.HANG else f" on rank {self.rank}"
        return str(self.cause) if self.rank is None else f"{self.cause}{place} (node {self.node_id})"


def diagnose(events: Iterable[Mapping[str, Any]]) -> Diagnosis:
    """Return the cause that costs most, with the others. A hang comes before everything: it costs all the time."""
    events = list(events)
    found = settled(windows(events))
    total = seconds_of(found)
    causes: dict[tuple[SlowdownCause, int | None], Diagnosis] = {}
    for world in worlds(found):
        weight = seconds_of(world) / total
        for item in _of_world(world, events):
            key = (item.cause, item.node_id)
            known = causes.get(key)  # of the world that trained longest: it has the better evidence
            share = item.share * weight
            causes[key] = replace(known, share=known.share + share) if known else replace(item, share=share)
    ranked = sorted(causes.values(), key=lambda item: item.share, reverse=True)
    ranked = [*_hangs(events), *ranked, *_memory(events)]
    if not ranked:
        return _nothing_found(found)
    return replace(ranked[0], also=tuple(ranked[1:]))


def _nothing_found(found: Sequence[TimingEvent]) -> Diagnosis:
    if not found:
        return Diagnosis(
            cause=SlowdownCause.UNKNOWN, share=0.0, evidence="The trainer recorded no timing of its steps."
        )
    part = shares(found)
    own = part["forward"] + part["backward"] + part["optimizer"]
    text = (
        f"{own:.0%} of training time is computation; communication takes {part['communication']:.0%}, "
        f"waiting for slower ranks "
        f"{part['waiting']:.0%}, input {part['input']:.0%}."
    )
    if len(found) < FEWEST_WINDOWS:
        few = f"Too few steps were timed to tell a cause from noise ({sum(window.steps for window in found)}): {text}"
        return Diagnosis(cause=SlowdownCause.UNKNOWN, share=0.0, evidence=few)
    if exceeds_limit(found, ("communication",)):
        text += f" Communication is above {COMMUNICATION_LIMIT:.0%} in some windows, but not steadily."
    if part["waiting"] > TAKING_TURNS:
        text += " No rank is persistently late: they take turns, as on machines that do other work too."
    return Diagnosis(cause=SlowdownCause.HEALTHY, share=0.0, evidence=text)


def _of_world(world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    late = stragglers(world)
    found = [_straggler(item, world) for item in late]
    found += _input(world, late) + _uneven(world) + _communication(world, events)
    # Its evidence says that no node is slow: it does not go with a rank that is blamed although it shares cores.
    if not {item.rank for item in late}.intersection(ranks_that_share_cores(world[-1])):
        found += _contention(world)
    return found + _checkpoint(world, events)


def _straggler(item: Straggler, world: Sequence[TimingEvent]) -> Diagnosis:
    cause = {"input": SlowdownCause.SLOW_INPUT, "compute": SlowdownCause.SLOW_COMPUTE}.get(
        item.why, SlowdownCause.SLOW_RANK
    )
    since = None if item.from_the_start else item.since_step
    when = f"since step {since}" if since is not None else f"in {item.windows} of {item.of_windows} windows"
    what = {"input": "input", "compute": "computation"}.get(item.why)
    why = (
        f"its {what} takes {_ms(item.own_seconds)} where others need {_ms(item.other_seconds)}"
        if what
        else "neither its input nor its computation takes longer"
    )
    often = "is" if item.typically else "pauses in some steps and is on average"
    text = (
        f"Rank {item.rank} (node {item.node_id}) {often} {_ms(item.late_seconds)} late in a step of "
        f"{_ms(_step(world))} ({item.late_share:.0%}), {when}: {why}; "
        f"communication itself takes {typical_share(world, 'communication'):.0%}."
    )
    share = item.lost_seconds / seconds_of(world)
    return Diagnosis(cause=cause, share=share, evidence=text, rank=item.rank, node_id=item.node_id, since_step=since)


def _contention(world: Sequence[TimingEvent]) -> list[Diagnosis]:
    """Return a diagnosis of cores that ranks share, however little it costs: the verdict does not change with the
    noise."""
    if len(world) < FEWEST_WINDOWS or not (sharing := ranks_that_share_cores(world[-1])):
        return []
    last, rank = world[-1], sharing[0]
    ranks, cores = last.machines.count(last.machines[rank]), last.cores[rank]
    text = (
        f"{ranks} ranks share {cores} core{'' if cores == 1 else 's'}, so fewer nodes are as fast: who is late there "
        "is up to the scheduler; this does not mean that a node is slow."
    )
    return [Diagnosis(cause=SlowdownCause.CROWDED, share=0.0, evidence=text)]


def _input(world: Sequence[TimingEvent], late: Sequence[Straggler]) -> list[Diagnosis]:
    """Return a diagnosis where input holds up every rank: even the quickest one waits for it."""
    rows = [window.typical.get("input") or window.segments.get("input") or (0.0,) for window in world]
    share = statistics.median(min(row) / item.seconds for row, item in zip(rows, world, strict=True))
    if share < INPUT_SHARE or len(world) < 3:
        return []
    each = ", ".join(_ms(statistics.median(column)) for column in zip(*rows, strict=True))
    text = f"Every rank waits for its batch in every step: {each} of {_ms(_step(world))}."
    return [Diagnosis(cause=SlowdownCause.INPUT, share=share, evidence=text)]


def _uneven(world: Sequence[TimingEvent]) -> list[Diagnosis]:
    window = world[-1]
    extra = [dealt_seconds(item) for item in world]
    share = statistics.median(
        (max(row) - statistics.fmean(row)) / item.seconds for row, item in zip(extra, world, strict=True)
    )
    if share < LATE_SHARE:
        return []
    dealt = ", ".join(f"{samples / window.steps:.0f}" for samples in window.samples)
    text = f"Ranks get {dealt} samples a step: those with fewer wait for those with more."
    return [Diagnosis(cause=SlowdownCause.UNEVEN, share=share, evidence=text)]


def _communication(world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    """Return diagnoses of the network, with the part of it that is slow."""
    part, typical, step = shares(world), typical_share(world, "communication"), _step(world)
    collectives = typical_collectives(world)
    fit = collective_link(collectives)
    latency = latency_share(fit, collectives, typical * step) if fit else 0.0
    slow = _slow_link(world, events)
    if slow and slow.share >= LATE_SHARE:  # looked at one by one, links need not be above the limit to be told apart
        return [slow]
    if ranks_that_share_cores(world[-1]):  # threads that wait for a core look like a network
        return []
    network_times, rests = (shares_by_window(world, names) for names in (("communication",), ("optimizer", "other")))
    if exceeds_limit(world, ("communication",)) and is_steadily_above(COMMUNICATION_LIMIT, network_times):
        text = f"Communication takes {typical:.0%} of a step of {_ms(step)}"
        if fit:
            text += (
                f": {latency:.0%} of that is latency of {len(collectives)} collectives, the same however few bytes "
                f"they move, and {1 - latency:.0%} are the bytes"
            )
        cause = SlowdownCause.SMALL_BATCHES if latency >= LATENCY_BOUND else SlowdownCause.COMMUNICATION
        return [Diagnosis(cause=cause, share=part["communication"], evidence=f"{text}.")]
    if is_steadily_above(
        FIXED_SHARE, [latency * network + rest for network, rest in zip(network_times, rests, strict=True)]
    ):
        fixed = part["communication"] * latency + part["optimizer"] + part["other"]
        text = (
            f"{fixed:.0%} of a step of {_ms(step)} is spent no matter how few samples it has: latency of collectives "
            f"({part['communication'] * latency:.0%}), the update and bookkeeping; forward and backward take "
            f"{part['forward'] + part['backward']:.0%}."
        )
        return [Diagnosis(cause=SlowdownCause.SMALL_BATCHES, share=fixed, evidence=text)]
    return []


def _slow_link(world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    """Return the rank whose links take much longer than the links of other ranks, by the trainer's own probes."""
    nodes = world[-1].nodes
    began, ended = world[0].time - world[0].total_seconds, world[-1].time
    seconds: dict[tuple[int, int], list[float]] = {}
    gradients = sum(item.bytes for item in typical_collectives(world))
    exposed = typical_share(world, "communication") * _step(world)
    for probe in read_events(LinkEvent, events):
        if began <= probe.time <= ended + 60:
            for source, target, value in probe.seconds:
                per_byte = float(value) / float(probe.bytes or math.inf)
                seconds.setdefault((int(source), int(target)), []).append(per_byte * gradients)
    links = {link: statistics.median(values) for link, values in seconds.items() if max(link) < len(nodes)}
    found = []
    for rank, node in enumerate(nodes):
        own = [value for link, value in links.items() if rank in link]
        others = [value for link, value in links.items() if rank not in link]
        if not own or not others:
            continue
        typical, usual = statistics.median(own), statistics.median(others)
        ratio = typical / max(usual, 1e-9)
        # All of its links, either way: one slow transfer says more of the machine's other work than of a link. And in a
        # ring each link carries 2 (W - 1) / W of what is summed.
        if (
            ratio < SLOW_LINK
            or min(own) <= max(others)
            or bytes_carried(len(nodes)) * typical <= LINK_EXPLAINS * exposed
        ):
            continue
        text = (
            f"Links of rank {rank} (node {node}) take {_ms(typical)} for the gradients of a step where links between "
            f"others take {_ms(usual)}; communication is {typical_share(world, 'communication'):.0%} of the step."
        )
        share = shares(world)["communication"] * (1 - 1 / ratio)
        found.append(Diagnosis(cause=SlowdownCause.SLOW_LINK, share=share, evidence=text, rank=rank, node_id=node))
    return max(found, key=lambda item: item.share, default=None)


def _checkpoint(world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    """Return the cost of saves, as far as they hold a rank up."""
    began, ended = world[0].time - world[0].total_seconds, world[-1].time
    count = sum(began <= save.time and save.began_at <= ended for save in read_events(CheckpointEvent, events))
    stalled = sum(max(window.segments.get("checkpoint") or (0.0,)) * window.steps for window in world)
    share = stalled / seconds_of(world)
    if share < CHECKPOINT_SHARE:
        return []
    text = f"Saves hold the step up for {share:.1%} of training time ({count} checkpoints)."
    return [Diagnosis(cause=SlowdownCause.CHECKPOINT, share=share, evidence=text)]


def _hangs(events: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    """Return a hang that nothing has ended; of one rank where just one is behind, or is silent."""
    reports = unresolved((), map(dict, events))
    if not reports:
        return []
    nodes = max((item.get("nodes") or [] for item in reports), key=len)
    furthest = max(item.get("sequence") or 0 for item in reports)
    waited_for = [item["rank"] for item in reports if (item.get("sequence") or 0) < furthest]
    waited_for = waited_for or sorted(set(range(len(nodes))) - {item["rank"] for item in reports})
    rank = waited_for[0] if len(waited_for) == 1 else None
    node = nodes[rank] if rank is not None and rank < len(nodes) else None
    waited = max(float(item.get("waited_seconds") or 0.0) for item in reports)
    whole = waited + seconds_of(windows(events))
    share = waited / whole if whole > 0 else 0.0
    sentence = hang_verdict(reports)
    evidence = f"{sentence[0].upper()}{sentence[1:]}."
    return [Diagnosis(cause=SlowdownCause.HANG, share=share, evidence=evidence, rank=rank, node_id=node)]


def _memory(events: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    short = read_events(OutOfMemoryEvent, events)
    if not short:
        return []
    last = short[-1]
    more = " and activations are computed twice" if last.activation_checkpointing else ""
    text = (
        f"Memory ran out {len(short)} time(s), last at step {last.step}: {last.samples} samples go "
        f"through the model at once since then{more}."
    )
    return [Diagnosis(cause=SlowdownCause.MEMORY, share=0.0, evidence=text)]


def _step(world: Sequence[TimingEvent]) -> float:
    return statistics.median(window.seconds for window in world)


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"

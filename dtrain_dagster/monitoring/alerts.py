"""Alerts on a job's speed while it runs, each sent once: pure functions of its latest events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.monitoring.diagnosis import SlowdownCause, diagnose
from dtrain_dagster.monitoring.stragglers import FEWEST_WINDOWS, LEAST_SECONDS
from dtrain_dagster.monitoring.strategies import (
    Strategy,
    communication_strategies,
    strategies,
    waiting_strategies,
)
from dtrain_dagster.monitoring.windows import (
    COMMUNICATION_LIMIT,
    LATEST_WINDOWS,
    exceeds_limit,
    seconds_of,
    settled,
    shares,
    windows,
    with_own_cores,
    worlds,
)
from trainer.documents.events import TimingEvent

MOST_STRATEGIES = 5
COMMUNICATION = "communication"
STRAGGLERS = (SlowdownCause.SLOW_COMPUTE, SlowdownCause.SLOW_INPUT, SlowdownCause.SLOW_RANK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A message about a job's speed, with strategies against the cause."""

    key: str
    """The subject of the alert: nobody is told of the same one twice."""
    title: str
    sentence: str
    figures: dict[str, float]
    strategies: tuple[Strategy, ...]

    @property
    def text(self) -> str:
        """Return the message: the problem, and what would help, the best first."""
        return "\n".join([self.sentence, *(f"- {describe_strategy(item)}" for item in self.strategies)])


def alerts(
    recent: Sequence[Mapping[str, Any]], told_before: Collection[str] = (), training: Mapping[str, Any] | None = None
) -> list[Alert]:
    """Return the alerts that the latest events justify and that have not been sent. ``training``: the configuration."""
    found = settled(windows(recent))
    due = []
    latest = found[-LATEST_WINDOWS:]
    communication = communication_alert(latest, training)
    if communication and COMMUNICATION not in told_before and seconds_of(latest) >= LEAST_SECONDS:
        due.append(communication)
    diagnosis = diagnose(recent)
    groups = worlds(found)  # a straggler is judged in the world that trained longest of those in which it is one
    for item in (diagnosis, *diagnosis.also):
        key = f"{item.cause} {item.node_id}"
        if item.cause in STRAGGLERS and key not in told_before:
            due.append(
                Alert(
                    key=key,
                    title=item.where,
                    sentence=f"{item.where}, {item.share:.0%} of training time: {item.evidence}",
                    figures={"share": item.share},
                    strategies=best(
                        next(filter(None, (waiting_strategies(world, item.node_id) for world in groups)), [])
                    ),
                )
            )
    return due


def communication_alert(found: Sequence[TimingEvent], training: Mapping[str, Any] | None = None) -> Alert | None:
    """Return an alert where communication takes more than its limit of these windows' time: the network, and waiting at
    collectives for ranks that come later. Its strategies are those against the larger of the two parts, then those
    against the other one if that is above the limit by itself. Windows in which ranks share cores are not judged."""
    found = with_own_cores(found)
    if len(found) < FEWEST_WINDOWS or not exceeds_limit(found):
        return None
    world, part = worlds(found)[0], shares(found)
    wire, waiting = part["communication"], part["waiting"]
    total, mostly_waiting = wire + waiting, waiting > wire
    against_waiting, against_wire = waiting_strategies(world), communication_strategies(world, training or {})
    larger, other = (against_waiting, against_wire) if mostly_waiting else (against_wire, against_waiting)
    is_other_large = min(wire, waiting) > COMMUNICATION_LIMIT
    first, last = found[0], found[-1]
    hint = ""
    if mostly_waiting:
        hint = "; a faster network or compression does not end this waiting"
        hint += "" if against_waiting else ", and no rank is persistently late: they take turns"
    return Alert(
        key=COMMUNICATION,
        title=f"communication takes {total:.0%} of training time",
        sentence=(
            f"communication takes {total:.0%} of training time in steps {first.step - first.steps + 1} to "
            f"{last.step} (limit {COMMUNICATION_LIMIT:.0%}): {wire:.0%} on the network, "
            f"{waiting:.0%} waiting at collectives for slower ranks{hint}"
        ),
        figures={"communication": wire, "waiting": waiting},
        strategies=(*best(larger), *(best(other) if is_other_large else ())),
    )


def best(ranked: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """Return the `MOST_STRATEGIES` strategies that are expected to gain most, the largest gain first."""
    useful = [item for item in ranked if item.is_worth_it]
    return tuple(sorted(useful, key=lambda item: item.sort_key, reverse=True)[:MOST_STRATEGIES])


def advise(events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> list[str]:
    """Return what would help most against what these events tell, in a line each. ``training``: the configuration."""
    return [describe_strategy(item) for item in best(strategies(settled(windows(events)), events, training))]


def describe_strategy(item: Strategy) -> str:
    """Return a strategy in a line: ``more accumulation (…): +35 % samples/s, communication then 14 % of the step``."""
    gain = f"{item.gain:+.0%} samples/s" if item.gain >= 0.005 else f"{item.cost_gain:+.0%} samples per dollar"
    if item.gain < -0.005:
        gain += f", {item.gain:+.0%} samples/s"
    return f"{item.name}: {item.change}: {gain}, communication then {item.communication_share:.0%} of the step"

"""Alerts on a job's speed while it runs, each sent once: pure functions of its latest events."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.monitoring.diagnosis import SlowdownCause, diagnose
from dtrain_dagster.monitoring.stragglers import FEWEST_WINDOWS, LEAST_SECONDS
from dtrain_dagster.monitoring.strategies import (
    Change,
    best,
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

MOST_CHANGES = 5
COMMUNICATION = "communication"
STRAGGLERS = (SlowdownCause.SLOW_COMPUTE, SlowdownCause.SLOW_INPUT, SlowdownCause.SLOW_RANK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A message about a job's speed, with changes against the cause."""

    key: str
    """The subject of the alert: nobody is told of the same one twice."""
    title: str
    sentence: str
    figures: dict[str, float]
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """Return the message: the problem, and what would help, the best first."""
        return "\n".join([self.sentence, *(f"- {item.text}" for item in self.changes)])


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
    against = [waiting_strategies(world) for world in worlds(found)]  # the world that trained longest first
    for item in (diagnosis, *diagnosis.also):
        key = f"{item.cause} {item.node_id}"
        if item.cause in STRAGGLERS and key not in told_before:
            sentence = f"{item.where}, {item.share:.0%} of training time: {item.evidence}"
            mine = next((rows for rows in against if rows and rows[0].name == f"replace node {item.node_id}"), [])
            figures = {"share": item.share}
            due.append(Alert(key=key, title=item.where, sentence=sentence, figures=figures, changes=best(mine)))
    return due


def communication_alert(found: Sequence[TimingEvent], training: Mapping[str, Any] | None = None) -> Alert | None:
    """Return an alert where communication takes more than its limit of these windows' time: the network, and waiting at
    collectives for ranks that come later. Its changes are those against the larger of the two parts, then those against
    the other one if that is above the limit by itself. Windows in which ranks share cores are not judged."""
    found = with_own_cores(found)
    if len(found) < FEWEST_WINDOWS or not exceeds_limit(found):
        return None
    world, part = worlds(found)[0], shares(found)
    wire, waiting = part["communication"], part["waiting"]
    against_waiting = best(waiting_strategies(world), MOST_CHANGES)
    against_wire = best(communication_strategies(world, training or {}), MOST_CHANGES)
    larger, other, hint = against_wire, against_waiting, ""
    if waiting > wire:
        larger, other = against_waiting, against_wire
        hint = "; a faster network or compression does not end this waiting"
        hint += "" if against_waiting else ", and no rank is persistently late: they take turns"
    first, last = found[0], found[-1]
    return Alert(
        key=COMMUNICATION,
        title=f"communication takes {wire + waiting:.0%} of training time",
        sentence=(
            f"communication takes {wire + waiting:.0%} of training time in steps {first.step - first.steps + 1} to "
            f"{last.step} (limit {COMMUNICATION_LIMIT:.0%}): {wire:.0%} on the network, "
            f"{waiting:.0%} waiting at collectives for slower ranks{hint}"
        ),
        figures={"communication": wire, "waiting": waiting},
        changes=(*larger, *(other if min(wire, waiting) > COMMUNICATION_LIMIT else ())),
    )


def advise(events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> list[str]:
    """Return what would help most against what these events tell, in a line each. ``training``: the configuration."""
    return [item.text for item in strategies(settled(windows(events)), training)[:MOST_CHANGES]]

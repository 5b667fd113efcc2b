"""The verdict of a running training from look to look: it stays until another one is clearly right. Pure.

Each look diagnoses the newest steps only. Of two causes that cost about as much, now the one and now the other comes
first; and what is just above a limit is just below it in the next look. Neither is news.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause

CLEARLY_MORE, CLEARLY_MORE_SHARE = 1.25, 0.02
"""How many times as much as the present cause, and how much of training time besides, another one must cost to take its
place."""
LOOKS = 2
"""Looks in a row, each with new steps, after which a changed verdict is believed."""

_Key = tuple[SlowdownCause, int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveVerdict:
    """The verdict that is shown, and the change that has been seen once or more often."""

    shown: Diagnosis
    change: _Key | None = None
    seen: int = 0
    """Looks in a row that named the change."""


def settle_verdict(before: LiveVerdict | None, found: Diagnosis) -> LiveVerdict:
    """Return the verdict after a look that found this diagnosis. A hang is shown at once, as is the first verdict; the
    figures of the shown cause are always those of the latest look that named it."""
    if before is None or SlowdownCause.UNKNOWN in (before.shown.cause, found.cause):
        return LiveVerdict(shown=found)
    key, shown = _key_of(found), _key_of(before.shown)
    if key == shown or SlowdownCause.HANG in (found.cause, before.shown.cause):
        return LiveVerdict(shown=found)
    same = next((item for item in found.also if _key_of(item) == shown), None)
    if same is not None and found.share < CLEARLY_MORE * same.share + CLEARLY_MORE_SHARE:
        others = (replace(found, also=()), *(item for item in found.also if item is not same))
        return LiveVerdict(shown=replace(same, also=others))
    seen = before.seen + 1 if key == before.change else 1
    if seen >= LOOKS:
        return LiveVerdict(shown=found)
    return LiveVerdict(shown=replace(same, also=before.shown.also) if same else before.shown, change=key, seen=seen)


def _key_of(found: Diagnosis) -> _Key:
    return found.cause, found.node_id

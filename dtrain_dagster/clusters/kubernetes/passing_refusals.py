"""Refusals of rights that may pass: an API server that has just started answers 403 until it has read its own roles.

What the engine does about a refusal, and its remedies in words, are in `dtrain_dagster.clusters.kubernetes.engine`.
"""

from __future__ import annotations

PATIENCE_SECONDS = 60.0
"""Seconds for which a refusal of what was allowed before counts as a cluster that does not answer."""
_OF_RIGHTS = (401, 403)


class PassingRefusals:
    """The kinds of requests that were allowed, and since when each has been refused."""

    def __init__(self) -> None:
        self._refused_since: dict[str, float | None] = {}
        """By kind; None: allowed when it was asked last."""

    def note_allowed(self, what: str) -> None:
        """Take down that a request was answered. ``what`` names it; a number at its end says which object it is about,
        and not which kind of request it is."""
        self._refused_since[_kind(what)] = None

    def may_pass(self, what: str, status: int, said: str, now: float) -> bool:
        """Return whether a refusal may be over soon: of a request whose kind was allowed before, within
        `PATIENCE_SECONDS` of its first refusal. ``now``: seconds of a monotonic clock."""
        kind = _kind(what)
        if status not in _OF_RIGHTS or "exceeded quota" in said or kind not in self._refused_since:
            return False
        since = self._refused_since[kind]
        if since is None:
            since = self._refused_since[kind] = now
        return now - since < PATIENCE_SECONDS


def _kind(what: str) -> str:
    return what.rstrip(" 0123456789")

"""`RetryPolicy`: how requests over a network are tried again after a failure that passes by itself.

When the next attempt is made, how many there are, how long they may take in all and what the log says of them belong
here. Which errors are transient is known where the request is made, and is an argument. Waiting for something that is
expected to happen later (a process that ends, a peer that has yet to come, a lock) is no retry and does not belong
here.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tenacity import RetryCallState

PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""The HTTP statuses that services answer while they restart or are overloaded."""
_AFTER = (("x-ms-retry-after-ms", 1e-3), ("retry-after-ms", 1e-3), ("retry-after", 1.0))
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number of attempts of an action and the pauses between them. Immutable; one may serve many threads."""

    first_pause_seconds: float
    longest_pause_seconds: float = 60.0
    """The longest pause that the policy makes by itself, before jitter; each is twice the one before."""
    jitter: float = 0.0
    """The share by which each pause is lengthened or shortened at random, so that many clients do not return at
    once."""
    max_attempts: int | None = None
    """The most attempts, the first one included; None: as many as the deadline allows."""
    deadline_seconds: float | None = None
    """Seconds since the first attempt began: no pause is made that would end later. None: only attempts are counted."""
    log_level: int = logging.INFO

    def call(
        self,
        what: str,
        action: Callable[[], _T],
        is_transient: Callable[[Exception], bool],
        *,
        asked_seconds: Callable[[BaseException], float] | None = None,
        describe: Callable[[BaseException], str] = str,
        on_retry: Callable[[BaseException, float], None] | None = None,
        pause: Callable[[float], None] | None = None,
    ) -> _T:
        """Return what ``action`` returns. It must be safe to repeat: an attempt whose answer was lost may have been
        carried out. Raise the action's own error where that is not transient, or was the last one.

        ``what``: words for the log. ``asked_seconds``: returns how long the service asks to wait (Retry-After), 0 for
        no wish; the next pause is at least that. ``describe``: returns the error in words that hold no secret.
        ``on_retry``: called with the error and the pause before each pause. ``pause``: the function that waits, in
        place of `time.sleep`.
        """
        import tenacity  # not above: the code that starts nodes must not load it

        def note(state: RetryCallState) -> None:
            error, seconds = _error_of(state), state.upcoming_sleep
            _log.log(self.log_level, "%s: %s; trying again in %.1f s", what, describe(error), seconds)
            if on_retry is not None:
                on_retry(error, seconds)

        grown = tenacity.wait_exponential(multiplier=self.first_pause_seconds, max=self.longest_pause_seconds)

        def wait(state: RetryCallState) -> float:
            asked = 0.0 if asked_seconds is None else asked_seconds(_error_of(state))
            return max(grown(state) * random.uniform(1 - self.jitter, 1 + self.jitter), asked)

        stops: list[Any] = [tenacity.stop_never]
        if self.max_attempts is not None:
            stops.append(tenacity.stop_after_attempt(self.max_attempts))
        if self.deadline_seconds is not None:
            stops.append(tenacity.stop_before_delay(self.deadline_seconds))
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, Exception) and is_transient(error)),
            wait=wait,
            stop=tenacity.stop_any(*stops),
            sleep=sleep if pause is None else pause,
            before_sleep=note,
            reraise=True,
        )(action)


def retry_after_seconds(headers: Mapping[str, Any] | None, now: datetime | None = None) -> float:
    """Return the seconds for which an answer asks the client to wait, given as a number, or as a date compared with
    ``now``; 0 where the header is missing or makes no sense."""
    found = {str(name).lower(): str(value) for name, value in (headers or {}).items()}
    for name, unit in _AFTER:
        if name not in found:
            continue
        try:
            seconds = float(found[name]) * unit
        except ValueError:
            try:
                seconds = (parsedate_to_datetime(found[name]) - (now or datetime.now(UTC))).total_seconds()
            except (ValueError, TypeError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return 0.0


def _error_of(state: RetryCallState) -> BaseException:
    assert state.outcome is not None  # both callers run after an attempt has failed
    error = state.outcome.exception()
    assert error is not None
    return error

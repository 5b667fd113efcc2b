"""When a failed action is tried again, by a clock that only pauses move."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from trainer.runtime.retry import RetryPolicy, retry_after_seconds

POLICY = RetryPolicy(first_pause_seconds=1.0, longest_pause_seconds=10.0)


class Asked:
    """An action that fails so many times, and what it and its pauses were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: float, error: BaseException, takes: float = 0.0):
        self.failures, self.error, self.takes = failures, error, takes
        self.now, self.attempts = 0.0, 0
        self.pauses: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def __call__(self) -> str:
        self.attempts += 1
        self.now += self.takes
        if self.attempts <= self.failures:
            raise self.error
        return "done"

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    def make(failures: float = float("inf"), error: BaseException | None = None, takes: float = 0.0) -> Asked:
        return Asked(monkeypatch, failures, error or OSError("no answer"), takes)

    return make


def passes(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_pauses_grow_to_the_longest_and_the_answer_is_returned(asked: Callable[..., Asked]) -> None:
    action = asked(failures=6)
    assert POLICY.call("it", action, passes, pause=action.pause) == "done"
    assert action.pauses == [1, 2, 4, 8, 10, 10]


def test_jitter_makes_pauses_longer_and_shorter_by_its_share(asked: Callable[..., Asked]) -> None:
    action = asked(failures=200)
    policy = replace(POLICY, longest_pause_seconds=1.0, jitter=0.5)
    policy.call("it", action, passes, pause=action.pause)
    assert 0.5 <= min(action.pauses) < 0.6
    assert 1.4 < max(action.pauses) <= 1.5


@pytest.mark.parametrize(
    ("changes", "takes", "pauses"),
    [
        ({"max_attempts": 3}, 0.0, [1, 2]),
        ({"deadline_seconds": 12.0}, 0.0, [1, 2, 4]),
        ({"deadline_seconds": 60.0}, 30.0, [1]),  # what attempts take counts as well
        ({"deadline_seconds": 0.0}, 0.0, []),
    ],
)
def test_after_the_last_attempt_the_actions_own_error_is_raised(
    asked: Callable[..., Asked], changes: dict[str, Any], takes: float, pauses: list[float]
) -> None:
    action = asked(takes=takes)
    with pytest.raises(OSError, match="no answer") as caught:
        replace(POLICY, **changes).call("it", action, passes, pause=action.pause)
    assert caught.value is action.error
    assert (action.attempts, action.pauses) == (len(pauses) + 1, pauses)


@pytest.mark.parametrize("error", [ValueError("no sense"), KeyboardInterrupt(), SystemExit(3)])
def test_what_does_not_pass_or_interrupts_is_raised_at_once(asked: Callable[..., Asked], error: BaseException) -> None:
    action = asked(error=error)
    with pytest.raises(type(error)):
        POLICY.call("it", action, lambda error: not isinstance(error, ValueError), pause=action.pause)
    assert (action.attempts, action.pauses) == (1, [])


def test_a_service_that_says_when_is_heeded_up_to_the_deadline(asked: Callable[..., Asked]) -> None:
    action = asked(failures=3)
    wishes = iter((7.0, 0.5, 1000.0))
    policy = replace(POLICY, deadline_seconds=60.0)
    with pytest.raises(OSError, match="no answer"):
        policy.call("it", action, passes, asked_seconds=lambda error: next(wishes), pause=action.pause)
    assert action.pauses == [7, 2]


def test_each_retry_is_told_with_its_pause_and_logged_in_words_without_secrets(
    asked: Callable[..., Asked], caplog: pytest.LogCaptureFixture
) -> None:
    action, told = asked(failures=2, error=OSError("sig=secret")), []
    caplog.set_level("INFO")
    POLICY.call(
        "write a", action, passes, describe=lambda error: "sig=…", pause=action.pause,
        on_retry=lambda error, seconds: told.append((error, seconds)),
    )  # fmt: skip
    assert told == [(action.error, 1.0), (action.error, 2.0)]
    assert caplog.messages == ["write a: sig=…; trying again in 1.0 s", "write a: sig=…; trying again in 2.0 s"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": "7"}, 7.0),
        ({"x-ms-retry-after-ms": "250", "Retry-After": "7"}, 0.25),
        ({"Retry-After": "Mon, 01 Jun 2026 12:00:30 GMT"}, 30.0),
        ({"Retry-After": "Mon, 01 Jun 2026 11:00:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, 0.0),
        ({"Retry-After": "nan"}, 0.0),
        ({"Retry-After": "inf"}, 0.0),
        ({"Retry-After": "-5"}, 0.0),
        ({}, 0.0),
        (None, 0.0),
    ],
)
def test_a_wish_to_be_left_alone_is_a_number_or_a_date(headers: dict[str, str] | None, seconds: float) -> None:
    assert retry_after_seconds(headers, datetime(2026, 6, 1, 12, tzinfo=UTC)) == seconds

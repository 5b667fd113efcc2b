"""Telling losses on an event loop: those that come together are told in one message.

What is told, and what others know already, belongs in `trainer.elastic.mailbox`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from trainer.elastic.mailbox import Mailbox

COLLECT_SECONDS = 0.01
"""Seconds in which losses are collected into one message: a rack is lost at once."""


class LossTelling:
    """The losses that one member has seen and not told yet. Its methods run on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mail: Mailbox, send: Callable[[bytes], None]) -> None:
        self._loop, self._mail, self._send = loop, mail, send
        self._seen: dict[str, str] = {}
        self._is_due = False
        """Whether losses will be told soon."""

    def note(self, seen: Mapping[str, str]) -> None:
        """Tell these losses soon, with others that are seen or heard of meanwhile."""
        self._seen.update(seen)
        self.tell_soon()

    def tell_soon(self) -> None:
        """Tell soon what has been seen, and what others have told."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(COLLECT_SECONDS, self._tell)

    def _tell(self) -> None:
        seen, self._seen, self._is_due = self._seen, {}, False
        if (line := self._mail.tell_losses(seen)) is not None:
            self._send(line)

"""Warnings that this node's machine will be taken away: Azure's Scheduled Events, and a signal with time to heed it.

A node that is warned has another one ordered in its place at once, and leaves between two steps once that one is there,
or just in time: nothing is redone. Azure's metadata service tells each machine of what will happen to it (preemption
with at most 30 s left, redeployment, reboot, termination); it is asked where a machine is Azure's, or where
DTRAIN_METADATA_URL names another address.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

URL = "DTRAIN_METADATA_URL"
"""The variable with the address of the metadata service; "off": it is not asked."""
AZURE = "http://169.254.169.254"
_CHASSIS, _AZURES = "/sys/class/dmi/id/chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"
"""Where a machine says whose it is, and what Azure's say."""
TAKES = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Kinds of events after which the processes of a machine are gone. A freeze is over in seconds."""
LEAVE_SECONDS = 10.0
"""Seconds before a machine is taken at which its node leaves: a step may take as long."""
_FIRST_SECONDS, _SECONDS = 120.0, 5.0
"""Seconds that the service may take for its first answer, and for others."""
_MOST_BYTES = 1 << 20
_AGAIN = 3
"""Times that a service which never answered is asked."""


class NodeWarning(NamedTuple):
    """What a node is told of its end."""

    why: str
    leaves_at: float
    """When it leaves at the latest, in Unix seconds."""


def read_events(document: Any, name: str, now: float) -> NodeWarning | None:
    """Return the first end that Scheduled Events have for the machine of this name; None where they have none. Pure.
    ``now``: Unix seconds."""
    found: list[NodeWarning] = []
    for event in document.get("Events", []) if isinstance(document, Mapping) else []:
        kind, status = event.get("EventType"), event.get("EventStatus")
        if kind not in TAKES or status not in ("Scheduled", "Started") or name not in event["Resources"]:
            continue
        at = now  # one that has begun has no time any more
        with suppress(TypeError, ValueError, AttributeError):
            at = parsedate_to_datetime(event.get("NotBefore", "")).timestamp()
        about = event.get("Description") or event.get("EventId", "")
        found.append(NodeWarning(f"{kind}: {about}".rstrip(": "), max(now, at - LEAVE_SECONDS)))
    return min(found, key=lambda warning: warning.leaves_at, default=None)


def find_service(environment: Mapping[str, str]) -> str | None:
    """Return the address of the metadata service; None where there is none to ask."""
    given = environment.get(URL, "")
    if given:
        return None if given == "off" else given.rstrip("/")
    with suppress(OSError):
        if Path(_CHASSIS).read_text().strip() == _AZURES:
            return AZURE
    return None


class ScheduledEvents:
    """Azure's metadata service on one machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        self._name = ""
        self._has_answered = False

    def look(self, now: float) -> NodeWarning | None:
        """Return what the service says of this machine. Raise OSError where it does not answer, ValueError where the
        answer is not one."""
        if not self._name:
            self._name = self._ask("instance/compute/name?api-version=2021-02-01&format=text").decode().strip()
        said = self._ask("scheduledevents?api-version=2020-07-01")
        self._has_answered = True
        try:
            return read_events(json.loads(said), self._name, now)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no list of events: {error}") from None

    def _ask(self, what: str) -> bytes:
        asked = urllib.request.Request(f"{self.url}/metadata/{what}", headers={"Metadata": "true"})
        with self._opener.open(asked, timeout=_SECONDS if self._has_answered else _FIRST_SECONDS) as answer:
            said: bytes = answer.read(_MOST_BYTES)
            return said


class WarningWatch:
    """Asks for warnings in a thread of its own, for as long as the process runs."""

    def __init__(
        self,
        service: ScheduledEvents,
        now: Callable[[], float],
        every_seconds: float = 1.0,
    ) -> None:
        """``now``: the present in Unix seconds."""
        self.service, self.now, self.every_seconds = service, now, every_seconds
        self.warning: NodeWarning | None = None
        """The newest warning; None while there is none, or it was withdrawn."""
        self._thread = threading.Thread(target=self._work, daemon=True, name="warnings")
        self._thread.start()

    def _work(self) -> None:
        failed, has_answered = 0, False
        while has_answered or failed < _AGAIN:
            try:
                found, has_answered = self.service.look(self.now()), True
            except (OSError, ValueError):
                failed += 1  # what was said last holds
            else:
                self.warning = keep_time(self.warning, found)
            time.sleep(self.every_seconds)


def keep_time(before: NodeWarning | None, found: NodeWarning | None) -> NodeWarning | None:
    """Return the newest warning. One that has begun keeps the time that it had: it is told without one. Pure."""
    if before is None or found is None or found.why != before.why:
        return found
    return min(before, found, key=lambda warning: warning.leaves_at)


def begin_watch(
    environment: Mapping[str, str],
    now: Callable[[], float],
    every_seconds: float = 1.0,
) -> WarningWatch | None:
    """Begin to ask for warnings; None where there is no service to ask."""
    url = find_service(environment)
    return None if url is None else WarningWatch(ScheduledEvents(url), now, every_seconds)

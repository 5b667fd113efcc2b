"""An emulation of the part of Azure's instance metadata service that tells a machine what will happen to it, made from
its documentation: ``/metadata/instance/compute/name`` and ``/metadata/scheduledevents``, with the header ``Metadata``.

One service stands for those of many machines: the address of a machine's is followed by its name, as in
``http://127.0.0.1:PORT/MACHINE``. Events are announced to the machines that they concern, and can be withdrawn.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class MetadataService:
    """The service of all machines, on loopback."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.asked: list[str] = []
        """The paths that were asked for, of each machine."""
        self.is_down = False
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.asked.append(self.path)
                _, machine, path = self.path.split("/", 2)
                if service.is_down or self.headers.get("Metadata") != "true":
                    self.send_error(400 if not service.is_down else 503)
                    return
                if path.startswith("metadata/instance/compute/name?"):
                    said = machine.encode()
                elif path == "metadata/scheduledevents?api-version=2020-07-01":
                    said = json.dumps({"DocumentIncarnation": len(service.events), "Events": service.events}).encode()
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def announce(self, machine: str, kind: str = "Preempt", seconds: float = 30.0, status: str = "Scheduled") -> str:
        """Announce an event ``seconds`` ahead, and return its id."""
        event_id = f"{kind}-{len(self.events)}"
        when = formatdate(time.time() + seconds, usegmt=True) if status == "Scheduled" else ""
        self.events.append({
            "EventId": event_id, "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [machine],
            "EventStatus": status, "NotBefore": when, "Description": "", "EventSource": "Platform",
            "DurationInSeconds": -1,
        })  # fmt: skip
        return event_id

    def withdraw(self, event_id: str) -> None:
        """Take an event back."""
        self.events = [event for event in self.events if event["EventId"] != event_id]

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def metadata_service() -> Iterator[MetadataService]:
    """A service for as long as the block runs."""
    made = MetadataService()
    try:
        yield made
    finally:
        made.close()

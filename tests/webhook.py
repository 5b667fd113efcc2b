"""A web hook on loopback: an address for notifications, and what was said to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def web_hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, as `dtrain_dagster.support.notify` takes one, and the messages so far."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"json://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()

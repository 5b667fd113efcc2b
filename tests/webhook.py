"""A web hook on loopback: an address for notifications, and what was said to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from werkzeug import Request, Response

from tests.loopback import LoopbackServer


@contextmanager
def web_hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, as `dtrain_dagster.support.notify` takes one, and the messages so far."""
    heard: list[dict[str, Any]] = []

    def hear(request: Request) -> Response:
        heard.append(request.get_json())
        return Response()

    with LoopbackServer(hear) as server:
        yield f"json://127.0.0.1:{server.port}", heard

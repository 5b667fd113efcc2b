"""The dashboard's page of fleets: a page, and the views of `dtrain_dagster.fleet.view` as JSON. It changes nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from dtrain_dagster.dashboard.page import static
from dtrain_dagster.fleet.jobs import FleetError
from dtrain_dagster.fleet.records import FleetRecords, fleet_names
from dtrain_dagster.fleet.view import FleetWatch
from trainer.errors import ConfigError, DamagedError

KEPT_SECONDS = 1.0
"""Seconds for which a view is shared by all browsers that ask for it."""


class FleetBoard:
    """The fleets of a home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._watches: dict[str, FleetWatch] = {}
        self._made: dict[str, tuple[float, bytes]] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all fleets."""
        return fleet_names(self.home)

    def view(self, name: str) -> bytes:
        """Return a fleet as it is now, as JSON. Raise `FleetError` where there is none of that name."""
        with self._lock:
            at, made = self._made.get(name, (-1e9, b""))
            if time.monotonic() - at > KEPT_SECONDS:
                watch = self._watches.get(name) or FleetWatch(FleetRecords(self.home, name))
                made = json.dumps(watch.view().document(), allow_nan=False).encode()
                self._watches[name], self._made[name] = watch, (time.monotonic(), made)
        return made


def fleet_routes(board: FleetBoard) -> list[Route]:
    """Return the routes of the page and its figures."""

    def page(request: Request) -> Response:
        return HTMLResponse(Template(static("fleets.html")).substitute())

    def script(request: Request) -> Response:
        return Response(static("fleets.js"), media_type="text/javascript")

    def names(request: Request) -> Response:
        return Response(json.dumps(board.names()), media_type="application/json")

    def fleet(request: Request) -> Response:
        try:
            return Response(board.view(request.path_params["name"]), media_type="application/json")
        except FleetError:
            return PlainTextResponse("there is no fleet of that name", 404)
        except (ConfigError, DamagedError, OSError) as error:
            return PlainTextResponse(f"its record cannot be read: {error}".encode(errors="replace"), 500)

    return [
        Route("/fleets", page),
        Route("/fleets.js", script),
        Route("/fleets.json", names),
        Route("/fleets/{name}.json", fleet),
    ]

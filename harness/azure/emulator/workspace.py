"""All of the emulated workspace behind two servers, and a fresh one in its place: nothing is started anew for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from harness.azure.emulator.app import Surface, new_app
from harness.azure.emulator.arm import arm_routes
from harness.azure.emulator.around import Around, around_control, around_routes
from harness.azure.emulator.assets import asset_routes
from harness.azure.emulator.computes import compute_routes
from harness.azure.emulator.control import control_routes
from harness.azure.emulator.faults import Faults
from harness.azure.emulator.history import history_routes
from harness.azure.emulator.identity import Identity, identity_routes
from harness.azure.emulator.jobs import job_routes
from harness.azure.emulator.running import Runner
from harness.azure.emulator.scaling import tick_computes
from harness.azure.emulator.state import CONTAINER, DATASTORE_CONTAINER, Addresses, Cloud
from harness.azure.emulator.storage import Blobs
from harness.azure.emulator.tracking import Tracking, mlflow_routes

RESOLVER = Path(__file__).parents[1] / "resolver"


class Workspace:
    """A cloud with what runs in it. ``surface`` and ``inside`` are the apps of its two servers, for as long as they
    run; `renew` gives them another cloud."""

    def __init__(self, folder: Path, addresses: Addresses, ca: Path, faults: Faults) -> None:
        self.folder, self.addresses, self.ca = folder, addresses, ca
        self.identity, self.blobs = Identity(), Blobs(addresses)
        self._begin(faults)

    def renew(self) -> None:
        """Everything that was bought, run, stored or planted is gone. Addresses and identities stay."""
        self.close()
        for name in ("nodes", "code"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "mlflow.db").unlink(missing_ok=True)
        self._begin(Faults())

    def tick(self) -> None:
        self.cloud.end_operations()
        self._runner.tick()
        tick_computes(self.cloud, self._runner.waiting())

    def close(self) -> None:
        """End all that runs."""
        for part in (self._runner, self._tracking):
            part.close()

    async def surface(self, scope: Any, receive: Any, send: Any) -> None:
        await self._surface(scope, receive, send)

    async def inside(self, scope: Any, receive: Any, send: Any) -> None:
        await self._inside(scope, receive, send)

    def _begin(self, faults: Faults) -> None:
        for container in (CONTAINER, DATASTORE_CONTAINER):
            self.blobs.empty(container)
        self.cloud = cloud = Cloud(folder=self.folder, faults=faults, addresses=self.addresses)
        self._runner = Runner(cloud=cloud, blobs=self.blobs, identity=self.identity, ca=self.ca, resolver=RESOLVER)
        self._tracking = Tracking(cloud)
        surface, around, resources = new_app(), Around(), arm_routes(cloud)
        for routes in (
            around_routes(cloud, around, resources),
            resources,
            compute_routes(cloud),
            asset_routes(cloud, self.blobs),
            job_routes(cloud),
            history_routes(cloud, self.blobs),
            mlflow_routes(self._tracking),
        ):
            surface.include_router(routes)
        self._surface = Surface(surface, cloud, self.identity)
        self._inside = new_app()
        for routes in (
            identity_routes(self.identity),
            around_control(around),
            control_routes(cloud, self.tick, self.renew),
        ):
            self._inside.include_router(routes)

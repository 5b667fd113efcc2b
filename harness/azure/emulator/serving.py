"""The emulator's servers, beside their storage account: served until they are stopped, by any thread."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path

from harness.azure.azurite import Azurite
from harness.azure.emulator import environment
from harness.azure.emulator.app import QuietServer, new_server, tick_forever
from harness.azure.emulator.certificates import make_certificates
from harness.azure.emulator.faults import Faults
from harness.azure.emulator.state import Addresses
from harness.azure.emulator.workspace import RESOLVER, Workspace


class Serving:
    """An emulated workspace. ``ports``: of the ARM surface (TLS), the control port (plain HTTP) and the storage
    account (TLS); 0 is a free one."""

    def __init__(self, folder: Path, faults: Faults, ports: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.folder, self.faults, self.ports = folder, faults, ports
        self.storage_pid = 0
        self._servers: tuple[QuietServer, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, announce: Callable[[dict[str, str]], None]) -> None:
        """Serve until `stop`. ``announce`` gets the variables that lead clients here, as soon as it answers; it runs in
        the servers' own loop."""
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")  # of its own storage account
        certificates = make_certificates(self.folder / "certificates")
        port, control_port, storage_port = self.ports
        with Azurite(certificate=certificates.server, key=certificates.key, oauth=True, port=storage_port) as blobs:
            self.storage_pid = blobs.pid
            addresses = Addresses(storage=blobs.url, storage_suffix=f"core.localhost:{blobs.port}")
            workspace = Workspace(self.folder, addresses, certificates.ca, self.faults)
            arm, arm_socket = new_server(workspace.surface, certificates, port)
            control, control_socket = new_server(workspace.inside, None, control_port)
            addresses.base = f"https://127.0.0.1:{arm_socket.getsockname()[1]}"
            addresses.control = f"http://127.0.0.1:{control_socket.getsockname()[1]}"
            variables = environment(addresses, certificates.ca, RESOLVER, workspace.identity.header)
            self._servers = (arm, control)

            async def serve() -> None:
                self._loop = asyncio.get_running_loop()
                ticking = asyncio.create_task(tick_forever(workspace.tick))
                ticking.add_done_callback(lambda _: self._end())
                serving = asyncio.gather(arm.serve([arm_socket]), control.serve([control_socket]))
                while not all(server.started for server in self._servers) and not serving.done():
                    await asyncio.sleep(0.005)
                announce(variables)
                await serving
                if not ticking.cancel():
                    ticking.result()

            try:
                asyncio.run(serve())
            finally:
                workspace.close()

    def stop(self) -> None:
        """Let `run` come to its end; again without harm."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for server in self._servers:
            server.should_exit = server.force_exit = True

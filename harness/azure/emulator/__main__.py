"""``python -m harness.azure.emulator --folder DIR``: an Azure ML workspace on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

from harness.azure.azurite import Azurite
from harness.azure.emulator import environment
from harness.azure.emulator.app import QuietServer, new_server, tick_forever
from harness.azure.emulator.certificates import ACCOUNT, make_certificates
from harness.azure.emulator.faults import FIELDS, Faults
from harness.azure.emulator.state import Addresses
from harness.azure.emulator.workspace import RESOLVER, Workspace

ENVIRONMENT, READY = "azure.env", "ready.json"
"""Files for a shell and for `Emulator`, which are there once it answers."""
EPILOG = f"""\
In another terminal:  source DIR/azure.env   and use dtrain (or az-ml code of your own) as with a real workspace.
A running job really starts its processes on this machine, in DIR/nodes. Nothing leaves the machine, nothing costs.

Make things go wrong: --faults script.json, a list such as
  [{{"fault": "refuse", "vm_size": "Standard_NC24ads_A100_v4", "how": "async"}},
   {{"fault": "preempt", "job": "*", "node": 1, "after_seconds": 20, "policy": "survive"}}]
or at any time over the control port:
  curl -d '{{"fault": "throttle", "operation": "job.get", "count": 3}}' -H content-type:application/json $CONTROL/fault
  curl -d '{{"advance_seconds": 600}}' -H content-type:application/json $CONTROL/clock
  curl -X POST $CONTROL/bought
where CONTROL is AZURE_EMULATOR_CONTROL of azure.env. Kinds of faults: {", ".join(FIELDS)};
their fields are described in harness/azure/emulator/faults.py, the verbs in harness/azure/emulator/control.py.
"""


def main() -> int:
    arguments = _arguments()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _forget(folder)
    faults = Faults()
    for spec in json.loads(arguments.faults.read_text()) if arguments.faults else []:
        faults.add(spec, time.time())
    warnings.filterwarnings("ignore", message="Unverified HTTPS request")  # of its own storage account
    certificates = make_certificates(folder / "certificates")
    with Azurite(
        certificate=certificates.server, key=certificates.key, oauth=True, port=arguments.storage_port
    ) as blobs:
        addresses = Addresses(storage=blobs.url, storage_suffix=f"core.localhost:{blobs.port}")
        workspace = Workspace(folder, addresses, certificates.ca, faults)
        arm, arm_socket = new_server(workspace.surface, certificates, arguments.port)
        control, control_socket = new_server(workspace.inside, None, arguments.control_port)
        addresses.base = f"https://127.0.0.1:{arm_socket.getsockname()[1]}"
        addresses.control = f"http://127.0.0.1:{control_socket.getsockname()[1]}"
        variables = environment(addresses, certificates.ca, RESOLVER, workspace.identity.header)

        async def serve() -> None:
            ticking = asyncio.create_task(tick_forever(workspace.tick))
            servers = (arm, control)
            _stop_on_signals(servers, arguments.leave_with_stdin)
            ticking.add_done_callback(lambda _: _stop(servers))
            serving = asyncio.gather(arm.serve([arm_socket]), control.serve([control_socket]))
            while not all(server.started for server in servers) and not serving.done():
                await asyncio.sleep(0.005)
            _announce(folder, variables, quiet=arguments.leave_with_stdin)
            await serving
            if not ticking.cancel():
                ticking.result()

        try:
            asyncio.run(serve())
        finally:
            _forget(folder)
            workspace.close()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m harness.azure.emulator",
        description="An Azure ML workspace with its storage account, emulated on loopback: the way to try the Azure "
        "path without Azure. Prints the environment that leads clients here, and runs until Ctrl-C.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="for certificates, azure.env, the nodes' files")
    parser.add_argument("--faults", type=Path, help="a JSON list of faults to come")
    parser.add_argument("--port", type=int, default=0, help="of the ARM surface (TLS); a free one by default")
    parser.add_argument("--control-port", type=int, default=0, help="of the control port (plain HTTP)")
    parser.add_argument("--storage-port", type=int, default=0, help="of the storage account (TLS)")
    parser.add_argument("--leave-with-stdin", action="store_true", help="stop when standard input ends; for tests")
    return parser.parse_args()


def _forget(folder: Path) -> None:
    """Remove what leads to an emulator that no longer answers, so that whoever waits for this one is not misled."""
    for name in (ENVIRONMENT, READY):
        (folder / name).unlink(missing_ok=True)


def _announce(folder: Path, variables: dict[str, str], quiet: bool) -> None:
    # The shell's own path, to a person's modules, stays behind the one that is added.
    more = {"PYTHONPATH": "${PYTHONPATH:+:$PYTHONPATH}"}
    lines = "".join(f"export {name}={shlex.quote(value)}{more.get(name, '')}\n" for name, value in variables.items())
    secret = folder / ENVIRONMENT
    part = secret.with_suffix(".part")
    part.touch(0o600)
    part.write_text(lines)
    os.replace(part, secret)
    if not quiet:
        print(
            f"{lines}\n# The same is in {secret}: source it in another terminal. Ctrl-C stops everything.", flush=True
        )
    ready = folder / READY
    ready.with_suffix(".part").write_text(json.dumps(variables))
    os.replace(ready.with_suffix(".part"), ready)


def _stop(servers: tuple[QuietServer, ...]) -> None:
    for server in servers:
        server.should_exit = server.force_exit = True


def _stop_on_signals(servers: tuple[QuietServer, ...], with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _stop, servers)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(_stop, servers)

    if with_stdin:
        threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    assert ACCOUNT  # the account that the certificate names is Azurite's
    sys.exit(main())

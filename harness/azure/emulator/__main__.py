"""``python -m harness.azure.emulator --folder DIR``: an Azure ML workspace on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from harness.azure.emulator.faults import FIELDS, Faults
from harness.azure.emulator.serving import Serving

ENVIRONMENT = "azure.env"
"""File for a shell, which is there once it answers."""
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
    secret = folder / ENVIRONMENT
    secret.unlink(missing_ok=True)  # of one that no longer answers: whoever waits for this one is not misled
    faults = Faults()
    for spec in json.loads(arguments.faults.read_text()) if arguments.faults else []:
        faults.add(spec, time.time())
    serving = Serving(folder, faults, (arguments.port, arguments.control_port, arguments.storage_port))

    def announce(variables: dict[str, str]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, serving.stop)
        _announce(secret, variables)

    try:
        serving.run(announce)
    finally:
        secret.unlink(missing_ok=True)
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
    return parser.parse_args()


def _announce(secret: Path, variables: dict[str, str]) -> None:
    # The shell's own path, to a person's modules, stays behind the one that is added.
    more = {"PYTHONPATH": "${PYTHONPATH:+:$PYTHONPATH}"}
    lines = "".join(f"export {name}={shlex.quote(value)}{more.get(name, '')}\n" for name, value in variables.items())
    part = secret.with_suffix(".part")
    part.touch(0o600)
    part.write_text(lines)
    os.replace(part, secret)
    print(f"{lines}\n# The same is in {secret}: source it in another terminal. Ctrl-C stops everything.", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""A Postgres of the test's own: a cluster in a temporary folder, behind a Unix socket, gone with the test."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """Why there is none here."""
    if not (shutil.which("initdb") and shutil.which("postgres")):
        return "initdb and postgres are not on the PATH"
    return None


@contextmanager
def postgres() -> Iterator[dict[str, Any]]:
    """``storage`` of a ``dagster.yaml``. The server refuses to be root's, so root starts it as nobody."""
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    owner = {"user": user} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="dtrain-pg-"))  # not pytest's: only its owner may look into that one
    shutil.chown(folder, user)
    data = folder / "data"
    try:
        command = ["initdb", "-D", str(data), "-U", "dagster", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner)
        server = subprocess.Popen(
            ["postgres", "-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-F"],
            stdout=subprocess.DEVNULL,
            stderr=open(folder / "log", "wb"),  # noqa: SIM115 - the server keeps it
            cwd=folder,
            start_new_session=True,
            **owner,
        )
        try:
            yield {
                "postgres": {
                    "postgres_db": {
                        "scheme": "postgresql+psycopg2",
                        "hostname": "",
                        "username": "dagster",
                        "db_name": "postgres",
                        "params": {"host": str(folder)},
                    }
                }
            }
        finally:
            server.send_signal(signal.SIGINT)  # asks sessions to end, and does not wait for them
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(10)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

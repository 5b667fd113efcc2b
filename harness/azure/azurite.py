"""Azurite, the storage emulator, on a free loopback port: installed from npm on first use, stopped by process id."""

from __future__ import annotations

import functools
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from filelock import FileLock

from harness.azure.ending import end

VERSION = "3.37.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and key that every Azurite has; they are public."""
START_SECONDS = 60.0
STOP_SECONDS = 10.0
SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_LISTENS = re.compile(r"listens on (https?)://([\d.]+):(\d+)")
_MAIN = "node_modules/azurite/dist/src/blob/main.js"
_HOOK = Path(__file__).with_name("leave_with_parent.cjs")


@functools.cache
def missing() -> str:
    """Why Azurite cannot run on this machine; "" if it can. Installs it where that was not done yet."""
    absent = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found: install Node.js 20 or newer, from which Azurite {VERSION} is started"
    try:
        install()
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


def install() -> Path:
    """The folder in which Azurite lies; made once, by whoever comes first, in ``TEST_CACHE`` or ``~/.cache``.

    RuntimeError, with npm's words, where the registry cannot be reached.
    """
    cache = Path(os.environ.get("TEST_CACHE") or Path.home() / ".cache" / "dtrain-tests")
    folder = cache / f"azurite-{VERSION}"
    if (folder / _MAIN).exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"azurite-{VERSION}.lock"):
        if (folder / _MAIN).exists():
            return folder
        building = Path(tempfile.mkdtemp(prefix=f"azurite-{VERSION}-", dir=cache))
        try:
            command = ["npm", "install", "--prefix", str(building), "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(
                [*command, f"azurite@{VERSION}"], capture_output=True, text=True, timeout=600, env=_npm_environment()
            )
            if done.returncode:
                raise RuntimeError(f"npm could not install azurite@{VERSION}:\n{done.stderr[-2000:]}")
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _npm_environment() -> dict[str, str]:
    """Node does not look at the system's certificate authorities by itself; behind a company's proxy it must."""
    known = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or SYSTEM_AUTHORITIES
    return {**({"NODE_EXTRA_CA_CERTS": known} if os.path.exists(known) else {}), **os.environ}


class Azurite:
    """A storage account in memory, as a context manager; what is in it is lost when it stops.

    ``certificate`` and ``key`` (PEM files) turn TLS on. ``oauth`` (with TLS only) lets it take bearer tokens of
    identities too: `environment` then names its URL instead of a key. ``port`` 0 picks a free one.
    """

    def __init__(
        self,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        oauth: bool = False,
        port: int = 0,
    ) -> None:
        if oauth and certificate is None:
            raise ValueError("Azurite takes tokens over TLS only: give a certificate and its key")
        self.oauth, self.port = oauth, port
        self._tls = ["--cert", str(certificate), "--key", str(key)] if certificate else []
        self._scheme = "https" if certificate else "http"
        self._process: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=40)
        self._listens = threading.Event()

    def __enter__(self) -> Azurite:
        command = [
            shutil.which("node") or "node", "--require", str(_HOOK), str(install() / _MAIN),
            "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--skipApiVersionCheck", "--inMemoryPersistence",
            "--silent", "--disableTelemetry", *self._tls, *(["--oauth", "basic"] if self.oauth else []),
        ]  # fmt: skip
        # A session of its own: Ctrl-C ends the tests, and they end Azurite, in this order.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        if not self._listens.wait(START_SECONDS) or not self.port:
            self.stop()
            raise RuntimeError("Azurite did not start:\n" + "".join(self._said))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; again without harm."""
        process, self._process = self._process, None
        if process is not None:
            end(process, STOP_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    @property
    def url(self) -> str:
        """The account's URL, path style."""
        return f"{self._scheme}://127.0.0.1:{self.port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        """With the key that every Azurite has."""
        return connection_string(self.url)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process finds this account: by key, or (``oauth``) by its own identity."""
        if self.oauth:
            return {"AZURE_STORAGE_ACCOUNT_URL": self.url}
        return {"AZURE_STORAGE_CONNECTION_STRING": self.connection_string}

    def create_container(self, name: str) -> None:
        """Make a container, by key; nothing happens where there is one."""
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        # The key's own path, whatever CA the certificate came from: this is the tests' side of the account.
        with BlobServiceClient.from_connection_string(self.connection_string, connection_verify=False) as service:
            try:
                service.create_container(name)
            except ResourceExistsError:
                return

    def _read(self) -> None:
        """Drain what it prints, so that it never waits for us; its first words give the port."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                self._said.append(line)
                if found := _LISTENS.search(line):
                    self.port = int(found[3])
                    self._listens.set()
        self._listens.set()


def connection_string(url: str) -> str:
    """For an account at this URL (of Azurite, or of something in front of it)."""
    protocol = url.partition(":")[0]
    return f"DefaultEndpointsProtocol={protocol};AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url};"

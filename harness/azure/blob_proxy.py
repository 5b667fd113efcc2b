"""A real HTTP proxy in front of Azurite that does what networks and busy accounts do: drops, cuts, refuses, delays."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from harness.azure.azurite import ACCOUNT, connection_string

KINDS = ("drop", "lost answer", "cut answer", "busy", "busy afterwards", "slow")


@dataclass(slots=True)
class Fault:
    """What happens to the next ``times`` requests of this method whose address holds this text.

    ``drop``: never forwarded, the connection closes. ``lost answer``: carried out, and the connection closes.
    ``cut answer``: it closes within the answer. ``busy``: answered ``status``, not forwarded. ``busy afterwards``:
    carried out, and answered so. ``slow``: forwarded after ``seconds``.
    """

    kind: str
    method: str = ""
    holds: str = ""
    times: int = 1
    status: int = 503
    retry_after: int | None = None
    seconds: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}")


def _wait(seconds: float) -> None:
    """Not `time.sleep`, which tests put something else in the place of, in the same process."""
    if seconds:
        threading.Event().wait(seconds)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is nothing to tell of."""


class BlobProxy:
    """Stands in front of an account; a context manager. ``faults`` are used up in order; ``chaos`` gives more."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        """Method and address of every request, in the order in which they came."""
        self.injected: list[str] = []
        self.delay_seconds = 0.0
        """By which every request is held up."""
        self.versions = False
        """Name versions, as an account does that keeps them (Azurite keeps none): ``v1``, ``v2``, … in this order."""
        self._named = 0
        self.chaos: Callable[[str], str | None] = lambda method: None
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{ACCOUNT}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AZURE_STORAGE_CONNECTION_STRING": connection_string(self.url)}

    def misbehave(self, seed: int, share: float) -> None:
        """From now on, hit this share of all requests, at random."""
        source = random.Random(seed)
        self.chaos = lambda method: source.choice(KINDS) if source.random() < share else None

    def sent(self, method: str, holds: str) -> int:
        """How many such requests came."""
        return sum(method == one and holds in address for one, address in self.requests)

    def __enter__(self) -> BlobProxy:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_fault(self, method: str, address: str) -> Fault | None:
        """The fault for a request that has just come, which it uses up."""
        with self._lock:
            self.requests.append((method, address))
            for fault in self.faults:
                if fault.times and fault.method in ("", method) and fault.holds in address:
                    fault.times -= 1
                    self.injected.append(fault.kind)
                    return fault
            kind = self.chaos(method)
            if kind:
                self.injected.append(kind)
            return Fault(kind) if kind else None

    def next_version(self) -> str:
        with self._lock:
            self._named += 1
            return f"v{self._named}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.next_fault(self.command, self.path)
                kind = fault.kind if fault else ""
                _wait(proxy.delay_seconds)
                if kind == "drop":
                    return self._hang_up()
                if fault and kind == "slow":
                    _wait(fault.seconds)
                if fault and kind == "busy":
                    return self._refuse(fault)
                upstream = http.client.HTTPConnection(proxy._host, proxy._port, timeout=60)
                try:
                    upstream.request(self.command, self.path, body, dict(self.headers))
                    answer = upstream.getresponse()
                    content = answer.read()
                finally:
                    upstream.close()
                if kind == "lost answer":
                    return self._hang_up()
                if fault and kind == "busy afterwards":
                    return self._refuse(fault)
                self.send_response(answer.status, answer.reason)
                length = str(len(content))
                for name, value in answer.getheaders():
                    if name.lower() == "content-length":
                        length = value  # of a HEAD too
                    elif name.lower() not in ("transfer-encoding", "connection", "keep-alive"):
                        self.send_header(name, value)
                if proxy.versions and self.command == "PUT" and "comp=block&" not in self.path:
                    self.send_header("x-ms-version-id", proxy.next_version())
                self.send_header("Content-Length", "10" if kind == "cut answer" and not content else length)
                self.end_headers()
                if kind == "cut answer":
                    self.wfile.write(content[: len(content) // 2])
                    return self._hang_up()
                self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = serve

            def _refuse(self, fault: Fault) -> None:
                self.send_response(fault.status)
                if fault.retry_after is not None:
                    self.send_header("Retry-After", str(fault.retry_after))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _hang_up(self) -> None:
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on the console."""

        return Handler

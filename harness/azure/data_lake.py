"""An account of ADLS Gen2 on loopback: Azurite, with an emulated DFS endpoint before it.

Azurite has the Blob endpoint alone. azure-storage-filedatalake sends most of what it does to that one as well
(properties, leases, downloads); what it sends to the DFS endpoint is put here into requests of Blob: create, append,
flush, delete. Tokens, leases and conditions are passed on, and Azurite decides. **Emulated**: that the real DFS
endpoint answers so is taken from the documents of its REST interface. What Blob's host is asked goes to Azurite as it
is.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from harness.azure.azurite import ACCOUNT

HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
PASSED = ("authorization", "date", "x-ms-date", "x-ms-version", "x-ms-client-request-id", "x-ms-lease-id")
CONDITIONS = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")


@dataclass
class DataLake:
    """The account as a context manager; ``url`` is Azurite's (TLS, path style), ``certificates`` a folder with
    ``ca.pem``, ``server.pem`` and ``server.key`` for the account's host names."""

    url: str
    certificates: Path
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Endpoint (``blob`` or ``dfs``), method and query of each request that came."""

    def __enter__(self) -> DataLake:
        lake = self

        class Handler(_Handler):
            account = lake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificates / "server.pem", self.certificates / "server.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def suffix(self) -> str:
        """What follows ``<account>.dfs.`` in its host's name."""
        return f"core.localhost:{self._server.server_address[1]}"

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> http.client.HTTPResponse:
        """Azurite's answer, to be read."""
        parts = urlsplit(self.url)
        context = ssl.create_default_context(cafile=str(self.certificates / "ca.pem"))
        connection = http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=30, context=context)
        connection.request(method, f"/{ACCOUNT}{path}", body, headers)
        return connection.getresponse()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    account: DataLake

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        endpoint = self.headers["Host"].split(".")[1]
        parts = urlsplit(self.path)
        self.account.requests.append((endpoint, self.command, parts.query))
        if endpoint == "blob":
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            return self._answer(self.account.ask(self.command, self.path, headers, body))
        self._answer_dfs(parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = handle_any

    def _answer_dfs(self, path: str, query: dict[str, str], body: bytes) -> None:
        ask = self.account.ask
        plain = {name: self.headers[name] for name in PASSED if name in self.headers}
        full = plain | {name: self.headers[name] for name in CONDITIONS if name in self.headers}
        if self.command == "PUT" and query.get("resource") == "file":
            return self._answer(ask("PUT", path, {**full, "x-ms-blob-type": "BlockBlob"}, b""))
        if self.command == "PATCH" and query.get("action") == "append":
            done = ask("PUT", f"{path}?comp=block&blockid={_block(int(query['position']))}", plain, body)
            return self._answer(done, {201: 202})
        if self.command == "PATCH" and query.get("action") == "flush":
            # Blocks lie one behind the other, so that their positions are known from what Azurite still holds.
            listing = ask("GET", f"{path}?comp=blocklist&blocklisttype=uncommitted", plain, b"").read().decode()
            names = [part.partition("</Name>")[0] for part in listing.split("<Name>")[1:]]
            blocks = sorted(names, key=lambda name: base64.b64decode(name))
            chosen = "".join(f"<Uncommitted>{name}</Uncommitted>" for name in blocks)
            content = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{chosen}</BlockList>'.encode()
            return self._answer(ask("PUT", f"{path}?comp=blocklist", full, content), {201: 200})
        if self.command == "DELETE":
            return self._answer(ask("DELETE", path, full, b""), {202: 200})
        self.send_error(501, f"not emulated: {self.command} {query}")

    def _answer(self, answer: http.client.HTTPResponse, statuses: dict[int, int] | None = None) -> None:
        content = answer.read()
        self.send_response_only((statuses or {}).get(answer.status, answer.status))
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Prints nothing."""


def _block(position: int) -> str:
    return quote(base64.b64encode(f"{position:020d}".encode()).decode(), safe="")

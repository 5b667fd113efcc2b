"""The guard of this project's web servers: they answer their own pages and programs, never another website.

A browser carries a website's requests to servers of the user's own machine, which trust it because of where it runs.
Headers that a website's scripts cannot change give it away: `Host` (a foreign name that was pointed at this machine),
`Origin`, and `Sec-Fetch-Site`. `judge_request` decides, from these alone; `Guard` carries it out around an ASGI
application. A client without any of them is no browser, but a program of a user who is on this machine anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY_BYTES = 8 * 2**20
READING = ("GET", "HEAD")
HEADERS = {
    "x-frame-options": "SAMEORIGIN",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
"""No other site frames a page, embeds a file or holds its window."""
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_SINGLE = ("host", "origin", "sec-fetch-site", "content-type", "content-length")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PORTS = {"http": 80, "https": 443}

Headers = Sequence[tuple[str, str]]
"""Pairs of a name in lower case and a value, in order of arrival; a name may be there twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The settings in which guarded servers differ."""

    names: frozenset[str] = frozenset(LOOPBACK)
    """The names and addresses that `Host` may have, in lower case; IPv6 without brackets."""
    json_only: bool = False
    """Whether every POST must be JSON, which a form of a website cannot send; no other method changes anything."""
    pages: frozenset[str] = frozenset()
    """Paths that a GET may ask for as a page only, with nothing after a ``?``: a query there would have effects."""
    most_body_bytes: int | None = MOST_BODY_BYTES
    """The longest body; a longer one is refused unread; None for no limit."""
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)
    """Headers of every answer that has not its own of these names, refusals included."""
    look_through: Callable[[str, str, bytes], str | None] | None = None
    """Returns why a POST of this path, query and body is refused, or None. Without it no body is read."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer instead of the application's: an HTTP status, and a sentence for the client."""

    status: int
    reason: str


def rules_for(host: str, names: Sequence[str] = (), **more: object) -> Rules:
    """Return the rules of a server that listens on ``host`` and also answers to ``names``."""
    known = {name.strip("[]").lower() for name in (*LOOPBACK, host, *names)}
    return Rules(names=frozenset(known), **more)  # type: ignore[arg-type]


def judge_request(
    rules: Rules, method: str, path: str, query: str, headers: Headers, websocket: bool = False
) -> Refused | None:
    """Return the refusal of a request, None where it may pass. ``query`` follows the ``?``. Pure."""
    given: dict[str, str] = {}
    for name, value in headers:
        if name in given and name in _SINGLE:
            return Refused(400, f"the request has more than one {name} header")
        given.setdefault(name, value.strip())
    if _CONTROL.search(path):  # a route ends with ``$``, which a newline may follow: ``/graphql%0A`` would be GraphQL
        return Refused(400, "the path of the request has a control character in it")
    refused = _judge_host(rules, given) or _judge_site(rules, method, path, query, given, websocket)
    if refused or websocket:
        return refused
    return _judge_method(rules, method, path, query, given) or _judge_body(rules, method, given)


def _judge_host(rules: Rules, given: Mapping[str, str]) -> Refused | None:
    known = _authority(given.get("host", ""))
    if known is None:
        return Refused(400, "the request has no Host header that names a server")
    if known[0] not in rules.names:
        return Refused(
            403,
            f"this server does not answer to the name {known[0]!r}: a website may have pointed it at this machine. "
            f"Where it is yours, start the server with --allow-host {known[0]}",
        )
    return None


def _judge_site(
    rules: Rules, method: str, path: str, query: str, given: Mapping[str, str], websocket: bool
) -> Refused | None:
    origin, site = given.get("origin"), given.get("sec-fetch-site")
    if origin is None and websocket:
        return Refused(403, "only a page of this server may open a websocket, and it sends its Origin")
    if origin is not None and not _same_origin(origin, given["host"]):
        return Refused(
            403,
            f"the request was sent by a page of {origin[:200]!r}, but this server takes only those of its own pages. "
            "Behind a proxy, have it pass on the Host header that the browser sent",
        )
    if site in (None, "same-origin", "none"):
        return None
    followed = (given.get("sec-fetch-mode"), given.get("sec-fetch-dest")) == ("navigate", "document")
    if followed and method in READING and not websocket and not query and path.rstrip("/") not in rules.pages:
        return None  # a user follows a link to a page: it changes nothing, and the other site cannot read it
    return Refused(
        403,
        "the request was sent by another website. If you followed a link that you trust, copy its address into the "
        "browser's address bar",
    )


def _judge_method(rules: Rules, method: str, path: str, query: str, given: Mapping[str, str]) -> Refused | None:
    if not rules.json_only:
        return None
    if method not in (*READING, "POST"):
        return Refused(405, f"this server takes GET, HEAD and POST, not {method[:20]!r}")
    is_page = not query and "text/html" in given.get("accept", "")
    if method in READING and path.rstrip("/") in rules.pages and not is_page:
        return Refused(405, f"{path[:100]} cannot be asked by GET: POST it as application/json")
    return None


def _judge_body(rules: Rules, method: str, given: Mapping[str, str]) -> Refused | None:
    if method in READING:
        return None
    if rules.json_only and not _is_json(given.get("content-type", "")):
        return Refused(415, "this server takes POST requests only with content-type: application/json")
    if rules.most_body_bytes is None:
        return None
    length = given.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        return Refused(411, "say how long the request is, in a content-length header")
    if len(length) > 15 or int(length) > rules.most_body_bytes:
        return Refused(413, f"this server takes at most {rules.most_body_bytes:,} bytes")
    return None


def _is_json(content_type: str) -> bool:
    kind, _, parameters = content_type.lower().partition(";")
    return kind.strip() == "application/json" and parameters.strip() in ("", "charset=utf-8", 'charset="utf-8"')


def _same_origin(origin: str, host: str) -> bool:
    """Return whether this is the origin of a page from the server of that name. The scheme is not compared: of a server
    behind one that ends TLS only the browser knows it."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme not in _PORTS or origin != f"{parts.scheme}://{parts.netloc}":
        return False
    there, here = _authority(parts.netloc), _authority(host)
    if there is None or here is None:
        return False
    default = _PORTS[parts.scheme]
    return (there[0], there[1] or default) == (here[0], here[1] or default)


def _authority(text: str) -> tuple[str, int | None] | None:
    """Return (name in lower case, port) of ``name:port``; None for anything else."""
    match = _AUTHORITY.fullmatch(text)
    return (match[1].strip("[]").lower(), int(match[2]) if match[2] else None) if match else None


class Guard:
    """An ASGI application around another, which sees only what `judge_request` passes; it adds headers to answers."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        websocket, tell = scope["type"] == "websocket", _with_headers(send, self.rules.headers)
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        query = scope["query_string"].decode("latin-1")
        refused = judge_request(self.rules, scope.get("method", "GET"), scope["path"], query, headers, websocket)
        if refused is None:
            with suppress(ClientDisconnect):  # in the middle of a request: there is no one to answer
                if self.rules.look_through is not None and not websocket and scope["method"] not in READING:
                    body = await Request(scope, receive).body()  # its length was judged by its headers
                    if reason := await run_in_threadpool(self.rules.look_through, scope["path"], query, body):
                        told = {"data": None, "errors": [{"message": reason}]}  # GraphQL's form: the page shows it
                        await JSONResponse(told, 400)(scope, receive, tell)
                        return
                    receive = _after(body, receive)
                await self.app(scope, receive, tell)
        elif websocket:
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": refused.reason[:100]})
        else:
            # The request's body is not read, so the connection cannot be used for another request.
            refusal = PlainTextResponse(f"{refused.reason}.\n", refused.status, {"connection": "close"})
            await refusal(scope, receive, tell)


def _after(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives an application a body which was read already."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {bytes(name).lower() for name, _ in message.get("headers", ())}
            own = [(name.encode(), value.encode()) for name, value in headers.items() if name.encode() not in given]
            message["headers"] = [*message.get("headers", ()), *own]
        await send(message)

    return with_headers

"""Answers of the dashboard's server, as all of its routes give them."""

from __future__ import annotations

import gzip
import json

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from trainer.secrets.redaction import redact

COMPRESSED_BYTES = 16 * 2**10
"""The least size of an answer that is compressed."""


def respond(request: Request, body: bytes, tag: str = "", media_type: str = "application/json") -> Response:
    """Return an answer with this tag, or "not modified" for a browser that has it already."""
    headers = {"etag": tag} if tag else {}
    if tag and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if len(body) >= COMPRESSED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = gzip.compress(body, 1), "gzip"
    return Response(body, media_type=media_type, headers=headers)


def refuse(words: str, status: int) -> Response:
    """Return the answer that something cannot be done or read, in words, without secrets."""
    return PlainTextResponse(redact(words).encode(errors="replace"), status)


def encode(value: object) -> bytes:
    """Return JSON in ASCII: a lone surrogate, which a node may have written, has no UTF-8."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def read_number(text: str) -> int:
    """Return a whole number of a query; 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0

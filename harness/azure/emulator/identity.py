"""Managed identity on loopback: JWTs, in the dialects of App Service (the orchestrator) and of Azure ML's nodes.

Azurite (``--oauth basic``) does not check signatures, but issuer, audience and times; the emulator checks all of it.
Tokens live by the machine's clock, not by the emulator's: their readers have no other.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import jwt
from fastapi import APIRouter, Header

from harness.azure.emulator.answers import Refusal
from harness.azure.emulator.state import TENANT

LIFE_SECONDS = 3600
ISSUER = f"https://sts.windows.net/{TENANT}/"
AUDIENCES = ("https://management.azure.com", "https://management.core.windows.net", "https://ml.azure.com")


class Identity:
    """Gives tokens to whoever knows the header's secret, and knows its own again."""

    def __init__(self) -> None:
        self.header = secrets.token_hex(16)
        self.secret = secrets.token_hex(16)
        """What App Service (``IDENTITY_HEADER``) and the nodes (``MSI_SECRET``) put into their environment."""
        self._key = secrets.token_bytes(32)

    def token(self, resource: str, who: str) -> dict[str, Any]:
        """The answer of a token endpoint, which is made of strings."""
        now = int(time.time())
        claims = {
            "aud": resource,
            "iss": ISSUER,
            "iat": now - 5,
            "nbf": now - 5,
            "exp": now + LIFE_SECONDS,
            "appid": f"00000000-0000-4000-8000-{who.encode().hex()[:12]:0>12}",
            "oid": f"00000000-0000-4000-8000-{who.encode().hex()[:12]:0>12}",
            "tid": TENANT,
            "ver": "1.0",
            "name": who,
        }
        return {
            "access_token": jwt.encode(claims, self._key, algorithm="HS256"),
            "expires_on": str(now + LIFE_SECONDS),
            "expires_in": str(LIFE_SECONDS),
            "not_before": str(now - 5),
            "resource": resource,
            "token_type": "Bearer",
            "client_id": claims["appid"],
        }

    def check(self, authorization: str | None, base: str) -> dict[str, str]:
        """Who is asking, as the token says (``name``, ``oid``…). `Refusal` (401) without a token of ours for this
        service."""
        scheme, _, token = (authorization or "").partition(" ")
        challenge = {"WWW-Authenticate": f'Bearer authorization_uri="{ISSUER}"'}
        if scheme.lower() != "bearer" or not token:
            raise Refusal(401, "AuthenticationFailed", "Authentication failed: no bearer token.", challenge)
        try:
            claims: dict[str, str] = jwt.decode(
                token, self._key, algorithms=["HS256"], issuer=ISSUER, audience=[base, f"{base}/", *_slashed(AUDIENCES)]
            )
        except jwt.InvalidTokenError as error:
            raise Refusal(
                401, "InvalidAuthenticationToken", f"The access token is invalid: {error}", challenge
            ) from None
        return claims


def _slashed(audiences: tuple[str, ...]) -> list[str]:
    return [*audiences, *(f"{audience}/" for audience in audiences)]


def identity_routes(identity: Identity) -> APIRouter:
    router = APIRouter()

    @router.get("/identity/app-service", name="identity.app_service")
    async def app_service(resource: str, x_identity_header: str = Header(default="")) -> dict[str, Any]:
        if not secrets.compare_digest(x_identity_header, identity.header):
            raise Refusal(401, "Unauthorized", "X-IDENTITY-HEADER is not that of this process's environment.")
        return identity.token(resource, "orchestrator")

    @router.get("/identity/node", name="identity.node")
    async def node(resource: str, secret: str = Header(default="")) -> dict[str, Any]:
        if not secrets.compare_digest(secret, identity.secret):
            raise Refusal(401, "Unauthorized", "The header `secret` is not that of the node's environment.")
        return identity.token(resource, "node")

    return router

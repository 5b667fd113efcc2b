"""TLS between nodes: contexts that require a certificate from both sides, here from the files of ``training.tls``.

Certificates that the members of a launch make for themselves are in `trainer.comm.launch_certificate`.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Protocol

from trainer.errors import ConfigError

if TYPE_CHECKING:  # the process that watches peers loads little
    from trainer.config import TLSConfig


class TLSContexts(Protocol):
    """The contexts for the next connection of this process. They may change, so nobody keeps one for long."""

    @property
    def server(self) -> ssl.SSLContext:
        """The context of the accepting side."""
        ...

    @property
    def client(self) -> ssl.SSLContext:
        """The context of the connecting side."""
        ...


class CertificateFiles:
    """The contexts of ``training.tls``, read once; raises `ConfigError` with the file that cannot be used."""

    def __init__(self, tls: TLSConfig) -> None:
        self.server, self.client = server_context(tls), client_context(tls)


def server_context(tls: TLSConfig) -> ssl.SSLContext:
    """Return the context of the accepting side. Raise `ConfigError` with the file that cannot be used."""
    context = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody resumes a session
    return context


def client_context(tls: TLSConfig) -> ssl.SSLContext:
    """Return the context of the connecting side. Host names are not compared, because nodes are addressed by number
    and the authority is the job's own. Raise `ConfigError` with the file that cannot be used.

    Every node both accepts and connects, so a certificate whose purpose is limited must name server and client."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: TLSConfig, protocol: int) -> ssl.SSLContext:
    for name, path in (("ca", tls.ca), ("certificate", tls.certificate), ("key", tls.key)):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:  # ssl's own does not say which file
            raise ConfigError(f"training.tls.{name} = {path!r} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"training.tls.ca = {tls.ca!r} does not hold a PEM certificate: {error}") from error
    try:
        context.load_cert_chain(tls.certificate, tls.key, password="")  # without one, OpenSSL would ask at the terminal
    except ssl.SSLError as error:
        raise ConfigError(
            f"training.tls.certificate = {tls.certificate!r} and training.tls.key = {tls.key!r} must be a certificate "
            f"and its key, both PEM and without a passphrase: {error}"
        ) from error
    return context

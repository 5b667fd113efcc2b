"""TLS between nodes: contexts from ``training.tls`` in which both sides have to show a certificate (D6)."""

from __future__ import annotations

import ssl

from trainer.config import ConfigError, TLSConfig


def server_context(tls: TLSConfig) -> ssl.SSLContext:
    """For who accepts connections. `ConfigError` names a file that cannot be used."""
    return _context(tls, ssl.PROTOCOL_TLS_SERVER)


def client_context(tls: TLSConfig) -> ssl.SSLContext:
    """For who connects. Host names are not compared, for nodes are addressed by number: the authority is the job's."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: TLSConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"training.tls.ca = {tls.ca!r} cannot be used: {error}") from error
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"training.tls.certificate = {tls.certificate!r} with key {tls.key!r} cannot be used: {error}"
        ) from error
    return context

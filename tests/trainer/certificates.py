"""Certificates of nodes for tests, made with `trustme`."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

from trainer.config import TLSConfig

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates of nodes, and puts all of it into a folder."""

    def __init__(self, folder: Path, name: str = "job") -> None:
        self.folder, self.name = folder, name
        self._authority = trustme.CA(organization_name=f"authority of {name}")
        self.ca = self._write("ca.pem", self._authority.cert_pem.bytes())

    def node(self, name: str = "node", expires: datetime.timedelta = DAY, passphrase: bytes | None = None) -> TLSConfig:
        """A node's certificate and key. ``expires``: from now on; the past, where it is negative."""
        now = datetime.datetime.now(datetime.UTC)
        made = self._authority.issue_cert(common_name=name, not_before=now - 7 * DAY, not_after=now + expires)
        key = made.private_key_pem.bytes()
        if passphrase:
            how = serialization.BestAvailableEncryption(passphrase)
            plain = serialization.load_pem_private_key(key, None)
            key = plain.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
        [certificate] = (pem.bytes() for pem in made.cert_chain_pems)
        return TLSConfig(
            certificate=self._write(f"{name}.pem", certificate), key=self._write(f"{name}.key", key), ca=self.ca
        )

    def _write(self, name: str, content: bytes) -> str:
        file = self.folder / f"{self.name}-{name}"
        file.write_bytes(content)
        return str(file)


def meet(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str | OSError, str | OSError]:
    """What becomes of a connection between the two, at the server and at the client: the version of TLS, or the error.
    A client of TLS 1.3 learns that it is refused when it reads."""
    theirs, ours = socket.socketpair()
    told: list[str | OSError] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as there:
                there.sendall(b"x")
                there.recv(1)
                told.append(str(there.version()))
        except OSError as error:
            told.append(error)

    for end in (theirs, ours):
        end.settimeout(20)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours) as here:
            here.sendall(b"x" * (here.recv(1) == b"x"))
            mine: str | OSError = str(here.version())
            if not told:
                thread.join(20)
    except OSError as error:
        mine = error
    thread.join(20)
    return told[0], mine

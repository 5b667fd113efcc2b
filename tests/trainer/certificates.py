"""Certificates of nodes for tests, made with `trustme`."""

from __future__ import annotations

import datetime
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

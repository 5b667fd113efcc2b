"""Certificates for tests, made with `cryptography` (MLflow and the Azure clients depend on it)."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trainer.config import TLSConfig

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates of nodes, and puts all of it into a folder."""

    def __init__(self, folder: Path, name: str = "job") -> None:
        self.folder, self.name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(f"authority of {name}")
        self.ca = self._write("ca", self._certificate(self._subject, self._key, DAY, is_authority=True))

    def node(self, name: str = "node", expires: datetime.timedelta = DAY, passphrase: bytes | None = None) -> TLSConfig:
        """A node's certificate and key. ``expires``: from now on; the past, where it is negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._write(name, self._certificate(_named(name), key, expires, is_authority=False))
        how = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        file = self.folder / f"{self.name}-{name}.key"
        file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
        return TLSConfig(certificate=certificate, key=str(file), ca=self.ca)

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, expires: datetime.timedelta, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 7 * DAY)
            .not_valid_after(now + expires)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate) -> str:
        file = self.folder / f"{self.name}-{name}.pem"
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(file)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

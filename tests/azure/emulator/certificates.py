"""A certificate authority that lives as long as the emulator, and the certificate of its servers."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFE = datetime.timedelta(days=30)
ACCOUNT = "devstoreaccount1"
"""The storage account that Azurite has."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: what clients trust (``ca``), and what the servers show."""

    ca: Path
    server: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """An authority and one certificate for localhost, 127.0.0.1 and the storage account's host names."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _named("CA of the Azure ML emulator")
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    ca = (
        _builder(authority, authority, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(True, key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [
        x509.DNSName(name)
        for name in ("localhost", f"{ACCOUNT}.blob.core.localhost", f"{ACCOUNT}.dfs.core.localhost", "ml.localhost")
    ]
    names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    server = (
        _builder(_named("localhost"), authority, key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    made.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    made.server.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    made.key.touch(0o600)
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + LIFE)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

"""Certificates that the members of one launch make for themselves, so that connections are encrypted without setup.

All members derive the same certificate authority from the launch's secret. Each makes a key of its own, which never
leaves its memory, and issues itself a certificate that is valid for days. A member trusts this authority alone.

TLS 1.3 agrees on new keys for each connection: who records traffic, and learns the launch's secret later, cannot read
it. Who has the secret during the launch is a member, here as in `trainer.comm.handshake`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import ssl
import tempfile
import threading
import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trainer.comm.launch_secret import LaunchSecret

VALID_FROM = datetime.timedelta(days=-1)
VALID_UNTIL = datetime.timedelta(days=2)
"""A certificate's validity, from the time at which it is made. A day before and after, because nodes whose clocks
differ by hours still have to train together; the key did not exist before, so an early date gives nothing away."""
RENEW_SECONDS = 12 * 3600.0
"""The age at which the next connection gets a new certificate. Connections that exist are not affected."""
_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The number of points of the curve, P-256: private keys are whole numbers from 1 to one less."""
_AUTHORITY_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_UNTIL = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


class LaunchCertificate:
    """A member's certificate, and the contexts with it for TLS 1.3 that require one from the other side, too.

    Connections are for members of the same launch and the same ``about`` (a job). Any thread may use it."""

    def __init__(self, secret: LaunchSecret, *about: object) -> None:
        """Raise ValueError for a secret without a value: anybody could make such certificates."""
        if not secret.is_given:
            raise ValueError("a launch without a secret has no certificate authority")
        self._authority_key = derive_authority_key(secret, *about)
        self._authority = _make_authority(self._authority_key)
        self._lock = threading.Lock()
        self._made_at = time.monotonic()
        self._server, self._client = self._make_contexts()

    @property
    def server(self) -> ssl.SSLContext:
        """The context of the accepting side, for the next connection."""
        self._renew()
        return self._server

    @property
    def client(self) -> ssl.SSLContext:
        """The context of the connecting side, for the next connection. Host names are not compared: nodes are addressed
        by number, and only members have a certificate."""
        self._renew()
        return self._client

    def _renew(self) -> None:
        with self._lock:
            if time.monotonic() - self._made_at > RENEW_SECONDS:
                self._made_at = time.monotonic()
                self._server, self._client = self._make_contexts()

    def _make_contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        certificate, key = issue_certificate(self._authority_key, self._authority)
        return tuple(  # type: ignore[return-value]
            make_context(protocol, self._authority, certificate, key)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )


def derive_authority_key(secret: LaunchSecret, *about: object) -> ec.EllipticCurvePrivateKey:
    """Return the private key of the certificate authority of a launch; every member derives the same."""
    # Twice as many bits as the order has, so that the remainder is as good as uniform.
    seed = secret.key("authority 1", *about) + secret.key("authority 2", *about)
    return ec.derive_private_key(int.from_bytes(seed) % (_ORDER - 1) + 1, _CURVE)


def issue_certificate(
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    valid_from: datetime.timedelta = VALID_FROM,
    valid_until: datetime.timedelta = VALID_UNTIL,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a new certificate of the authority and its new private key."""
    key, now = ec.generate_private_key(_CURVE), datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dtrain member")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + valid_from)
        .not_valid_after(now + valid_until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256()), key


def make_context(
    protocol: int, authority: x509.Certificate, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> ssl.SSLContext:
    """Return a context for TLS 1.3 that trusts this authority alone, and requires a certificate of the other side."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=_pem(authority).decode())
    load_key(context, certificate, key)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes a session
    return context


def load_key(context: ssl.SSLContext, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Give a context its certificate and key. ``ssl`` reads them from a path only, so on Linux they are in a file that
    exists in memory alone, under no name, until they are read. Where a system has none, they are in a file of mode 0600
    in the temporary folder for that moment, with the key encrypted by a random password that is never written."""
    with contextlib.suppress(OSError, AttributeError):  # without memfd_create, or without /proc
        descriptor = os.memfd_create("dtrain-certificate")
        with open(descriptor, "wb") as file:
            file.write(_pem(certificate) + _key_pem(key, serialization.NoEncryption()))
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            return
    password = secrets.token_hex(32)
    with tempfile.NamedTemporaryFile(prefix="dtrain-certificate-") as file:  # mode 0600
        encrypted = serialization.BestAvailableEncryption(password.encode())
        file.write(_pem(certificate) + _key_pem(key, encrypted))
        file.flush()
        context.load_cert_chain(file.name, password=password)


def _make_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return the authority's certificate. Each member makes its own: what counts is the key. It does not expire within
    any training, whatever a node's clock says, since the key ends with the launch's secret."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dtrain launch")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_AUTHORITY_FROM)
        .not_valid_after(_AUTHORITY_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_usage(digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

"""A certificate authority that lives as long as the emulator, and the certificate of its servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

ACCOUNT = "devstoreaccount1"
"""The storage account that Azurite has."""
HOSTS = ("localhost", "127.0.0.1", f"{ACCOUNT}.blob.core.localhost", f"{ACCOUNT}.dfs.core.localhost", "ml.localhost")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: what clients trust (``ca``), and what the servers show."""

    ca: Path
    server: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """An authority and one certificate for localhost, 127.0.0.1 and the storage account's host names."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA(organization_name="CA of the Azure ML emulator")
    server = authority.issue_cert(*HOSTS)
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(made.ca)
    server.cert_chain_pems[0].write_to_path(made.server)
    made.key.touch(0o600)
    server.private_key_pem.write_to_path(made.key)
    return made

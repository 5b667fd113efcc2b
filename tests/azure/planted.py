"""Secrets that look like none and are found wherever they turn up: planted where a product could pick them up."""

from __future__ import annotations

import base64
import sqlite3
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

MARK = "pl4nt3d"


def planted(name: str) -> str:
    """A secret of that name. Its characters survive in JSON, but not in an address."""
    return f"{MARK}/{name}+{name[::-1]}=="


ENVIRONMENT = {
    name: planted(name.lower().replace("_", "-"))
    for name in (
        "AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_KEY",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MSI_SECRET",
        "DTRAIN_SOMEBODYS_TOKEN",
    )
}
"""Variables that a process on the Azure path may have, each with a secret."""


def leaks(places: Iterable[Path], secrets: Iterable[str]) -> list[str]:
    """«file: secret» for each file under ``places`` that holds one of the secrets, as it is, percent-encoded, in
    base64, compressed (gzip, zlib), in a zip file (npz, pt) or in any value of an SQLite database."""
    forms = [(secret, form) for secret in secrets for form in _forms(secret)]
    found = []
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                content = b"\0".join(_contents(path))
                found += sorted({f"{path}: {secret}" for secret, form in forms if form in content})
    return found


def _forms(secret: str) -> Iterator[bytes]:
    raw = secret.encode()
    yield raw
    yield urllib.parse.quote(secret, safe="").encode()
    for shift in range(3):  # base64 of a longer text depends on where the secret begins in it
        yield base64.b64encode(b"\0" * shift + raw)[shift and 4 : len(raw) // 3 * 4 - 4]


def _contents(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    yield data
    yield _unpacked(data)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    if data.startswith(b"SQLite format 3"):  # what is in its write-ahead log is not in the file yet
        with closing(sqlite3.connect(path)) as database:
            for (table,) in database.execute("select name from sqlite_schema where type = 'table'").fetchall():
                for row in database.execute(f'select * from "{table}"'):
                    for value in row:
                        yield str(value).encode()
                        yield _unpacked(value)  # Dagster's snapshots of runs and their configuration


def _unpacked(value: object) -> bytes:
    """What was packed by gzip or zlib, empty for anything else."""
    if not isinstance(value, bytes) or not value.startswith((b"\x1f\x8b", b"x")):
        return b""
    with suppress(zlib.error):
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(value)  # 32: by its header
    return b""

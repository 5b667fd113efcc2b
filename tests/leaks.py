"""Search everything that was written for secrets, in whatever form they were written.

The tests of leaks and the campaign `tests.abuse.planted_secrets` share it. It searches files of any kind, every
cell of every table of SQLite databases, data packed by gzip, zlib, zip, tar and Parquet, and data encoded in base64,
one inside the other. It finds secrets as they are, and as JSON, HTML, addresses, UTF-16, hexadecimal digits and base64
write them.
"""

from __future__ import annotations

import base64
import binascii
import html
import io
import json
import re
import sqlite3
import tarfile
import tempfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

_DEPTH = 4
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{40,}={0,2}")
_SQLITE = b"SQLite format 3"
_ZLIB = (b"x\x01", b"x\x5e", b"x\x9c", b"x\xda")


def leaks(places: Iterable[Path], secrets: Iterable[str]) -> list[str]:
    """Return «file: secret» for each file under ``places`` (folders or files) that holds one of the secrets, in its
    name or its content."""
    wanted = [(secret, tuple(forms(secret))) for secret in secrets]
    found = []
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if not path.is_file() or path.is_symlink():
                continue
            left = dict(wanted)
            for content in (str(path).encode(errors="surrogateescape"), *_contents(path)):
                for secret in [secret for secret, written in left.items() if any(form in content for form in written)]:
                    found.append(f"{path}: {secret}")
                    del left[secret]
    return found


def forms(secret: str) -> Iterator[bytes]:
    """Yield every way in which a secret may be written."""
    raw = secret.encode()
    quoted = urllib.parse.quote(secret, safe="")
    yield from {
        raw, quoted.encode(), quoted.lower().encode(), urllib.parse.quote(secret).encode(),
        urllib.parse.quote(quoted, safe="").encode(), urllib.parse.quote_plus(secret).encode(),
        json.dumps(secret)[1:-1].encode(), json.dumps(secret)[1:-1].replace("/", "\\/").encode(),
        html.escape(secret).encode(), secret.encode("utf-16-le"), secret.encode("utf-16-be"), raw.hex().encode(),
    }  # fmt: skip
    for shift in range(3):  # base64 of a longer text depends on where the secret begins in it
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(b"\0" * shift + raw)[shift and 4 : len(raw) // 3 * 4 - 4]


def _contents(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    yield from unpacked(data)
    if data.startswith(_SQLITE):
        yield from _cells(path)


def unpacked(data: bytes, depth: int = _DEPTH) -> Iterator[bytes]:
    """Yield the data, and all data packed in it, down to ``depth`` layers."""
    yield data
    if not depth:
        return
    for inner in _within(data):
        yield from unpacked(inner, depth - 1)


def _within(data: bytes) -> Iterator[bytes]:
    if data.startswith((b"\x1f\x8b", *_ZLIB)):
        with suppress(zlib.error):
            yield zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data)  # 32: by its header
    elif data.startswith(b"PK\x03\x04"):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    elif data[257:262] == b"ustar":
        with suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
            yield from (file.read() for item in archive if (file := archive.extractfile(item)))
    elif data.startswith(b"PAR1"):
        yield from _parquet(data)
    elif not data.startswith((_SQLITE, b"\x89PNG", b"\x93NUMPY")):
        for match in _BASE64.finditer(data):
            with suppress(binascii.Error):
                text = match[0].rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
                yield base64.b64decode(text + b"=" * (-len(text) % 4))


def _parquet(data: bytes) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with suppress(pa.ArrowException, OSError):
        table = pq.read_table(io.BytesIO(data))
        yield repr(table.schema.metadata).encode()
        for column in table.columns:
            if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
                yield repr(column.unique().to_pylist()).encode()


def _cells(path: Path) -> Iterator[bytes]:
    """Yield every value of every table, from a copy of the database that includes its write-ahead log."""
    with tempfile.TemporaryDirectory() as scratch:
        for suffix in ("", "-wal"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                (Path(scratch) / f"copy.db{suffix}").write_bytes(beside.read_bytes())
        with closing(sqlite3.connect(Path(scratch) / "copy.db")) as database:
            database.text_factory = bytes
            try:
                tables = database.execute("select name from sqlite_schema where type = 'table'").fetchall()
            except sqlite3.DatabaseError:
                return
            for (table,) in tables:
                name = table.decode().replace('"', '""')
                for row in database.execute(f'select * from "{name}"'):
                    for value in row:
                        yield from unpacked(value if isinstance(value, bytes) else str(value).encode())

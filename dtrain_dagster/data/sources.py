"""The sources of prices: a panel that comes with a package, or a file of the user's own.

A source yields one CSV or Parquet file on this machine; `dtrain_dagster.data.prices` converts it into one shape.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.support.secrets import SecretError, is_reference, redact, refuse_secret, resolve

if TYPE_CHECKING:
    import fsspec

_SUFFIXES = re.compile(r"(\.[A-Za-z0-9]{1,8}){0,2}$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origin and licence of prices; everything made of them carries it."""

    name: str
    title: str
    licence: str
    notes: str
    origin: str
    is_synthetic: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BundledFile:
    """A price file inside an installed package, read without importing that package."""

    provenance: Provenance
    distribution: str
    path: str
    sha256: str
    findings: Mapping[str, int] = field(default_factory=dict)
    """What the checks of `dtrain_dagster.data.validation` find in it, and how often: known, and no failure."""

    def local_file(self, scratch: Path) -> Path:
        """Return the file. Raise `DataError` where its package is missing or of another version."""
        try:
            path = Path(str(importlib.metadata.distribution(self.distribution).locate_file(self.path)))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except (importlib.metadata.PackageNotFoundError, FileNotFoundError) as error:
            raise DataError(
                f"DTRAIN_PRICES={self.provenance.name!r} comes with the package {self.distribution}, which is not "
                "installed: run make setup"
            ) from error
        if digest != self.sha256:
            raise DataError(
                f"{path} has sha256 {digest[:12]}…, expected {self.sha256[:12]}…: another version of "
                f"{self.distribution} is installed; run make setup"
            )
        return path


@dataclass(frozen=True, slots=True)
class PriceFile:
    """A user's own file, on this machine or at any fsspec address (fetched once per reading)."""

    address: str
    """A path, an address, or a reference to one (``env:NAME``, ``keyvault://…``), which is resolved at each use and
    stored nowhere."""

    @property
    def provenance(self) -> Provenance:
        """The origin, without secrets: the reference if the address is one."""
        origin = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", redact(self.address))
        name = origin if is_reference(origin) else origin.partition("?")[0].rstrip("/").rsplit("/", 1)[-1]
        return Provenance(
            name=name,
            title=name,
            licence="the owner's",
            notes="Given by the user; not checked for licence.",
            origin=origin,
        )

    def version(self) -> str:
        """Return a text that changes when the file does, without reading it; `digest` where a server states no such
        mark.

        Raise OSError, or the file system's own error, where it cannot be asked.
        """
        with _told(self.address):
            filesystem, path = _opened(self.address)
            filesystem.invalidate_cache()
            if "http" not in filesystem.protocol:
                return str(filesystem.ukey(path))
            info = filesystem.info(path)  # its ukey takes files for unchanging
        marks = [f"{name}={info[name]}" for name in ("ETag", "Last-Modified") if info.get(name)]
        return f"size={info.get('size')}; {'; '.join(marks)}" if marks else self.digest()

    def digest(self) -> str:
        """Return the sha256 of its content, which is read for that."""
        with _told(self.address):
            filesystem, path = _opened(self.address)
            with filesystem.open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

    def local_file(self, scratch: Path) -> Path:
        """Return the file, fetched into ``scratch`` unless it is on this machine. Raise `DataError` where it is no
        file."""
        from fsspec.implementations.local import LocalFileSystem

        with _told(self.address):
            filesystem, path = _opened(self.address)
            if not filesystem.isfile(path):
                raise DataError(
                    f"DTRAIN_PRICES={self.address!r} is neither a file that can be read nor {PANEL.provenance.name}"
                )
            if isinstance(filesystem, LocalFileSystem):
                return Path(path)
            local = scratch / f"fetched{_suffixes(path)}"  # its own name may be anything
            filesystem.get_file(path, str(local))
            return local


def _opened(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system and path of an address, or of the address it refers to. A path of this machine is taken
    literally. Raise `DataError` for an unknown kind of address."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    plain = resolve(address)
    if "://" not in plain:
        return LocalFileSystem(), str(Path(plain).expanduser().absolute())
    try:
        return fsspec.url_to_fs(plain)
    except (ValueError, ImportError) as error:
        raise DataError(f"DTRAIN_PRICES={address!r} cannot be opened: {redact(str(error))}") from None


@contextmanager
def _told(address: str) -> Iterator[None]:
    """Within the block, remove the resolved address from errors: file systems put the whole of it into theirs."""
    try:
        yield
    except (DataError, SecretError):
        raise
    except OSError as error:
        if (words := redact(str(error))) != str(error):
            raise type(error)(words) if type(error).__module__ == "builtins" else OSError(words) from None
        raise
    except Exception as error:  # a file system's own, of any kind
        if is_reference(address) or redact(str(error)) != str(error):
            raise OSError(f"{redact(address)} cannot be read: {type(error).__name__}: {redact(str(error))}") from None
        raise


def _suffixes(path: str) -> str:
    """Return the suffixes, such as ``.csv.gz``, of an address's path, which may have a query."""
    name = urlsplit(path).path.rsplit("/", 1)[-1] if "://" in path else path.rsplit("/", 1)[-1]
    found = _SUFFIXES.search(name)
    return found[0] if found else ""


PriceSource: TypeAlias = BundledFile | PriceFile
"""What can put a price file on this machine."""
_BY_REFERENCE = (
    "put the whole address into an environment variable or a vault, and give env:NAME or keyvault://VAULT/SECRET"
)
PANEL = BundledFile(
    provenance=Provenance(
        name="sp500_panel",
        title="20 US stocks, daily adjusted closes, 1990-2022",
        licence="BSD-3-Clause (package skfolio)",
        notes=(
            "Its authors mean it for tests and examples, not for investment or commercial use. Adjusted closes "
            "only, rounded to three decimals. All 20 companies survived to the end: survivorship bias."
        ),
        origin="skfolio/datasets/data/sp500_dataset.csv.gz",
    ),
    distribution="skfolio",
    path="skfolio/datasets/data/sp500_dataset.csv.gz",
    sha256="ee21cac28befb1d0a739a9ceb22184f995394726aa0cfde9a21941d1ac04ac0d",
    findings={"stale_prices": 22, "large_moves": 11, "split_like_jumps": 1, "survivorship": 1},
)


def known_findings(sha256: str) -> Mapping[str, int]:
    """Return what checks are known to find in the prices of a file, by the check; nothing for a file of the user's."""
    return PANEL.findings if sha256 == PANEL.sha256 else {}


def price_source(name_or_address: str) -> PriceSource:
    """Return the source for the bundled panel's name, or the address of a file. Raise `DataError` for an address that
    carries a secret: the origin of prices is stored with everything that is made of them."""
    try:
        refuse_secret(
            "the source of prices (DTRAIN_PRICES, or source in the launchpad)", name_or_address, _BY_REFERENCE
        )
    except SecretError as error:
        raise DataError(str(error)) from None
    return PANEL if name_or_address == PANEL.provenance.name else PriceFile(name_or_address)

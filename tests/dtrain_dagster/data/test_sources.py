"""Sources: named panels are checked byte by byte, addresses that cannot be opened are refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import fsspec
import pytest
from price_files import assert_nothing_half_written, long_frame, save

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sources import PANEL, BundledFile, PriceFile, price_source


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BundledFile:
    """A panel inside an installed package of its own."""
    (tmp_path / "site" / "panelpack-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "panelpack-1.0.dist-info" / "METADATA").write_text("Name: panelpack\nVersion: 1.0\n")
    path = tmp_path / "site" / "panel.csv"
    save(long_frame(), path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return BundledFile(provenance=PANEL.provenance, distribution="panelpack", path="panel.csv", sha256=digest)


def test_a_damaged_bundled_file_is_refused(bundled: BundledFile, tmp_path: Path) -> None:
    assert write_prices(bundled, str(tmp_path / "whole")).rows == 800
    path = tmp_path / "site" / "panel.csv"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"panel\.csv has sha256 .* expected .*panelpack.*make setup"):
        write_prices(bundled, str(tmp_path / "damaged"))
    assert_nothing_half_written(tmp_path / "damaged")


@pytest.mark.parametrize("fault", [{"distribution": "no-such-package"}, {"path": "no_such_file.csv"}])
def test_a_bundled_file_that_is_not_installed(fault: dict[str, str], bundled: BundledFile, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'sp500_panel' comes with the package .*make setup"):
        dataclasses.replace(bundled, **fault).local_file(tmp_path)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("sp501_panel", "'sp501_panel' is neither a file that can be read nor sp500_panel"),
        ("/nowhere/prices.csv", "'/nowhere/prices.csv' is neither a file"),
        ("memory://nowhere/prices.csv", "'memory://nowhere/prices.csv' is neither a file"),
        ("gopher://host/prices.csv", "'gopher://host/prices.csv' cannot be opened: Protocol not known"),
        ("/", "'/' is neither a file"),
    ],
)
def test_an_unknown_name_or_address_is_refused(address: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        write_prices(price_source(address), str(tmp_path))
    assert not list((tmp_path / "prices").glob("*"))


@pytest.mark.parametrize("address", ["local", "memory://tokens/prices.csv"])
def test_the_version_follows_the_file_and_the_digest_its_content(address: str, tmp_path: Path) -> None:
    source = PriceFile(str(tmp_path / "prices.csv") if address == "local" else address)
    with pytest.raises(FileNotFoundError):
        source.version()
    with fsspec.open(source.address, "w") as file:
        file.write("first")
    first, digest = source.version(), source.digest()
    assert (source.version(), source.digest()) == (first, digest)
    if address == "local":
        os.utime(source.address, (1, 1))
        assert source.version() != first
        assert source.digest() == digest
    with fsspec.open(source.address, "w") as file:
        file.write("other")
    assert source.version() != first
    assert source.digest() != digest

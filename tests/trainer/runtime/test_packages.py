"""Packages are looked for and not run; a folder of somebody's own with the name of one is none."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from trainer.runtime.packages import is_installed


def test_a_module_is_looked_for_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack_a").mkdir()
    (tmp_path / "pack_a" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "pack_a" / "inner.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("pack_a")
    assert is_installed("pack_a.inner")
    assert not is_installed("pack_a.other")
    assert not is_installed("pack_b.inner")


def test_a_folder_with_the_name_of_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack_c" / "inner").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("pack_c")
    assert not is_installed("pack_c.inner")


def test_what_is_imported_already_is_there_however_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pack_d", types.ModuleType("pack_d"))
    assert is_installed("pack_d")
    monkeypatch.setitem(sys.modules, "pack_d", None)
    assert not is_installed("pack_d")

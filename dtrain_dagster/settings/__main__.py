"""``python -m dtrain_dagster.settings`` rewrites the documents' tables of settings from the fields that are read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pydantic_settings import BaseSettings

from dtrain_dagster.settings.azure import AzureSettings
from dtrain_dagster.settings.kubernetes import KubernetesSettings
from dtrain_dagster.settings.notices import NoticeSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings

TABLES: dict[str, type[BaseSettings]] = {
    "docs/azure.md": AzureSettings,
    "docs/kubernetes.md": KubernetesSettings,
    "docs/monitoring.md": NoticeSettings,
    "docs/ray.md": RaySettings,
    "docs/slurm.md": SlurmSettings,
}
"""The settings whose table each document holds; paths from the repository's root."""
_ROWS = re.compile(r"(?:^\| `DTRAIN_[A-Z_]+` \|.*\n)+", flags=re.MULTILINE)


def settings_rows(kind: type[BaseSettings]) -> str:
    """Return the rows of a Markdown table, one per variable: its name, its default, its meaning."""
    rows = []
    for name, field in kind.model_fields.items():
        default = "required" if field.is_required() else ""
        if not field.is_required() and field.get_default() not in (None, ""):
            default = f"`{field.get_default()}`"
        rows.append(f"| `{kind.model_config['env_prefix']}{name.upper()}` | {default} | {field.description} |\n")
    return "".join(rows)


def with_settings_rows(text: str, kind: type[BaseSettings]) -> str:
    """Return the document with up-to-date rows in its table. Raise `ValueError` where it has not exactly one table."""
    written, count = _ROWS.subn(lambda _: settings_rows(kind), text)
    if count != 1:
        raise ValueError(f"{count} tables of settings where one belongs")
    return written


def main(root: Path) -> None:
    """Rewrite the tables of all documents in `TABLES` below ``root``."""
    for name, kind in TABLES.items():
        document = root / name
        document.write_text(with_settings_rows(document.read_text(), kind))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))

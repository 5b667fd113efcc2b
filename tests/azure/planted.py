"""Secrets that look like none and are found wherever they turn up: planted where a product could pick them up."""

from __future__ import annotations

from tests.leaks import leaks

__all__ = ["ENVIRONMENT", "MARK", "leaks", "planted"]

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

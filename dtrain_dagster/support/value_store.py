"""The store of assets' values on this machine: Dagster's own, which an asset's page names by less than its full path.

Dagster's UI breaks no long path, so a full one makes the page wider than its place, and the ends of all lines are cut
off. Values in storage elsewhere do not belong here (`dtrain_dagster.resources`).
"""

from __future__ import annotations

from typing import Any

import dagster as dg
from dagster._core.storage.fs_io_manager import PickledObjectFilesystemIOManager  # the public one only makes this one


class ValueFiles(PickledObjectFilesystemIOManager):
    """Keeps values as pickles, where `dagster.FilesystemIOManager` keeps them."""

    def get_metadata(self, context: dg.OutputContext, obj: Any) -> dict[str, dg.MetadataValue]:
        """Return what stands on the page instead of the full path; nothing for an asset without a value."""
        if obj is None or not context.has_asset_key:
            return {}
        return {"path": dg.MetadataValue.text(f"{'/'.join(context.asset_key.path)} in Dagster's storage")}

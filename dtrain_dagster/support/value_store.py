"""The store of assets' values on this machine, whose entry on an asset's page is less than its full path.

Dagster's UI breaks no long path, so a full one makes the page wider than its place, and the ends of all lines are cut
off. Values in storage elsewhere do not belong here (`dtrain_dagster.resources`).
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from upath import UPath


class ValueFiles(dg.UPathIOManager):
    """Keeps values as pickles in the files that `dagster.FilesystemIOManager` reads and writes."""

    def dump_to_path(self, context: dg.OutputContext, obj: Any, path: UPath) -> None:
        """Write a value's file."""
        path.write_bytes(pickle.dumps(obj))

    def load_from_path(self, context: dg.InputContext, path: UPath) -> Any:
        """Return the value in a file."""
        return pickle.loads(path.read_bytes())  # noqa: S301 - whoever writes to Dagster's home runs code anyway

    def get_metadata(self, context: dg.OutputContext, obj: Any) -> dict[str, dg.MetadataValue]:
        """Return what stands on the page instead of the full path; nothing for an asset without a value."""
        if obj is None or not context.has_asset_key:
            return {}
        return {"path": dg.MetadataValue.text(f"{'/'.join(context.asset_key.path)} in Dagster's storage")}

"""`open_storage`: the one place that knows which class of storage an address needs; and where a node's cache is.

Only these choices belong here. What all storage can do is in `trainer.storage.base`; a class for another kind of
address has a module of its own, which is imported once such an address is opened.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainer.errors import ConfigError
from trainer.storage.base import Storage

AZURE_PREFIX = "az://"


def open_storage(uri: str | os.PathLike[str]) -> Storage:
    """Return the storage at a path, at ``az://container/path`` or at any other fsspec address.

    Raise `ConfigError` for an address that no installed file system knows, or whose packages are not installed.
    """
    if not str(uri).startswith(AZURE_PREFIX):
        return Storage(uri)
    try:
        from trainer.storage.azure_blob import BlobStorage
    except ImportError as error:
        raise ConfigError(f"{str(uri)!r} needs the Azure packages: pip install 'dtrain[azure]'") from error
    return BlobStorage(uri)


def default_cache_dir() -> Path:
    """Return ``DTRAIN_CACHE``, else ``dtrain`` in ``XDG_CACHE_HOME``, else a folder of this user under the temporary
    one."""
    if configured := os.environ.get("DTRAIN_CACHE"):
        return Path(configured)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "dtrain"
    return Path(tempfile.gettempdir()) / f"dtrain-cache-{os.geteuid()}"

"""`open_storage`: the one place that knows which class of storage an address needs.

Only this choice belongs here. What all storage can do is in `trainer.storage.base`; a class for another kind of address
has a module of its own, which is imported once such an address is opened.
"""

from __future__ import annotations

import os

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

"""The settings of ``DTRAIN_DATA_ENGINE=ray``: ``DTRAIN_DATA_*`` environment variables, and ``DTRAIN_RAY_ADDRESS``.
None of them is a secret.

What is computed there belongs in `dtrain_dagster.data.ray_engine`.
"""

from __future__ import annotations

import os
import re

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import EnvironmentSettings, SettingsError
from dtrain_dagster.support.ray_session import LEAST_STORE_BYTES, RayPlace

PREFIX = "DTRAIN_DATA_"
ADDRESS = "DTRAIN_RAY_ADDRESS"
_ADDRESS = re.compile(r"auto|(ray://)?[A-Za-z0-9.\[\]:_-]+:\d{1,5}")


class DataEngineSettings(EnvironmentSettings):
    """The settings of a Ray that is started for data. Every field is the environment variable of that name in capitals
    after ``DTRAIN_DATA_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    cpus: int | None = Field(
        default=None, ge=1, le=1024, description="CPUs of the Ray that is started here; unset: all of this machine"
    )
    store_mb: int = Field(
        default=512,
        ge=LEAST_STORE_BYTES >> 20,
        description="Megabytes of shared memory that it holds objects in, before it spills to the storage folder",
    )


def read_ray_place() -> RayPlace:
    """Return which Ray data is computed on: that of ``DTRAIN_RAY_ADDRESS``, or one that is started here. Raise
    `SettingsError` for values that cannot be used."""
    found = DataEngineSettings.read()
    address = os.environ.get(ADDRESS) or None
    if address is not None and not _ADDRESS.fullmatch(address):
        raise SettingsError(f"{ADDRESS}={address!r} is not the address of a Ray cluster: give host:port of its head")
    if address is not None and address.startswith("ray://"):
        raise SettingsError(
            f"{ADDRESS}={address!r} is an address of Ray Client, which moves rows through one process: for data give "
            "host:port of the head, on a machine of the cluster, or unset it for a Ray that is started here"
        )
    cpus = found.cpus or len(os.sched_getaffinity(0))
    return RayPlace(address=address, cpus=cpus, store_bytes=found.store_mb << 20)

"""The import of the package that a strategy needs, before this process has peers.

Importing one takes seconds in which no other thread of this process may run: peers would miss its heartbeats.
"""

from __future__ import annotations

import contextlib
import importlib
import os

import torch

from trainer.strategies import PACKAGES, require_package


def load_package(strategy: str, device: torch.device) -> None:
    """Import the package that a strategy needs, if it needs one. Raise `ConfigError` if it is not installed."""
    require_package(strategy)
    if strategy == "deepspeed":  # which reads them once
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("DS_BUILD_OPS", "0")
    if strategy in PACKAGES:
        importlib.import_module(PACKAGES[strategy])
    if strategy == "deepspeed":  # its engine loads this, and torch's compiler with it, as it starts among its peers
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

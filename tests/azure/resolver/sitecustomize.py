"""Put on PYTHONPATH, this makes Python resolve ``*.localhost`` to loopback, as RFC 6761 wants and glibc does not.

The Azure clients build the storage account's address as a host name (``account.blob.suffix``), so the emulated account
needs one. Loaded by the interpreter's start; another ``sitecustomize`` on the path is loaded after it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import socket
import sys

_real = socket.getaddrinfo


def _getaddrinfo(host, *rest, **more):  # type: ignore[no-untyped-def]
    name = host.decode("idna") if isinstance(host, bytes) else host
    if isinstance(name, str) and name.rstrip(".").endswith(".localhost"):
        host = "127.0.0.1"
    return _real(host, *rest, **more)


socket.getaddrinfo = _getaddrinfo


def _load_the_other() -> None:
    """This file hides any other of its name; what that one does (coverage, a distribution's settings) is kept."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_load_the_other()

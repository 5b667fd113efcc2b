"""Put on PYTHONPATH, this makes Python resolve ``*.localhost`` to loopback, as RFC 6761 wants and glibc does not, and
skips most of the time for which Azure's client waits between two questions about a long operation: the service does not
say how long, so it is up to half a minute of the real clock.

The Azure clients build the storage account's address as a host name (``account.blob.suffix``), so the emulated account
needs one. Loaded by the interpreter's start; another ``sitecustomize`` on the path is loaded after it.
"""

from __future__ import annotations

import importlib.abc
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


POLLING = "azure.core.polling.base_polling"
LONGEST_WAIT_SECONDS = 0.1


def _shorten_waits(polling):  # type: ignore[no-untyped-def]
    def sleep(self, delay):  # type: ignore[no-untyped-def]
        self._transport.sleep(min(delay, LONGEST_WAIT_SECONDS))

    polling.LROBasePolling._sleep = sleep


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes the module when somebody imports it, which most processes never do."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != POLLING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module):  # type: ignore[no-untyped-def]
                load(module)
                _shorten_waits(module)

            spec.loader.exec_module = load_and_change
        return spec


if POLLING in sys.modules:
    _shorten_waits(sys.modules[POLLING])
else:
    sys.meta_path.insert(0, _AfterImport())


def _load_the_other() -> None:
    """This file hides any other of its name; what that one does (coverage, a distribution's settings) is kept."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_load_the_other()

"""How the server of the pages begins and ends."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest
from starlette.applications import Starlette

from dtrain_dagster.web.server import listener, serve, server


class Freed:
    """Something whose end calls a function, as the ends of many objects of an import do."""


def test_a_ctrl_c_is_not_lost_in_a_callback_of_the_garbage_collector() -> None:
    """Python prints an exception that is raised there, and goes on."""
    web, freed = server(Starlette()), [Freed()]
    called = weakref.ref(freed[0], lambda _: signal.raise_signal(signal.SIGINT))
    if_it_is_lost = threading.Timer(20, setattr, (web, "should_exit", True))
    if_it_is_lost.start()
    try:
        with listener("127.0.0.1", 0) as bound, pytest.raises(KeyboardInterrupt):
            serve(web, bound, freed.clear)
    finally:
        if_it_is_lost.cancel()
    assert called() is None

"""An HTTP server for one test, on 127.0.0.1, in a thread of the test's process."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable

from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

# It tells every address that is asked for, in this process, where tests look for addresses that nobody may tell.
logging.getLogger("werkzeug").setLevel(logging.WARNING)


class LoopbackServer(HTTPServer):
    """A context manager. Whatever is asked, and in how many connections at once, ``answer`` answers."""

    def __init__(self, answer: Callable[[Request], Response], ssl_context: ssl.SSLContext | None = None) -> None:
        super().__init__("127.0.0.1", ssl_context=ssl_context, threaded=True)
        self.expect_request(re.compile("")).respond_with_handler(answer)

    def thread_target(self) -> None:
        assert self.server is not None
        self.server.serve_forever(0.01)  # so long does a stop take; it would be half a second

"""Put on PYTHONPATH, this moves the clock of a daemon and its code server by MOVED_SECONDS, for as long as they live.

Only for those who decide by it: this project, and Dagster's ticks. gRPC between the two counts on the kernel's clock.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime

_real = time.time
_moved = float(os.environ["MOVED_SECONDS"])


def _time() -> float:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return _real() + _moved if caller.startswith(("dtrain_dagster.", "trainer.")) else _real()


time.time = _time

import dagster._time  # noqa: E402 - it takes long enough, and has to be there before anybody asks it

dagster._time._mockable_get_current_timestamp = lambda: _real() + _moved
dagster._time._mockable_get_current_datetime = lambda: datetime.fromtimestamp(_real() + _moved, UTC)

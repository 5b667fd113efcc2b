"""Put on PYTHONPATH, this moves the clock of a daemon and its code server by MOVED_SECONDS, for as long as they live.

The kernel's count of seconds is moved along: time has passed, rather than that the clock was set.

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
_real_gettime = time.clock_gettime


def _gettime(which: int) -> float:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return _real_gettime(which) + (_moved if caller.startswith(("dtrain_dagster.", "trainer.")) else 0.0)


time.clock_gettime = _gettime

import dagster._time  # noqa: E402 - it takes long enough, and has to be there before anybody asks it

dagster._time._mockable_get_current_timestamp = lambda: _real() + _moved
dagster._time._mockable_get_current_datetime = lambda: datetime.fromtimestamp(_real() + _moved, UTC)

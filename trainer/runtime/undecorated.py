"""Methods of torch's optimizers without the decorators that load ``torch._dynamo``.

They support graphs that contain an optimizer, and no graph here does. Loading it takes a rank as long as half of torch
itself (0.9 s of 2.2 s of its imports; measured beside other work: up to 5 s), which is paid for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method without its decorators; unchanged where it has no ``__wrapped__``."""
    return inspect.unwrap(method)

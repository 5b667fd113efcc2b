"""The errors that the modules of this package raise."""

from collections.abc import Sequence

_MOST_TOLD = 50


class DataError(ValueError):
    """A refusal of data that cannot be used. The message names the file or setting, the place in it, its value, and the
    remedy."""


class DataEngineError(RuntimeError):
    """The end of an engine that cannot go on: not installed, not reachable, or its workers died again and again. The
    message names the setting and the remedy; the data is not to blame, and what was built before stays."""


def refuse(problems: Sequence[str]) -> None:
    """Raise `DataError` where there are problems: with all of them, so that a file has to be mended only once."""
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        lines = [f"- {problem}" for problem in problems[:_MOST_TOLD]]
        if len(problems) > _MOST_TOLD:
            lines.append(f"- and {len(problems) - _MOST_TOLD} more")
        raise DataError("\n".join([f"{len(problems)} problems:", *lines]))

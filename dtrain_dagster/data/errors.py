"""The errors that the modules of this package raise."""


class DataError(ValueError):
    """A refusal of data that cannot be used. The message names the file or setting, the place in it, its value, and the
    remedy."""


class DataEngineError(RuntimeError):
    """The end of an engine that cannot go on: not installed, not reachable, or its workers died again and again. The
    message names the setting and the remedy; the data is not to blame, and what was built before stays."""

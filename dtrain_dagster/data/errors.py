"""The error that the modules of this package raise for unusable data."""


class DataError(ValueError):
    """A refusal of data that cannot be used. The message names the file or setting, the place in it, its value, and the
    remedy."""

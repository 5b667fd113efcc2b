"""What is wrong with data."""


class DataError(ValueError):
    """Data cannot be used. The message names the file or setting, the place in it, what it holds, and the remedy."""

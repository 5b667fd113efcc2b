"""What is wrong with what a person has set. By itself, so that whoever only starts and watches needs no pydantic."""


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the field, the value, and the remedy."""

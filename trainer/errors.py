"""What is wrong with what a person has set, or with what storage holds. By itself, so that whoever only starts and
watches needs no pydantic."""

from trainer.printable import visible


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the field, the value, and the remedy."""


class DamagedError(ValueError):
    """A file is not what its contract says: cut, changed, too large, or no regular file. The message names the file,
    what is wrong, and the remedy; it can be printed as it is."""

    def __init__(self, where: str, what: str, remedy: str = "") -> None:
        self.where, self.what = visible(where), visible(what)
        self.remedy = remedy or "restore it from a copy, or move the folder that it is in away"
        super().__init__(self.where, self.what, self.remedy)

    def __str__(self) -> str:
        return f"{self.where} is damaged: {self.what}; {self.remedy}"

"""The errors of settings and of stored files. They have a module of their own, so that code that only starts and
watches jobs needs no pydantic."""

from trainer.printable import visible

REMOVED = {
    "bind_cores": "the system's scheduler places the ranks",
}
"""Settings of ``training`` that older versions had, and what is in their place. A ``job.json`` may have them."""


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the field, the value, and the remedy."""


class NoGenerationError(RuntimeError):
    """The ranks did not agree on a generation in time, or cannot go on together: this process leaves, and the cluster
    starts again."""


class WorkerHungError(RuntimeError):
    """Workers that do not answer. The message names their rank and their processes."""


class DamagedError(ValueError):
    """A file does not follow its contract: cut, changed, too large, or no regular file. The message names the file, the
    fault, and the remedy; it is safe to print."""

    def __init__(self, where: str, what: str, remedy: str = "") -> None:
        self.where, self.what = visible(where), visible(what)
        self.remedy = remedy or "restore it from a copy, or move its folder away"
        super().__init__(self.where, self.what, self.remedy)

    def __str__(self) -> str:
        return f"{self.where} is damaged: {self.what}; {self.remedy}"

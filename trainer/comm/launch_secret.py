"""The random secret of a launch: how the launcher passes it on, and the keys that ranks derive from it.

The secret is in no argument, log or run directory. A process that has it counts as part of the launch.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError
from trainer.runtime.launch import Launch

SECRET_FILE = "DTRAIN_LAUNCH_SECRET_FILE"
"""In the environment of every rank: the path of a file of this user alone, with the secret as hexadecimal digits."""
SECRET_BYTES = 32
_DIGITS = 2 * SECRET_BYTES
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class LaunchSecret:
    """A secret that only the ranks of one launch share. Without a value (a start by hand) anybody can compute the
    keys: they separate jobs, generations and ranks that connect by mistake, but stop no attacker."""

    value: bytes = b""

    @property
    def is_given(self) -> bool:
        """Whether there is a secret. Without one, anybody can compute the keys."""
        return bool(self.value)

    def key(self, purpose: str, *about: object) -> bytes:
        """Return a key of 32 bytes for one purpose and its subject (a job, a generation). No key reveals another."""
        words = "".join(f"{len(word)}:{word}" for word in ("dtrain", purpose, *map(str, about)))
        return hmac.digest(self.value, words.encode(), hashlib.sha256)


def write_launch_secret(path: Path) -> None:
    """Write a new secret to a file, in a folder, that only this user can read. An earlier secret is replaced: its
    launch is over."""
    write_private(path, secrets.token_hex(SECRET_BYTES))


def write_private(path: Path, text: str) -> None:
    """Write a text to a file, in a folder, that only this user can read, in place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)


def read_launch_secret(environment: Mapping[str, str]) -> LaunchSecret:
    """Return the secret that the environment names, or one without a value if it names none.

    Raise `ConfigError`, with the variable and the remedy, if the file is missing, others can read it or its content is
    no secret. Raise OSError if storage fails.
    """
    if path := environment.get(SECRET_FILE):
        return LaunchSecret(_parse(_read_private(path), f"{SECRET_FILE}={path}"))
    if uri := Launch.read(environment).secret_uri:
        from trainer.storage.open import open_storage

        folder, _, name = uri.rpartition("/")
        try:
            data = open_storage(folder).read(name)
        except FileNotFoundError:
            raise ConfigError(
                f"the secret of this launch, {uri}: there is no such file; submit the job again"
            ) from None
        return LaunchSecret(_parse(data, f"the secret of this launch, {uri},"))
    return LaunchSecret()


def warn_if_unauthenticated(secret: LaunchSecret, rank: int) -> None:
    """Log at rank 0 that connections are not authenticated, if there is no secret."""
    if rank == 0 and not secret.is_given:
        _log.warning(
            "this launch has no secret (%s is not set): connections between ranks are NOT authenticated, and anyone "
            "who reaches their ports can read and change what is trained. Start it on a dtrain cluster, or give all "
            "ranks a file of mode 0600 with the same 64 hexadecimal digits (openssl rand -hex 32)",
            SECRET_FILE,
        )


def _read_private(path: str) -> bytes:
    """The content of a small file that is this user's, or root's, alone."""
    remedy = "give a regular file of this user with mode 0600 (chmod 600)"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE}={path} cannot be read ({error.strerror}): {remedy}") from None
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ConfigError(f"{SECRET_FILE}={path} is not a regular file: {remedy}")
        if about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o077:
            raise ConfigError(f"{SECRET_FILE}={path} can be read or changed by others: {remedy}")
        return file.read(_DIGITS + 2)


def _parse(data: bytes, where: str) -> bytes:
    try:
        value = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:  # a UnicodeDecodeError is one
        value = b""
    if len(value) != SECRET_BYTES:
        raise ConfigError(f"{where} must hold {_DIGITS} hexadecimal digits, such as those of `openssl rand -hex 32`")
    return value

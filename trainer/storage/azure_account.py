"""The storage account, this machine's identity in it, the meaning of its errors, and when to try again."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

import requests
import requests.adapters
import urllib3.exceptions
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobServiceClient

from trainer.errors import ConfigError
from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal
from trainer.runtime.retry import RetryPolicy, retry_after_seconds
from trainer.storage.base import StorageAccessError, StorageError

CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
ACCOUNT_URL = "AZURE_STORAGE_ACCOUNT_URL"
SEND_SECONDS, ANSWER_SECONDS = 30, 30
"""The most seconds for connecting, or for sending one block; and those for which the account may be silent."""
RETRIES = RetryPolicy(first_pause_seconds=0.2, jitter=0.5, max_attempts=7, deadline_seconds=90.0)
"""The policy for one request; callers have a patience of their own."""
_CONNECTIONS = 32
_SIGNATURE = re.compile(r"(sig|se|sp|skoid)=[^&\s'\")]+", re.IGNORECASE)
_T = TypeVar("_T")


class AccessVerdict(Enum):
    """The meaning of an error for the caller."""

    MISSING = auto()
    CONFLICT = auto()
    """A condition was not met: it is there already, or has changed."""
    BAD_RANGE = auto()
    """Read from beyond the end, as any read of an empty blob does."""
    LOST_BLOCKS = auto()
    """Another writer of the same blob has committed meanwhile: what was staged is gone."""
    DENIED = auto()
    NO_CONTAINER = auto()
    AGAIN = auto()
    """Passing: the network, a restart, too many requests."""
    FAILED = auto()


def judge_access(error: BaseException) -> AccessVerdict:
    """Return the meaning of an error of the SDK, or of the libraries below it. Pure."""
    if isinstance(error, ClientAuthenticationError):
        return AccessVerdict.DENIED
    if isinstance(error, (ServiceRequestError, ServiceResponseError, IncompleteReadError)):
        return AccessVerdict.AGAIN
    if not isinstance(error, HttpResponseError):
        passing = isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError))
        return AccessVerdict.AGAIN if passing else AccessVerdict.FAILED
    name, status = _code(error), error.status_code
    if status is None or status in (408, 429) or status >= 500:  # no status: the connection broke within the answer
        return AccessVerdict.AGAIN
    if status in (401, 403):
        return AccessVerdict.DENIED
    if status == 404:
        return AccessVerdict.NO_CONTAINER if name == "ContainerNotFound" else AccessVerdict.MISSING
    if name in ("ConditionNotMet", "TargetConditionNotMet", "BlobAlreadyExists"):  # not: 412 for somebody's lease
        return AccessVerdict.CONFLICT
    if status == 416:
        return AccessVerdict.BAD_RANGE
    return AccessVerdict.LOST_BLOCKS if name == "InvalidBlockList" else AccessVerdict.FAILED


class BlobError(StorageError):
    """A request that failed for good. ``verdict`` says how."""

    def __init__(self, message: str, verdict: AccessVerdict) -> None:
        super().__init__(message)
        self.verdict = verdict


def attempt(what: str, action: Callable[[], _T]) -> _T:
    """Do a request, as often as `RETRIES` allows while its failure is transient, and return its answer.

    ``action`` must have the same effect if it is done twice. Raise `trainer.storage.base.StorageAccessError` if access
    is denied, and `BlobError` for every other failure.
    """
    try:
        return RETRIES.call(
            what,
            action,
            lambda error: judge_access(error) is AccessVerdict.AGAIN,
            asked_seconds=_asked_to_wait,
            describe=_first_line,
        )
    except (AzureError, requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise _translated(what, error, judge_access(error)) from None  # the SDK's own trace says nothing more


def service() -> BlobServiceClient:
    """Return the account that the environment names, shared by all threads of this process. Raise `ConfigError` if it
    names none."""
    return _service(os.environ.get(CONNECTION_STRING), os.environ.get(ACCOUNT_URL), os.getpid())


@functools.lru_cache(maxsize=8)
def _service(connection_string: str | None, url: str | None, pid: int) -> BlobServiceClient:
    """Return one client per process: after a fork, no two processes may share a connection."""
    logger = logging.getLogger("azure")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)  # it logs the headers of every request as information
    session = requests.Session()
    adapter = requests.adapters.HTTPAdapter(pool_connections=4, pool_maxsize=_CONNECTIONS, max_retries=0)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    # `attempt` tries again, not the SDK: only who counts the attempts knows whether an answer may have been lost.
    options = {
        "transport": RequestsTransport(session=session),
        "retry_total": 0,
        "connection_timeout": SEND_SECONDS,
        "read_timeout": ANSWER_SECONDS,
        "max_single_put_size": 64 << 20,
    }
    if connection_string:
        try:
            return BlobServiceClient.from_connection_string(connection_string, **options)
        except ValueError:  # whose message may hold the key
            raise ConfigError(
                f"{CONNECTION_STRING} is not the connection string of a storage account: copy it from the account's "
                f"access keys, or unset it and name the account by {ACCOUNT_URL}"
            ) from None
    if not url:
        raise ConfigError(
            f"an az:// address was given, but no storage account: set {ACCOUNT_URL} "
            f"(https://<account>.blob.core.windows.net, opened by this machine's identity) or {CONNECTION_STRING}"
        )
    if not url.startswith("https://"):
        raise ConfigError(f"{ACCOUNT_URL}={url!r} must begin with https://: an identity's token is sent to it")
    from azure.identity import DefaultAzureCredential

    return BlobServiceClient(url.rstrip("/"), credential=DefaultAzureCredential(), **options)


def account() -> str:
    """Return how the account was named, for messages: the variable, never the key."""
    return CONNECTION_STRING if os.environ.get(CONNECTION_STRING) else f"{ACCOUNT_URL}={os.environ.get(ACCOUNT_URL)}"


def _translated(what: str, error: BaseException, verdict: AccessVerdict) -> OSError:
    said = _first_line(error)
    if verdict is AccessVerdict.DENIED:
        if is_network_refusal(_code(error), said):
            remedy = NETWORK_REMEDY
        elif os.environ.get(CONNECTION_STRING):
            remedy = f"check the key in {CONNECTION_STRING}"
        else:
            remedy = "give this machine's identity the role 'Storage Blob Data Contributor' on the container"
        return StorageAccessError(f"{what}: the storage account ({account()}) denies access ({said}): {remedy}")
    if verdict is AccessVerdict.NO_CONTAINER:
        return StorageAccessError(
            f"{what}: the storage account ({account()}) has no such container: create it, or correct the address"
        )
    return BlobError(f"{what} failed: {said}", verdict)


def _code(error: BaseException) -> str:
    """Return the account's word for an error; "" where it has none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the account asks for (Retry-After), 0 where it does not."""
    return retry_after_seconds(getattr(getattr(error, "response", None), "headers", None))


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without the signature of an address."""
    text = str(error).strip() or type(error).__name__
    line, code = text.splitlines()[0], _code(error)
    line = f"{line} ({code})" if code else line
    return _SIGNATURE.sub(r"\1=…", line)

"""The access to the service: one client, made when it is first needed, and one call that retries transient failures.

A request that fails for a transient reason (no connection, throttled, 5xx) is made again, with growing pauses or when
the service says so, for as long as the caller has patience. A refusal of the service is raised at once, with its code.
Every request made here can be repeated: names make it so.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from dtrain_dagster.clusters.azure_ml.refusals import (
    SETTINGS,
    Scope,
    error_body_of,
    error_chain,
    find_missing_scope,
    names_resource,
)
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.settings.azure import AzureMLOptions
from dtrain_dagster.support.audit import note_request_id, noted_request_id
from dtrain_dagster.support.secrets import redact
from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal
from trainer.runtime.retry import PASSING_STATUSES, RetryPolicy, retry_after_seconds

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core import PipelineClient

T = TypeVar("T")

RETRIES = RetryPolicy(first_pause_seconds=0.5, longest_pause_seconds=30.0, jitter=0.3, log_level=logging.WARNING)
"""Policy of retries, until the caller's patience is over."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
API_VERSION = "2024-04-01"
"""Version of Azure ML's interface in which documents are read."""
PUBLIC_CLOUD = "https://management.azure.com"
CLOUDS = {
    "AzureCloud": PUBLIC_CLOUD,
    "AzureUSGovernment": "https://management.usgovcloudapi.net",
    "AzureChinaCloud": "https://management.chinacloudapi.cn",
}
"""Cloud, as the SDK names it → the address of its Resource Manager."""
CHANGES = ("PUT", "POST", "PATCH", "DELETE")
ROLE_REMEDY = "The identity lacks a role: deploy/azure lists what each one needs"
REQUEST_ID = "x-ms-request-id"
"""Header of every answer, whose value Azure's support asks for."""
_patience: ContextVar[float | None] = ContextVar("patience", default=None)
_log = logging.getLogger(__name__)


class ServiceError(ClusterError):
    """The service did not do what was asked. ``code``: its word for why, or the HTTP status, or the error's type;
    ``reason``: its own words; ``body``: the answer's, None where it had none."""

    def __init__(
        self,
        message: str,
        code: str = "",
        status: int | None = None,
        request_id: str | None = None,
        reason: str = "",
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.code, self.status, self.request_id, self.body = code, status, request_id, body
        self.reason = reason or message

    @classmethod
    def of(cls, message: str, error: BaseException) -> Self:
        """Return the error in our words; what its parts are is the client library's ``error``'s."""
        number = request_id_of(error)
        found = code_of(error), status_of(error), number, words(error), error_body_of(error)
        return cls(message + request_note(number), *found)


class ServiceUnreachable(ServiceError):
    """The service does not answer, or not with sense, and patience is over."""


class ServiceRefused(ServiceError):
    """The service refused."""


class NotFound(ServiceRefused):
    """The service says 404 of something within the workspace. It says so for a while of what exists, too."""

    def is_about(self, name: str) -> bool:
        """Return whether the answer names this job or compute as what is missing."""
        return names_resource(self.body if self.body is not None else self.reason, name)


class ScopeMissing(ServiceUnreachable):
    """The subscription, the resource group or the workspace is not found, so that nothing can be said of what lies in
    it. ``scope``: which of them."""

    scope: Scope


class Service:
    """The access to one workspace. No request is made until `ml`, `read` or `call` is used.

    What changes something goes through the SDK (`ml`). Documents are read as the service sends them (`read`): the SDK's
    own types drop errors and states of computes, and it fails at jobs and computes of kinds that it does not know.
    """

    def __init__(self, options: AzureMLOptions) -> None:
        self.options = options
        self._client: MLClient | None = None
        self._credential: Any = None
        self._has_answered = False
        self._lock = threading.Lock()

    @property
    def ml(self) -> MLClient:
        """Return the client; made on first use, which costs seconds of imports."""
        with self._lock:
            if self._client is None:
                from azure.ai.ml import MLClient

                # Its progress bars and its notes on experimental classes are not for our logs.
                for name in ("azure.ai.ml", "azure.core.pipeline.policies.http_logging_policy"):
                    logging.getLogger(name).setLevel(logging.ERROR)
                self._client = MLClient(
                    self.credential,
                    self.options.subscription_id,
                    self.options.resource_group,
                    self.options.workspace,
                    show_progress=False,
                    enable_telemetry=False,
                    polling_interval=self.options.polling_interval_seconds,
                    retry_total=2,  # of one request; `call` repeats the whole, with a deadline
                    retry_backoff_factor=RETRIES.first_pause_seconds,
                    connection_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    raw_response_hook=_note_request,
                )
            return self._client

    @property
    def credential(self) -> Any:
        """Return a managed identity where there is one, else the credential that `az login` and its like have left on
        this machine."""
        if self._credential is None:
            from azure.identity import DefaultAzureCredential

            logging.getLogger("azure.identity").setLevel(logging.ERROR)  # it tells of each kind that it tries
            self._credential = DefaultAzureCredential(exclude_interactive_browser_credential=True)
        return self._credential

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Within the block, a request that fails for a transient reason is made again for so many seconds; elsewhere
        for those of the options."""
        token = _patience.set(seconds)
        try:
            yield
        finally:
            _patience.reset(token)

    def looking(self) -> AbstractContextManager[None]:
        """Return the `patience` of a look, which comes again anyway."""
        return self.patience(self.options.look_patience_seconds)

    def call(self, what: str, ask: Callable[[], T]) -> T:
        """Return the result of ``ask``, which may be called several times; ``what``: words for messages. Raise
        `ServiceUnreachable` when `patience` is over, `ScopeMissing` where there is not even the workspace,
        `ServiceRefused` or `NotFound` where the service refuses."""
        found = _patience.get()
        patience = self.options.patience_seconds if found is None else found
        try:
            return replace(RETRIES, deadline_seconds=patience).call(
                what,
                ask,
                lambda error: not isinstance(error, ClusterError) and self._may_pass(what, error),
                asked_seconds=asked_pause,
                describe=words,
            )
        except ClusterError:
            raise
        except Exception as error:
            if not passes(error):
                raise self._explain(what, error) from error
            message = f"{what}: Azure ML cannot be reached, tried for {patience:.0f} s: {words(error)}"
            raise ServiceUnreachable.of(message, error) from error

    def read(self, what: str, path: str, version: str = API_VERSION, **how: str) -> dict[str, Any]:
        """Return a document of the Resource Manager as JSON has it, by its path. ``how``: the ``method``, if not GET,
        and parameters of the query. Raise as `call` does."""
        from azure.core.rest import HttpRequest

        method, query = how.pop("method", "GET"), {"api-version": version} if version else {}

        def ask() -> dict[str, Any]:
            request = HttpRequest(method, f"{self.address}{path}", params={**query, **how})
            answer = self._pipeline.send_request(request)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found

        found = self.call(what, ask)
        self._has_answered = self._has_answered or path.startswith(self.options.workspace_id)
        return found

    def read_all(self, what: str, path: str, version: str = API_VERSION, **how: str) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page; see `read`."""
        while path:
            page = self.read(what, path, "" if "api-version=" in path else version, **how)
            yield from page.get("value") or page.get("nodes") or ()
            link = urlsplit(str(page.get("nextLink") or ""))  # whatever its host: tokens go to one address
            path, how = link.path and f"/{link.path.lstrip('/')}?{link.query}", {}  # a link is followed by GET

    @cached_property
    def address(self) -> str:
        """The address of the Resource Manager, of the cloud that the SDK takes, too: the one that
        `AZUREML_CURRENT_CLOUD` names, or that `ARM_CLOUD_METADATA_URL` describes; else the public one."""
        import requests

        if named := CLOUDS.get(os.environ.get("AZUREML_CURRENT_CLOUD", "")):
            return named
        if metadata := os.environ.get("ARM_CLOUD_METADATA_URL"):
            clouds = requests.get(metadata, timeout=CONNECT_SECONDS).json()
            addresses = (cloud["resourceManager"].rstrip("/") for cloud in clouds)
            return next((address for address in addresses if address in metadata), PUBLIC_CLOUD)
        return PUBLIC_CLOUD

    @cached_property
    def _pipeline(self) -> PipelineClient[Any, Any]:
        from azure.core import PipelineClient
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy
        from azure.core.pipeline.transport import RequestsTransport

        policy = BearerTokenCredentialPolicy(self.credential, f"{self.address}/.default")
        transport = RequestsTransport(connection_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS)
        return PipelineClient(self.address, policies=[policy], transport=transport)

    def _may_pass(self, what: str, error: BaseException) -> bool:
        """Return whether to ask again. A workspace that has answered before is there, whatever one answer says."""
        return passes(error) or (self._has_answered and isinstance(self._explain(what, error), ScopeMissing))

    def _explain(self, what: str, error: BaseException) -> ServiceError:
        refusal, options = explain_refusal(what, error), self.options
        if not isinstance(refusal, NotFound):
            return refusal
        told = refusal.body if refusal.body is not None else {"code": refusal.code, "message": refusal.reason}
        scope = find_missing_scope(told, options.workspace)
        if scope is None:
            return refusal
        names = {"subscription": options.subscription_id, "resource group": options.resource_group}
        missing = ScopeMissing.of(
            f"{what}: the {scope} {names.get(scope, options.workspace)!r} is not found ({refusal.code}: "
            f"{refusal.reason}). Check {SETTINGS[scope]}, and whether this identity may see it; `dtrain doctor` "
            "reports more",
            error,
        )
        missing.scope = scope
        return missing


def _note_request(answer: Any) -> None:
    """Note a request that changes something for the audit log. The client calls this with each answer."""
    response = answer.http_response
    if response.request.method in CHANGES and (found := response.headers.get(REQUEST_ID)):
        note_request_id(found)


def passes(error: BaseException) -> bool:
    """Return whether the reason is transient. An answer of the service decides; without one, the request was not
    received."""
    from azure.core import exceptions as core
    from requests import exceptions as http

    lost = (core.ServiceRequestError, core.ServiceResponseError, core.IncompleteReadError, core.DecodeError)
    for item in error_chain(error):
        if isinstance(item, (*lost, http.ConnectionError, http.Timeout, json.JSONDecodeError)):
            return True
        if isinstance(item, core.HttpResponseError) and item.status_code is not None:
            # A private workspace also answers 502 to a caller from outside, for as long as it is asked.
            return item.status_code in PASSING_STATUSES and not is_network_refusal(code_of(error), words(error))
    return False


def explain_refusal(what: str, error: BaseException) -> ServiceRefused:
    """Return a refusal in our words, with the remedy where one is known."""
    from azure.core.exceptions import ClientAuthenticationError

    code, status, reason = code_of(error), status_of(error), words(error)
    has_no_token = status is None and any(isinstance(item, ClientAuthenticationError) for item in error_chain(error))
    message = f"{what}: {reason}"
    if is_network_refusal(code, reason):  # first: it comes with the status of each of the others
        message += f". {NETWORK_REMEDY[0].upper()}{NETWORK_REMEDY[1:]}"
    elif has_no_token or status == 401:
        message = (
            f"{what}: no identity that Azure accepts. Give this machine a managed identity, or run `az login`; "
            f"DefaultAzureCredential says: {reason}"
        )
    elif status == 403 or "Authorization" in code:
        message += f". {ROLE_REMEDY}"
    return (NotFound if status == 404 else ServiceRefused).of(message, error)


def _first(error: BaseException, find: Callable[[Any], Any]) -> Any:
    """Return the first thing that is found in an error or its causes; None for none."""
    return next(filter(None, map(find, error_chain(error))), None)


def _header(error: BaseException, read: Callable[[Mapping[str, str]], Any]) -> Any:
    return _first(error, lambda item: read(getattr(getattr(item, "response", None), "headers", None) or {}))


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the service's answer, where there was one."""
    status = _first(error, lambda item: getattr(item, "status_code", None))
    return status if isinstance(status, int) else None


def code_of(error: BaseException) -> str:
    """Return the service's code, else the HTTP status, else the error's type."""
    if code := _first(error, lambda item: getattr(getattr(item, "error", None), "code", None)):
        return str(code)
    status = status_of(error)
    return f"HTTP {status}" if status else type(error).__name__


def words(error: BaseException, longest: int = 600) -> str:
    """Return the service's message in one line, without secrets."""
    said = _first(error, lambda item: getattr(getattr(item, "error", None), "message", None))
    text = str(said or getattr(error, "message", "") or error) or type(error).__name__
    line: str = redact(" ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def asked_pause(error: BaseException) -> float:
    """Return the pause in seconds that the service asks for, 0 where it does not."""
    return _header(error, retry_after_seconds) or 0.0


def request_id_of(error: BaseException) -> str | None:
    """Return Azure's number of the request that failed. Where a long operation failed, that of the request that began
    it: the failing answer only belongs to a question about it."""
    return noted_request_id() or _header(error, lambda headers: headers.get(REQUEST_ID))


def request_note(request_id: str | None) -> str:
    """Return the request's number for the end of a message; "" where no answer came."""
    return f" (Azure's request {request_id})" if request_id else ""

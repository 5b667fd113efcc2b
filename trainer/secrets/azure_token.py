"""Azure ML as an MLflow server: its address over plain HTTPS, and a fresh token with every request.

`azureml-mlflow` is not needed: a workspace's tracking address ``azureml://host/path`` is a REST address ``https://host/path``
that wants a bearer token. The token is asked of the machine's identity when a request is sent. It is put into that
request's header and nowhere else: no file, no environment variable, no log, no other host.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

SCHEME = "azureml://"
TOKEN_SCOPE = "https://management.azure.com/.default"
"""The audience that Azure ML's MLflow address accepts, as Microsoft's own example of its REST API names it."""
WORKSPACE = "/providers/Microsoft.MachineLearningServices/workspaces/"
AUTH_NAME = "dtrain-azure"
"""The value of MLFLOW_TRACKING_AUTH while an Azure ML address is in use; it names a provider and holds no secret."""

_hosts: set[str] = set()
_lock = threading.Lock()


def tracking_address(uri: str) -> str:
    """Return the address to give to MLflow: the REST address for Azure ML's ``azureml://…``, any other unchanged.

    For Azure ML, in either form, MLflow's requests to that host carry a token from now on, in this process.
    """
    if not (uri.startswith(SCHEME) or (uri.startswith("https://") and WORKSPACE in uri)):
        return uri
    address = "https://" + uri.partition("://")[2].partition("?")[0].rstrip("/")
    _authorise(urlsplit(address).netloc)
    return address


@functools.cache
def credential() -> TokenCredential:
    """Return the identity of this process. On a node of Azure ML that is the identity of its cluster, whose client id
    Azure ML leaves in DEFAULT_IDENTITY_CLIENT_ID."""
    from azure.identity import DefaultAzureCredential

    client_id = os.environ.get("AZURE_CLIENT_ID") or os.environ.get("DEFAULT_IDENTITY_CLIENT_ID")
    return DefaultAzureCredential(managed_identity_client_id=client_id) if client_id else DefaultAzureCredential()


def _authorise(host: str) -> None:
    """Have MLflow ask `_BearerToken` for every request. It offers this for plug-ins that were installed; nodes run
    `trainer` from a folder, so it is registered by hand."""
    from mlflow.tracking.request_auth import registry

    with _lock:
        _hosts.add(host)
        if all(provider.get_name() != AUTH_NAME for provider in registry._request_auth_provider_registry):
            registry._request_auth_provider_registry.register(_provider())
        os.environ["MLFLOW_TRACKING_AUTH"] = AUTH_NAME


def _provider() -> type:
    from mlflow.tracking.request_auth.abstract_request_auth_provider import RequestAuthProvider
    from requests.auth import AuthBase

    class BearerToken(AuthBase):
        """Adds the token to requests to workspaces, and leaves any other request as it is."""

        def __call__(self, request: Any) -> Any:
            parts = urlsplit(request.url)
            if parts.scheme == "https" and parts.netloc in _hosts:
                # The credential keeps the token until shortly before it expires, and gets another one then.
                request.headers["Authorization"] = f"Bearer {credential().get_token(TOKEN_SCOPE).token}"
            return request

    class Provider(RequestAuthProvider):
        def get_name(self) -> str:
            return AUTH_NAME

        def get_auth(self) -> AuthBase:
            return BearerToken()

    return Provider

"""A refusal by a network rule is not taken for a missing role; the words are those that Azure was seen to use."""

from __future__ import annotations

import json

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Response

from dtrain_dagster.clusters.azure_ml.client import explain_refusal, passes
from trainer.runtime.network_refusal import is_network_refusal
from trainer.storage.base import StorageAccessError
from trainer.storage.open import open_storage

BY_NETWORK = {
    # (code, words) and where they were seen
    "workspace-502": ("UserError", "Access to workspace was denied based on workspace private link configuration."),
    # MicrosoftDocs/azure-docs issue 90426
    "workspace-401": (
        "UserError",
        "User is not authorized to access provided resources due to none of the workspaces/registries are accessible "
        "from outside of the designated private link..",
    ),  # Azure/azure-cli-extensions issue 6294
    "storage": ("AuthorizationFailure", "This request is not authorized to perform this operation."),
    # microsoft/AzureStorageExplorer issues 8183, 9150; Azure/azure-cli pull request 11345
    "perimeter": (
        "AuthorizationFailure",
        "This request is not authorized by network security perimeter to perform this operation.",
    ),  # microsoft/AzureStorageExplorer issue 8979
    "vault": (
        "Forbidden",
        "Connection is not an approved private link and caller was ignored because bypass is not set to "
        "'AzureServices' and PublicNetworkAccess is set to 'Disabled'.\nInner error: ForbiddenByConnection",
    ),
    "vault-firewall": ("Forbidden", "Client address is not authorized and caller is not a trusted service."),
    "registry": (
        "DENIED",
        "client with IP '203.0.113.7' is not allowed access. Refer https://aka.ms/acr/firewall to grant access.",
    ),
    "plain": ("PublicNetworkAccessDisabled", ""),
}
BY_ROLE = {
    "arm": (
        "AuthorizationFailed",
        "The client 'a' with object id 'b' does not have authorization to perform action "
        "'Microsoft.Network/privateEndpoints/read' over scope '/subscriptions/c' or the scope is invalid. If access "
        "was recently granted, please refresh your credentials.",
    ),
    "storage": (
        "AuthorizationPermissionMismatch",
        "This request is not authorized to perform this operation using this permission.",
    ),  # microsoft/AzureStorageExplorer issues 3767, 6889
    "vault": ("Forbidden", "Caller is not authorized to perform action on resource.\nInner error: ForbiddenByRbac"),
}


@pytest.mark.parametrize(("code", "message"), BY_NETWORK.values(), ids=BY_NETWORK)
def test_a_network_rule_is_known_by_its_code_or_words(code: str, message: str) -> None:
    assert is_network_refusal(code, message)


@pytest.mark.parametrize(("code", "message"), BY_ROLE.values(), ids=BY_ROLE)
def test_a_missing_role_stays_one(code: str, message: str) -> None:
    assert not is_network_refusal(code, message)


@pytest.mark.parametrize(
    ("status", "name", "remedy"),
    [
        (403, "workspace-401", "This is a network restriction, not a missing role"),
        (401, "workspace-401", "This is a network restriction, not a missing role"),
        (502, "workspace-502", "This is a network restriction, not a missing role"),
        (403, "arm", "The identity lacks a role"),
    ],
)
def test_the_client_says_which_it_is(httpserver: HTTPServer, status: int, name: str, remedy: str) -> None:
    from azure.core import PipelineClient
    from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
    from azure.core.rest import HttpRequest

    code, message = BY_NETWORK.get(name) or BY_ROLE[name]
    body = json.dumps({"error": {"code": code, "message": message}})
    httpserver.expect_request("/").respond_with_data(body, status, content_type="application/json")
    with PipelineClient(httpserver.url_for("/"), policies=[]) as client:
        answer = client.send_request(HttpRequest("GET", httpserver.url_for("/")))
        kind = ClientAuthenticationError if status == 401 else HttpResponseError
        error = kind(response=answer)
    assert not passes(error), "asking again changes nothing"
    said = str(explain_refusal("look at job one", error))
    assert remedy in said
    assert ("role: deploy/azure" in said) is (name == "arm")
    assert "az login" not in said


@pytest.mark.parametrize(
    ("name", "remedy", "other"),
    [
        ("AuthorizationFailure", "this is a network restriction, not a missing role", "check the key"),
        ("AuthenticationFailed", "check the key", "this is a network restriction"),
    ],
)
def test_storage_says_which_it_is(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str, other: str
) -> None:
    body = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{name}</Code><Message>No.</Message></Error>'
    httpserver.expect_request("/account/dtrain/a").respond_with_response(
        Response(body, 403, {"x-ms-error-code": name}, mimetype="application/xml")
    )
    account = httpserver.url_for("/account")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey=YWJj;BlobEndpoint={account}",
    )
    with pytest.raises(StorageAccessError, match=remedy) as caught:
        open_storage("az://dtrain").read("a")
    assert other not in str(caught.value)

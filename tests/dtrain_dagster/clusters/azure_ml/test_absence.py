"""What a 404 says."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.refusals import find_missing_scope, names_resource

WORKSPACE = "mlw-team"


def told(code: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "target": None, "details": [], **more}}


@pytest.mark.parametrize(
    ("body", "scope"),
    [
        (told("SubscriptionNotFound", "The subscription '0-1' could not be found."), "subscription"),
        (told("ResourceGroupNotFound", "Resource group 'rg' could not be found."), "resource group"),
        (
            told("ParentResourceNotFound", f"Can not perform requested operation on nested resource. Parent resource "
                 f"'{WORKSPACE}' not found."), "workspace",
        ),
        (
            told("ParentResourceNotFound", "Failed to perform 'read' on resource(s) of type 'workspaces/jobs', because "
                 f"the parent resource '/subscriptions/0-1/resourceGroups/rg/providers/x/workspaces/{WORKSPACE}' could "
                 "not be found."), "workspace",
        ),
        (
            told("ResourceNotFound", f"The Resource 'Microsoft.MachineLearningServices/workspaces/{WORKSPACE}' under "
                 "resource group 'rg' was not found."), "workspace",
        ),
        (told("WorkspaceNotFound"), "workspace"),
        (told("BadRequest", "", details=[{"code": "ResourceGroupNotFound", "message": "x"}]), "resource group"),
        (told("UserError", "Job j-l1 not found."), None),
        (
            told("ResourceNotFound", "The Resource 'Microsoft.MachineLearningServices/workspaces/mlw-team/jobs/j-l1' "
                 "under resource group 'rg' was not found."), None,
        ),
        (told("ParentResourceNotFound", "Parent resource 'an-endpoint' not found."), None),
        (told("ResourceNotFound", "Not found"), None),
        (None, None),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_apart(body: Any, scope: str | None) -> None:
    assert find_missing_scope(body, WORKSPACE) == scope


@pytest.mark.parametrize(
    ("body", "is_own"),
    [
        (told("UserError", "Job j-l1 not found."), True),
        (told("UserError", "Run j-l1 was not found"), True),
        (told("UserError", "Not found", target="j-l1"), True),
        (told("UserError", "Not found", details=[{"code": "NotFound", "message": "", "target": "jobs/J-L1"}]), True),
        (told("ResourceNotFound", "The Resource '.../workspaces/w/jobs/j-l1' was not found."), True),
        ("Job j-l1 not found.", False),  # no code: it may be the path that a proxy repeats
        (told("UserError", "Job j-l11 not found."), False),
        (told("UserError", "Job my-j-l1 not found."), False),
        (told("ResourceNotFound", "Not found"), False),
        (None, False),
    ],
)
def test_only_a_404_that_names_the_job_is_its_own(body: Any, is_own: bool) -> None:
    assert names_resource(body, "j-l1") is is_own

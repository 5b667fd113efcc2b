"""What a 404 says, and after which looks a job is gone."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.refusals import find_missing_scope, names_resource
from dtrain_dagster.clusters.azure_ml.states import Answer, is_absent, note_look

OPTIONS = AzureMLOptions(
    subscription_id="00000000-0000-4000-8000-000000000001",
    resource_group="rg",
    workspace="ws",
    storage_uri="az://d",
    missing_seconds=180,
    start_seconds=120,
)
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


def looks(*seen: tuple[float, Answer], asked_at: float = -1000.0) -> list[float]:
    misses: list[float] = []
    for at, answer in seen:
        misses = note_look(misses, answer, at, asked_at, OPTIONS)
    return misses


def own(*times: float) -> list[tuple[float, Answer]]:
    return [(at, "own") for at in times]


@pytest.mark.parametrize(
    ("seen", "gone"),
    [
        (own(0), False),
        (own(0, 180), False),  # two looks
        (own(0, 60, 120), False),  # two minutes
        (own(0, 90, 180), True),
        (own(*range(0, 180, 5)), False),
        (own(*range(0, 185, 5)), True),
        (own(0, 1, 2, 3600), False),  # nobody has looked for an hour
        (own(0, 3600, 3645), False),
        (own(0, 3600, 3690, 3780), True),
        (own(0, 300, 600), True),  # of a shell that looks every five minutes
        ([*own(0, 90), (100, "found"), *own(180, 270)], False),
        ([*own(0, 90), (100, "scope"), *own(180, 270)], False),
        ([(at, "scope") for at in range(0, 3600, 60)], False),
    ],
)
def test_a_job_is_gone_after_several_looks_over_minutes(seen: list[tuple[float, Answer]], gone: bool) -> None:
    assert is_absent(looks(*seen), OPTIONS) is gone


def test_no_look_counts_soon_after_the_job_was_asked_for() -> None:
    assert looks(*own(0, 60, 119), asked_at=0) == []
    assert looks(*own(0, 60, 119, 120, 200), asked_at=0) == [120, 200]

"""Which refusals of an API server are waited for: one that has just started knows nobody's rights for some seconds."""

from __future__ import annotations

import pytest

from dtrain_dagster.clusters.kubernetes.engine import PATIENCE_SECONDS, PassingRefusals

FORBIDDEN = 'jobs.batch is forbidden: User "trainer" cannot list resource "jobs"'


@pytest.fixture
def refusals() -> PassingRefusals:
    """After a good answer to a list and to a submission."""
    made = PassingRefusals()
    made.note_allowed("list the jobs")
    made.note_allowed("submit node 0")
    return made


def test_what_was_allowed_is_asked_for_again_until_patience_ends(refusals: PassingRefusals):
    for kind in ("list the jobs", "submit node 12"):
        assert refusals.may_pass(kind, 403, FORBIDDEN, 1000.0)
        assert refusals.may_pass(kind, 401, "Unauthorized", 1000.0 + PATIENCE_SECONDS - 1)
        assert not refusals.may_pass(kind, 403, FORBIDDEN, 1000.0 + PATIENCE_SECONDS)


def test_an_answer_in_between_renews_the_patience(refusals: PassingRefusals):
    assert refusals.may_pass("list the jobs", 403, FORBIDDEN, 0.0)
    refusals.note_allowed("list the jobs")
    assert refusals.may_pass("list the jobs", 403, FORBIDDEN, 2 * PATIENCE_SECONDS)


def test_what_was_never_allowed_and_a_quota_are_told_at_once(refusals: PassingRefusals):
    assert not refusals.may_pass("end a node", 403, FORBIDDEN, 0.0)
    assert not refusals.may_pass("submit node 1", 403, "jobs.batch is forbidden: exceeded quota: few", 0.0)
    assert not refusals.may_pass("list the jobs", 404, 'namespaces "absent" not found', 0.0)

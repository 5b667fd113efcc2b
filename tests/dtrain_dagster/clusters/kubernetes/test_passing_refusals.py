"""Which refusals of an API server are waited for: one that has just started knows nobody's rights for some seconds."""

from __future__ import annotations

import json
import time

import pytest

from dtrain_dagster.clusters.kubernetes.engine import PATIENCE_SECONDS, KubernetesEngine
from dtrain_dagster.clusters.supervision.engine import EngineError, EngineUnreachableError
from dtrain_dagster.settings.kubernetes import KubernetesSettings

FORBIDDEN = 'jobs.batch is forbidden: User "trainer" cannot list resource "jobs"'


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> KubernetesEngine:
    """After a good answer to a list and to a submission, at second 1000."""
    made = KubernetesEngine(KubernetesSettings(image="dtrain:1"), "/data/jobs/one", lambda *_: ())
    for what in ("list the jobs", "submit node 0"):
        with made._asking(what):
            pass
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    return made


def refused(engine: KubernetesEngine, what: str, status: int = 403, said: str = FORBIDDEN) -> type[Exception]:
    from kubernetes.client.exceptions import ApiException

    error = ApiException(status=status, reason=said)
    error.body = json.dumps({"message": said})
    with pytest.raises((EngineError, EngineUnreachableError)) as told, engine._asking(what):
        raise error
    return told.type


def test_what_was_allowed_is_asked_for_again_until_patience_ends(
    engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
):
    for what in ("list the jobs", "submit node 12"):
        assert refused(engine, what) is EngineUnreachableError
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + PATIENCE_SECONDS)
    assert refused(engine, "submit node 12", 401) is EngineError
    with engine._asking("list the jobs"):  # an answer in between renews the patience
        pass
    assert refused(engine, "list the jobs") is EngineUnreachableError


def test_what_was_never_allowed_and_a_quota_are_told_at_once(engine: KubernetesEngine):
    assert refused(engine, "end a node") is EngineError
    assert refused(engine, "submit node 1", said="jobs.batch is forbidden: exceeded quota: few") is EngineError
    assert refused(engine, "list the jobs", 404, 'namespaces "absent" not found') is EngineError

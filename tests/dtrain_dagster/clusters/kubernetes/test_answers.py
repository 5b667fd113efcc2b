from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.kubernetes.objects import read_node, seconds
from dtrain_dagster.clusters.supervision.engine import EngineJob

Json = dict[str, Any]
AT = "2026-03-01T10:00:{:02d}Z"
NOW = 1772359260.0
"""10:01:00."""
LATER = "2026-03-01T11:00:00Z"
RUNNING = {"state": {"running": {"startedAt": AT.format(5)}}, "ready": True}


def job(conditions: list[Json] | None = None, spec: Json | None = None, **about: Any) -> Json:
    labels = {"dtrain/node": "4", "dtrain/incarnation": "2", "kueue.x-k8s.io/queue-name": "research"}
    return {
        "metadata": {"name": "n4", "uid": "job", "creationTimestamp": AT.format(0), "labels": labels, **about},
        "spec": spec or {},
        "status": {"conditions": conditions or []},
    }


def pod(phase: str, container: Json | None = None, host: str = "m1", uid: str = "pod", **changes: Any) -> Json:
    deleted = {"deletionTimestamp": changes.pop("deleted")} if "deleted" in changes else {}
    status = {"phase": phase, "containerStatuses": [container] if container else [], **changes}
    return {
        "metadata": {"name": uid, "uid": uid, "creationTimestamp": AT.format(1), **deleted},
        "spec": {"nodeName": host or None},
        "status": status,
    }


def ended(code: int, reason: str = "Error", message: str = "") -> Json:
    times = {"startedAt": AT.format(5), "finishedAt": AT.format(30)}
    return {"state": {"terminated": {"exitCode": code, "reason": reason, "message": message, **times}}, "ready": False}


def condition(kind: str, status: str = "True", **more: Any) -> Json:
    return {"type": kind, "status": status, "lastTransitionTime": AT.format(40), **more}


def event(reason: str, message: str, about: str = "job") -> Json:
    return {"reason": reason, "message": message, "involvedObject": {"uid": about}, "lastTimestamp": AT.format(9)}


def read(job: Json, *pods: Json, **more: Any) -> EngineJob:
    return read_node(job, pods, **{"warnings": [], "now": NOW, **more})


def test_a_running_node_has_its_numbers_its_machine_and_its_times():
    seen = read(job(), pod("Running", RUNNING))
    assert (seen.id, seen.node_id, seen.incarnation, seen.state, seen.host) == ("n4", 4, 2, "running", "m1")
    assert (seen.submitted_at, seen.started_at) == (seconds(AT.format(0)), seconds(AT.format(5)))


@pytest.mark.parametrize(
    ("code", "means"), [(0, 0), (1, 1), (75, 75), (128, 128), (137, -9), (143, -15), (192, -64), (193, 193)]
)
def test_exit_codes_are_the_programs_or_minus_the_signal(code: int, means: int):
    seen = read(job(), pod("Failed", ended(code)))
    assert (seen.state, seen.exit_code, seen.lost, seen.ended_at) == ("ended", means, False, seconds(AT.format(30)))


@pytest.mark.parametrize(
    ("cause", "taken"),
    [
        ("taken", pod("Failed", reason="Evicted", message="The node was low on resource: memory.")),
        ("taken", pod("Failed", ended(137), reason="Terminated", message="Pod was terminated by a node shutdown.")),
        ("taken", pod("Failed", ended(143), conditions=[condition("DisruptionTarget", reason="Preemption")])),
        ("taken", pod("Failed", ended(143), deleted=AT.format(50))),
        ("machine", pod("Running", RUNNING, deleted=AT.format(50))),
        ("machine", pod("Running", RUNNING, deleted=LATER, conditions=[condition("Ready", "False")])),
        ("taken", pod("Pending", host="", deleted=LATER)),
    ],
    ids=["evicted", "shutdown", "preempted", "deleted", "overdue", "no answer", "never started"],
)
def test_a_node_that_was_taken_away_is_lost(cause: str, taken: Json):
    seen = read(job(), taken)
    assert (seen.state, seen.lost, seen.cause) == ("ended", True, cause)


def test_too_much_memory_is_the_programs_doing():
    assert read(job(), pod("Failed", ended(137, "OOMKilled"))).cause == "program"
    assert read(job(), pod("Failed", ended(3))).cause == ""


@pytest.mark.parametrize(
    "there",
    [
        pod("Running", RUNNING, conditions=[condition("Ready", "False")]),
        pod("Running", RUNNING, deleted=LATER, conditions=[condition("Ready")]),
        pod(
            "Running",
            RUNNING | {"ready": False},
            deleted=LATER,
            conditions=[condition("Ready", "False")],
        ),
    ],
    ids=["no answer", "told to end", "told to end and not ready"],
)
def test_a_node_that_may_still_run_is_not_lost_yet(there: Json):
    assert read(job(), there).state == "running"


def test_a_machine_that_does_not_answer_is_named():
    seen = read(job(), pod("Running", RUNNING, conditions=[condition("Ready", "False")]))
    assert seen.reason == "machine m1 does not answer"


def test_a_node_that_we_delete_ourselves_is_not_lost():
    seen = read(job(deletionTimestamp=AT.format(40)), pod("Failed", ended(3), deleted=AT.format(50)))
    assert (seen.exit_code, seen.lost) == (3, False)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (read(job(), pod("Failed", ended(137, "OOMKilled"))), "raise DTRAIN_NODE_MEMORY_GIB"),
        (read(job(), pod("Failed", ended(128, "StartError", "exec: no such file"))), "check DTRAIN_NODE_PYTHON"),
        (read(job([], {"suspend": True})), "waits in Kueue's queue research"),
        (
            read(job(), warnings=[event("FailedCreate", "pods is forbidden: exceeded quota")]),
            "have the quota raised",
        ),
        (
            read(job(), warnings=[event("FailedCreate", 'violates PodSecurity "restricted"')]),
            "see the pod_template of DTRAIN_KUBERNETES_OPTIONS",
        ),
        (
            read(job(), pod("Pending", host="", conditions=[condition("PodScheduled", "False", message="0/2 nodes")])),
            "no machine has room: 0/2 nodes; lower DTRAIN_NODE_CPUS",
        ),
        (
            read(job(), pod("Pending", {"state": {"waiting": {"reason": "ErrImagePull", "message": "no\n such"}}})),
            "ErrImagePull: no such; check DTRAIN_KUBERNETES_IMAGE",
        ),
        (
            read(job(), pod("Pending"), warnings=[event("FailedMount", "no such claim", "pod")]),
            "no such claim; check DTRAIN_KUBERNETES_VOLUMES",
        ),
        (read(job([condition("Failed", reason="DeadlineExceeded")])), "longer than the cluster allows"),
    ],
    ids=["memory", "program", "queue", "quota", "security", "room", "image", "volume", "deadline"],
)
def test_the_reason_has_the_remedy(seen: EngineJob, said: str):
    assert said in seen.reason


def test_an_event_about_something_else_is_no_reason():
    assert read(job(), warnings=[event("FailedCreate", "exceeded quota", "another")]).reason == ""


def test_a_pod_in_the_place_of_a_deleted_one_does_not_count():
    seen = read(job(), pod("Running", RUNNING, uid="second"), known_uid="first")
    assert (seen.state, seen.lost, seen.reason) == ("ended", True, "its pod was deleted")
    both = read(job(), pod("Running", RUNNING, uid="second"), pod("Failed", ended(7), uid="first"), known_uid="first")
    assert both.exit_code == 7


def test_the_oldest_of_several_pods_counts():
    later = pod("Running", RUNNING, uid="later", host="m2")
    later["metadata"]["creationTimestamp"] = AT.format(20)
    assert read(job(), later, pod("Failed", ended(7))).exit_code == 7


def test_a_job_whose_pod_is_gone_has_ended():
    assert read(job([condition("Complete")])).exit_code == 0
    gone = read(job([condition("Failed", reason="BackoffLimitExceeded")]))
    assert (gone.state, gone.lost, gone.exit_code) == ("ended", True, None)
    assert read(job()).state == "pending"

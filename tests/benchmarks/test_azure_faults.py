"""The scripts of `benchmarks.azure_faults` against the emulator's own list of faults, and its judgement of runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.azure_faults_judgement import Campaign, RunFacts, judge, lost_usd, orphan_minutes
from benchmarks.azure_faults_scripts import KINDS, SKU, FaultKind, Script, ask_for, make_script
from harness.azure.emulator.faults import FIELDS, Faults

STAY = {
    "compute": "s1-nc6", "node": "n0", "vm_size": SKU, "tier": "dedicated", "start": 0.0, "end": 900.0,
    "jobs": [["faults-1-l1", 60.0, 660.0]],
}  # fmt: skip
CALM = RunFacts(
    outcome="succeeded", message="", may_end={"succeeded", "failed", "no_capacity", "cancelled"},
    steps=40, result={"steps": 40, "weights_equal_on_ranks": True}, launch=1,
    job_id="faults-1", nodes=2, jobs={"faults-1-l1": "Completed"}, failed_computes=(), live_nodes=0, left_computes=(),
    ended_at=660.0, released_at=1300.0, stays=[STAY], now=1400.0, counted_minutes=9.9,
    prices={(SKU, "dedicated"): 3.06},
)  # fmt: skip


def stay(**changes: Any) -> list[dict[str, Any]]:
    return [STAY | changes]


VERBS = ("quota",)
"""Verbs of the emulator's control port that kinds of faults ask, beside ``fault``."""
LEFT_OUT: dict[str, str] = {}
"""Switches of the emulator that no script turns, and why."""


def test_every_switch_of_the_emulator_is_turned_by_a_kind() -> None:
    missing = set(FIELDS) - {kind.switch for kind in KINDS} - set(LEFT_OUT)
    assert not missing, f"add an entry to KINDS in benchmarks/azure_faults_scripts.py, or to LEFT_OUT here: {missing}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_emulator_takes_what_a_kind_draws(kind: FaultKind) -> None:
    for seed in range(100):
        asked = ask_for(kind, random.Random(seed))
        assert kind.verb in VERBS or Faults().add(asked, now=0.0).kind == kind.switch


def test_scripts_are_those_of_their_seeds_and_have_every_kind() -> None:
    scripts = [make_script(seed) for seed in range(100)]
    assert scripts == [make_script(seed) for seed in range(100)]
    assert {fault.name for script in scripts for fault in script.faults} == {kind.name for kind in KINDS}
    assert {1, 4} <= {len(script.faults) for script in scripts} <= {1, 2, 3, 4}
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    late = {
        fault.name: fault.after_seconds is not None
        for script in scripts
        for fault in script.faults
        if not 0 < next(kind.late for kind in KINDS if kind.name == fault.name) < 1
    }
    assert late == {kind.name: kind.late == 1 for kind in KINDS if kind.late in (0, 1)}
    for happens in ("dies_after", "cancels_after", "cancels_ended"):
        assert any(getattr(script, happens) for script in scripts), happens


@pytest.mark.parametrize(
    ("changes", "violated"),
    [
        ({}, []),
        ({"outcome": "cancelled"}, []),
        ({"outcome": "failed", "message": "no such file"}, []),
        ({"outcome": "failed"}, ["says_why"]),
        ({"outcome": "failed", "message": "deleted", "may_end": {"succeeded"}}, ["outlives_what_passes"]),
        ({"outcome": "cancelled", "may_end": {"succeeded", "failed"}}, ["outlives_what_passes"]),
        ({"outcome": "never_ended", "message": "waits"}, ["ends"]),
        ({"result": {"steps": 39, "weights_equal_on_ranks": True}}, ["trains"]),
        ({"result": {"steps": 40, "weights_equal_on_ranks": False}}, ["trains"]),
        ({"outcome": "no_capacity", "message": "none", "launch": 1}, ["buys_what_was_asked"]),
        ({"launch": 0}, ["buys_what_was_asked"]),
        ({"jobs": {"faults-1-l1": "Completed", "faults-1-l2": "Completed"}}, ["buys_what_was_asked"]),
        ({"ended_at": 599.0}, ["leaves_no_orphans"]),
        ({"ended_at": 601.0}, []),  # two nodes may take half a minute each to settle
        ({"jobs": {"faults-1-l1": "Running"}}, ["leaves_no_job"]),
        ({"failed_computes": ["s1-nc6"]}, ["leaves_no_failed_compute"]),
        ({"live_nodes": 1}, ["gives_nodes_back"]),
        ({"left_computes": ["s1-nc6"]}, ["cleans_up"]),
        ({"counted_minutes": 11.0}, ["counts_no_more_than_was_bought"]),
        ({"counted_minutes": 2.0}, []),  # a node's processes start after the node
        ({"troubles": ["cleaning up: 403"]}, ["keeps_calm"]),
    ],
    ids=lambda value: json.dumps(value, default=sorted),
)  # fmt: skip
def test_each_invariant_is_violated_by_what_it_forbids(changes: dict[str, Any], violated: list[str]) -> None:
    assert [name for name, said in judge(replace(CALM, **changes)).items() if said] == violated


@pytest.mark.parametrize(
    ("changes", "orphans", "usd"),
    [
        ({}, 0.0, 0.0),
        ({"ended_at": 650.0}, 10 / 60, 0.0),  # settling is no loss
        ({"ended_at": 60.0}, 10.0, 0.51),
        ({"ended_at": 60.0, "stays": stay(jobs=[["faults-1-l1", 60.0, None]])}, 1340 / 60, 1.139),
        ({"stays": stay(jobs=[["faults-11-l1", 60.0, None]]), "ended_at": 60.0}, 0.0, 0.0),  # another run's
        ({"stays": stay(end=None)}, 0.0, 100 / 3600 * 3.06),  # it stays after the idle time
        ({"stays": stay(end=None, vm_size="Standard_Unknown")}, 0.0, 0.0),
    ],
)
def test_what_a_run_lost(changes: dict[str, Any], orphans: float, usd: float) -> None:
    facts = replace(CALM, **changes)
    assert orphan_minutes(facts) == pytest.approx(orphans)
    assert lost_usd(facts) == pytest.approx(usd)


def test_a_script_may_end_as_its_faults_and_people_make_it() -> None:
    passing = {kind.name for kind in KINDS if not kind.may_end}
    scripts = [make_script(seed) for seed in range(400)]
    passed = {script.may_end for script in scripts if passing >= {fault.name for fault in script.faults}}
    assert passed == {frozenset({"succeeded"}), frozenset({"succeeded", "cancelled"})}
    lost = [script for script in scripts if "preempt" in {fault.name for fault in script.faults}]
    assert lost
    assert all({"succeeded", "failed"} <= script.may_end for script in lost)


def test_a_campaign_counts_its_runs() -> None:
    script, campaign = Script(faults=make_script(1).faults, cancels_ended=True), Campaign()
    good, bad = CALM, replace(CALM, live_nodes=2, stays=stay(end=None), outcome="cancelled")
    assert campaign.add(1, script, False, good) == {}
    assert campaign.add(2, script, True, bad) == {"gives_nodes_back": "2 nodes alive after the idle time"}
    counts = campaign.as_dict()
    assert (counts["runs"], counts["violations"], counts["failed_seeds"], counts["lifted"]) == (2, 1, [2], 1)
    assert counts["invariants"] == dict.fromkeys(judge(CALM), 0) | {"gives_nodes_back": 1}
    assert counts["outcomes"] == {"succeeded": 1, "cancelled": 1}
    assert counts["faults"]["cancel again"] == 2
    assert counts["lost_usd"] == pytest.approx(0.085)

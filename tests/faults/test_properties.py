"""Each property finds what it is there for: planted faults, one at a time, in what a good run leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.faults import tape as tapes
from harness.faults.hosts import ObservedIncarnation
from harness.faults.properties import (
    redone_steps,
    several_writers,
    split_brains,
    unequal_weights,
    wrong_accounts,
    wrong_codes,
    wrong_history,
    wrong_losses,
    wrong_resumes,
    wrong_samples,
)
from trainer.data.coverage import digest_of_all
from trainer.documents.presences import NodePresence
from trainer.elastic.generation import Candidate, Generation

COUNT = 1000


def seat(node: int, was_in: int = 0, member: str | None = None, local_rank: int = 0, **fields: Any) -> Candidate:
    return Candidate(
        member=member or f"n{node}p0-a", node=node, local_rank=local_rank, launch=fields.pop("launch", 1),
        host="h", port=1, was_in=was_in, **fields,
    )  # fmt: skip


HISTORY = [
    Generation(number=1, launch=1, members=(seat(0), seat(1), seat(2))),
    Generation(number=2, launch=1, members=(seat(1, 1), seat(2, 1)), step=10),
    Generation(number=3, launch=1, members=(seat(1, 2), seat(2, 2), seat(0, member="n0p0-b")), step=20),
]
STEPS = [
    {"generation": generation, "step": step, "loss": 1.0 / step}
    for generation, first, last in ((1, 1, 10), (2, 11, 20), (3, 21, 30))
    for step in range(first, last + 1)
]
LOSSES = {step: 1.0 / step for step in range(1, 31)}


def test_a_good_history_is_good() -> None:
    assert wrong_history(HISTORY) == []
    assert redone_steps(STEPS, HISTORY) == []
    assert wrong_losses(STEPS, LOSSES) == []


@pytest.mark.parametrize(
    "bad",
    [
        [HISTORY[0], HISTORY[2]],
        [HISTORY[0], replace(HISTORY[1], members=(seat(1, 1), seat(3, 1)))],
        [HISTORY[0], HISTORY[1], replace(HISTORY[2], members=(seat(1, 1), seat(2, 2)))],
        [HISTORY[0], replace(HISTORY[1], members=(seat(1, 1), seat(2, 1, launch=2)))],
        [HISTORY[0], replace(HISTORY[1], members=(seat(1, 1), seat(1, 1)))],
        [HISTORY[0], replace(HISTORY[1], members=(seat(1, 1), seat(1, member="n1p0-b")))],
        [HISTORY[0], HISTORY[1], replace(HISTORY[2], step=9)],
        [HISTORY[0], replace(HISTORY[1], members=())],
    ],
    ids=[
        "a number left out", "a state from nowhere", "a state of an older generation", "another launch's member",
        "a member twice", "a node twice", "back in time", "nobody",
    ],
)  # fmt: skip
def test_a_bad_history_is_found(bad: list[Generation]) -> None:
    assert wrong_history(bad)


def test_a_completed_step_that_is_done_again_is_found() -> None:
    again = [HISTORY[0], replace(HISTORY[1], step=9), HISTORY[2]]
    assert redone_steps(STEPS, again) == ["generation 1 had done step 10; 2 went on from 9"]
    # With nobody left who has it, the step has to be done again, from the checkpoint.
    fresh = replace(again[1], members=(seat(1, member="n1p0-b"),))
    assert redone_steps(STEPS, [HISTORY[0], fresh]) == []


def resumed(generation: int, step: int) -> dict[str, Any]:
    return {"kind": "resume", "generation": generation, "step": step, "time": 3.0}


def test_going_back_without_a_lost_row_is_found() -> None:
    both = [seat(0), seat(0, local_rank=1), seat(1), seat(1, local_rank=1)]
    both = [replace(item, member=f"n{item.node}p{item.local_rank}") for item in both]
    before = Generation(number=1, launch=1, members=tuple(both))
    kept = Generation(number=2, launch=1, members=tuple(replace(item, was_in=1) for item in both[:2]), step=10)
    torn = replace(kept, members=(replace(both[0], was_in=1), replace(both[2], was_in=1)))
    assert wrong_resumes([resumed(2, 5)], [before, kept], "hsdp"), "a whole copy is left"
    assert wrong_resumes([resumed(2, 5)], [before, torn], "hsdp") == [], "of two copies the same half"
    assert wrong_resumes([resumed(2, 5)], [before, kept], "fsdp") == []
    assert wrong_resumes([resumed(2, 5)], [before, kept], "ddp")
    saved = {"kind": "checkpoint", "generation": 1, "step": 8, "time": 1.0}
    assert wrong_resumes([resumed(2, 5), saved], [before, replace(kept, formed_at=2.0)], "fsdp"), "8 was saved"
    steps = [{"generation": 1, "step": 11, "loss": 1.0}]
    assert redone_steps(steps, [before, kept], "hsdp")
    assert redone_steps(steps, [before, kept], "fsdp") == []


def test_two_groups_that_take_a_generation_for_theirs_are_found() -> None:
    assert split_brains(STEPS) == []
    assert split_brains([*STEPS, STEPS[14]]) == ["step 15 of generation 2 was reported 2 times"]


@pytest.mark.parametrize("loss", [0.2001, None, float("nan")])
def test_a_loss_beside_the_curve_is_found(loss: float | None) -> None:
    assert wrong_losses([{"generation": 4, "step": 5, "loss": loss}], LOSSES)
    assert wrong_losses([{"generation": 4, "step": 31, "loss": 1.0}], LOSSES)


def test_weights_are_compared_tensor_by_tensor() -> None:
    good = {"a": torch.tensor([1.0, -100.0]), "b": torch.zeros(3)}
    near = {"a": torch.tensor([1.0005, -100.0]), "b": torch.zeros(3)}
    far = {"a": torch.tensor([1.01, -100.0]), "b": torch.zeros(3)}
    assert unequal_weights(good, good) == []
    assert unequal_weights(near, good) == []
    assert unequal_weights(far, good)
    assert unequal_weights({**good, "b": torch.tensor([0.0, 2e-5, 0.0])}, good)
    assert unequal_weights({**good, "b": torch.tensor([0.0, torch.nan, 0.0])}, good)
    assert unequal_weights({"a": good["a"]}, good)


def result(**changes: Any) -> dict[str, Any]:
    consumed = [{"epoch": epoch, "samples": COUNT, "digest": digest_of_all(COUNT)} for epoch in range(tapes.EPOCHS)]
    good = {
        "train_samples": COUNT, "steps": tapes.STEPS, "samples_seen": tapes.EPOCHS * COUNT, "consumed": consumed,
    }  # fmt: skip
    return {**good, **changes}


def test_samples_that_are_lost_or_doubled_are_found() -> None:
    good = result()
    assert wrong_samples(good, good["consumed"]) == []
    doubled = [{**good["consumed"][0], "digest": good["consumed"][0]["digest"] + 1}, *good["consumed"][1:]]
    lost = [{**good["consumed"][0], "samples": COUNT - 1}, *good["consumed"][1:]]
    for consumed in (doubled, lost, good["consumed"][1:]):
        assert wrong_samples(result(consumed=consumed), good["consumed"])
    assert wrong_samples(result(consumed=doubled), doubled), "both runs wrong in the same way"
    assert wrong_samples(result(steps=tapes.STEPS - 1), good["consumed"])
    assert wrong_samples(result(samples_seen=1), good["consumed"])


def test_two_writers_of_one_generation_are_found() -> None:
    one = {"generation": 1, "writer": "a"}
    assert several_writers([one, one, {"generation": 2, "writer": "b"}]) == []
    assert several_writers([one, {"generation": 1, "writer": "b"}])


def presence(node: int, began: float, ended: float | None, incarnation: int = 1) -> NodePresence:
    return NodePresence(
        node_id=node, launch=1, incarnation=incarnation, started_at=began, ended_at=ended, exit_codes=(0,)
    )


def test_time_that_was_not_lived_or_not_accounted_is_found() -> None:
    observed = [
        ObservedIncarnation(node=0, launch=1, incarnation=1, pid=1, started_at=100.0, ended_at=110.0),
        ObservedIncarnation(node=0, launch=1, incarnation=2, pid=2, started_at=111.0, ended_at=120.0),
    ]
    good = [presence(0, 100.0, 110.1), presence(0, 111.0, 120.1, incarnation=2)]
    assert wrong_accounts(good, observed) == []
    for bad in (
        good[:1],
        [*good, presence(1, 100.0, 101.0)],
        [good[0], presence(0, 111.0, None, incarnation=2)],
        [good[0], presence(0, 111.0, 124.0, incarnation=2)],
        [presence(0, 100.0, 110.4), presence(0, 110.3, 120.1, incarnation=2)],
    ):
        assert wrong_accounts(bad, observed)


def test_exit_codes_of_failures_are_found() -> None:
    good = presence(0, 100.0, 110.0)
    assert wrong_codes([replace(good, exit_codes=(code,)) for code in (0, -9, 143)]) == []
    for code in (1, 2, 75, -11):
        assert wrong_codes([replace(good, exit_codes=(code,))])

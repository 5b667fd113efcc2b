"""A selection of tapes, played to their end. The long campaign is `python -m benchmarks.chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.faults import tape as tapes
from harness.faults.network import NoNetworkError
from harness.faults.play import Strategy
from harness.faults.properties import describe
from harness.faults.stage import Stage

pytestmark = pytest.mark.slow

QUICK = (17, 50, 62, 86, 88)
"""Few that hold every kind, and one at an exact point of a step."""
SELECTION = (*QUICK, 1, 5, 7, 20, 39, 45, 52, 57, 66, 75)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.long) for seed in SELECTION]
)
def test_the_job_outlives_what_the_tape_does_to_it(stage: Stage, seed: int) -> None:
    try:
        outcome, wrong = stage.run(tapes.make(seed))
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert wrong == [], describe(outcome)
    assert outcome.happened, "nothing happened: the tape proves nothing"


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "seed"), [("fsdp", 7), ("fsdp", 6), ("hsdp", 4)])
def test_a_job_whose_ranks_share_the_model_outlives_it_too(
    tmp_path: Path, strategy: Strategy, seed: int
) -> None:  # fmt: skip
    stage = Stage(tmp_path, strategy)
    try:
        outcome, wrong = stage.run(tapes.make(seed))
    finally:
        stage.close()
    assert wrong == [], describe(outcome)
    assert outcome.happened, "nothing happened: the tape proves nothing"


@pytest.mark.parametrize(("strategy", "seed"), [("loop_of_two", 1), pytest.param("loop", 3, marks=pytest.mark.long)])
def test_a_loop_of_ones_own_outlives_it_with_the_weights_of_fit(
    tmp_path: Path, strategy: Strategy, seed: int
) -> None:  # fmt: skip
    """Of two optimizers, the update of the first is taken back where the batch is not committed."""
    stage = Stage(tmp_path, strategy)
    try:
        outcome, wrong = stage.run(tapes.make(seed))
    finally:
        stage.close()
    assert wrong == [], describe(outcome)
    assert outcome.happened


def test_the_selection_holds_every_kind() -> None:
    assert {fault.kind for seed in QUICK for fault in tapes.make(seed).faults} == set(tapes.KINDS)

"""A selection of tapes, played to their end. The long campaign is `python -m benchmarks.chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.faults import tape as tapes
from harness.faults.network import NoNetworkError
from harness.faults.play import Strategy
from harness.faults.properties import describe
from harness.faults.stage import Stage
from harness.faults.tape import Tape

pytestmark = pytest.mark.slow


def _joined(*seeds: int) -> Tape:
    """What happens on these tapes, in one run."""
    made = [tapes.make(seed) for seed in seeds]
    return replace(made[0], faults=tuple(fault for tape in made for fault in tape.faults))


FIT, LOOP = _joined(86, 17, 62, 50), tapes.make(88)
"""Together they hold every kind; the second has one at an exact point of a step."""
LONG = (1, 5, 7, 17, 20, 39, 45, 52, 57, 62, 66, 75, 88)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


def outlives(stage: Stage, tape: Tape, strategy: Strategy = "ddp") -> None:
    try:
        outcome, wrong = stage.run(tape, strategy)
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert wrong == [], describe(outcome)
    assert outcome.happened, "nothing happened: the tape proves nothing"


def test_the_job_outlives_what_the_tape_does_to_it(stage: Stage) -> None:
    outlives(stage, FIT)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG)
def test_it_outlives_other_tapes(stage: Stage, seed: int) -> None:
    outlives(stage, tapes.make(seed))


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "seed"), [("fsdp", 7), ("fsdp", 6), ("hsdp", 4)])
def test_a_job_whose_ranks_share_the_model_outlives_it_too(stage: Stage, strategy: Strategy, seed: int) -> None:
    outlives(stage, tapes.make(seed), strategy)


def test_a_loop_of_ones_own_outlives_it_with_the_weights_of_fit(stage: Stage) -> None:
    """Of two optimizers, the update of the first is taken back where the batch is not committed."""
    outlives(stage, LOOP, "loop_of_two")


def test_the_selection_holds_every_kind() -> None:
    assert {fault.kind for tape in (FIT, LOOP) for fault in tape.faults} == set(tapes.KINDS)

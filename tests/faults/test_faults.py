"""A selection of tapes, played to their end. The long campaign is `python -m benchmarks.chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tape as tapes
from hosts import Preload
from network import Network, NoNetworkError
from play import play, undisturbed
from properties import Reference, describe, read_reference, violations
from tape import Tape
from worlds import build

pytestmark = pytest.mark.slow


class Stage:
    """What all tapes share: the process that jobs are forked from, the data, and the undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.preload = folder, Preload()
        self.dataset = build(folder)
        self.references: dict[int, Reference] = {}
        self.network: Network | None = None

    def reference(self, tape: Tape) -> Reference:
        blank = undisturbed(tape)
        if blank.seed not in self.references:
            outcome = play(blank, self.preload, self.folder / f"undisturbed{blank.seed}", self.dataset)
            self.references[blank.seed] = read_reference(outcome.rundir)
            assert violations(outcome, self.references[blank.seed]) == []
        return self.references[blank.seed]

    def network_for(self, tape: Tape) -> Network | None:
        """Skips where the tape wants hosts and the kernel does not allow them."""
        if tape.hosts != "network":
            return None
        try:
            self.network = self.network or Network(tapes.NODES)
        except NoNetworkError as error:
            pytest.skip(str(error))
        return self.network

    def close(self) -> None:
        self.preload.close()
        if self.network is not None:
            self.network.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


SELECTION = (1, 5, 7, 17, 20, 39, 45, 52, 57, 62, 66, 75)


@pytest.mark.parametrize("seed", SELECTION)
def test_the_job_outlives_what_the_tape_does_to_it(stage: Stage, seed: int) -> None:
    tape = tapes.make(seed)
    network = stage.network_for(tape)
    reference = stage.reference(tape)
    outcome = play(tape, stage.preload, stage.folder / f"seed-{seed}", stage.dataset, network)
    assert violations(outcome, reference) == [], describe(outcome)
    assert outcome.happened, "nothing happened: the tape proves nothing"


def test_the_selection_holds_every_kind() -> None:
    assert {fault.kind for seed in SELECTION for fault in tapes.make(seed).faults} == set(tapes.KINDS)

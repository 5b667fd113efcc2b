"""What tapes are played on: a process that jobs are forked from, a dataset, a network of hosts, undisturbed runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.faults import tape as tapes
from harness.faults.hosts import Preload
from harness.faults.network import Network
from harness.faults.play import Outcome, Strategy, play, undisturbed
from harness.faults.properties import Reference, read_reference, violations
from harness.faults.tape import Tape
from harness.worlds import build


@dataclass
class Stage:
    """For one tape after the other. What is needed is made when it is needed, and kept."""

    folder: Path
    references: dict[int, Reference] = field(default_factory=dict)
    compared: set[tuple[int, Strategy]] = field(default_factory=set)
    """Undisturbed trainings that were held against their reference."""
    network: Network | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dataset = build(self.folder)
        self.preload = Preload()

    def run(self, tape: Tape, strategy: Strategy = "ddp") -> tuple[Outcome, list[str]]:
        """Play a tape; what happened, and what is wrong afterwards.

        Trainings of any strategy are compared with the undisturbed training with ``ddp``.
        `network.NoNetworkError` where it wants hosts and the kernel does not allow them.
        """
        network = self._network() if tape.hosts == "network" else None
        reference = self.reference(tape, strategy)
        folder = self.folder / f"seed-{tape.seed}-{strategy}"
        outcome = play(tape, self.preload, folder, self.dataset, network, strategy)
        return outcome, violations(outcome, reference)

    def reference(self, tape: Tape, strategy: Strategy = "ddp") -> Reference:
        """The undisturbed run of the same training with ``ddp``; that with ``strategy`` came to the same."""
        blank = undisturbed(tape)
        for each in dict.fromkeys(("ddp", strategy)):
            if (blank.seed, each) in self.compared:
                continue
            folder = self.folder / f"undisturbed{blank.seed}-{each}"
            outcome = play(blank, self.preload, folder, self.dataset, strategy=each)
            reference = self.references.setdefault(blank.seed, read_reference(outcome.rundir))
            wrong = violations(outcome, reference)
            assert not wrong, f"even the undisturbed run with {each}: {wrong}"
            self.compared.add((blank.seed, each))
        return self.references[blank.seed]

    def close(self) -> None:
        self.preload.close()
        if self.network is not None:
            self.network.close()

    def _network(self) -> Network:
        if self.network is None:
            self.network = Network(tapes.NODES)
        return self.network

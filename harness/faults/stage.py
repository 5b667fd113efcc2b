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
    strategy: Strategy = "ddp"
    """Of the trainings. What they are compared with is always the undisturbed training with ``ddp``."""
    references: dict[int, Reference] = field(default_factory=dict)
    network: Network | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dataset = build(self.folder)
        self.preload = Preload()

    def run(self, tape: Tape) -> tuple[Outcome, list[str]]:
        """Play a tape; what happened, and what is wrong afterwards.

        `network.NoNetworkError` where it wants hosts and the kernel does not allow them.
        """
        network = self._network() if tape.hosts == "network" else None
        reference = self.reference(tape)
        outcome = play(tape, self.preload, self.folder / f"seed-{tape.seed}", self.dataset, network, self.strategy)
        return outcome, violations(outcome, reference)

    def reference(self, tape: Tape) -> Reference:
        """The undisturbed run of the same training."""
        blank = undisturbed(tape)
        if blank.seed not in self.references:
            for strategy in dict.fromkeys(("ddp", self.strategy)):
                folder = self.folder / f"undisturbed{blank.seed}-{strategy}"
                outcome = play(blank, self.preload, folder, self.dataset, strategy=strategy)
                reference = self.references.setdefault(blank.seed, read_reference(outcome.rundir))
                wrong = violations(outcome, reference)
                assert not wrong, f"even the undisturbed run with {strategy}: {wrong}"
        return self.references[blank.seed]

    def close(self) -> None:
        self.preload.close()
        if self.network is not None:
            self.network.close()

    def _network(self) -> Network:
        if self.network is None:
            self.network = Network(tapes.NODES)
        return self.network

"""Play tapes of faults against real trainings, and count those that violate a property afterwards, which must be 0.

Run `python -m benchmarks.chaos`. A tape is made from its seed (`harness/faults/tape.py`);
`harness/faults/properties.py` says what must hold after it. A seed that fails is named, and `--seed SEED --tapes 1`
plays it again.

    tapes, violations, failed_seeds   tapes played; tapes that violated a property; their seeds
    not_played                        tapes left because the campaign itself broke down
    faults                            number of faults that happened, by kind
    generations, launches             generations agreed; starts of a job (a tape may end all nodes)
    strategy, resumes                 `training.strategy`; times that a checkpoint was read
    parameter_server                  generations in parameter-server mode
    largest_weight_difference         from the undisturbed run with ddp, relative to each tensor's largest weight
    load_before                       processes that want to run, before (`os.getloadavg`)
    skipped                           tapes that need a network of hosts, where the kernel does not allow one
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.host import note, options_of, stop_on_signals, tell
from harness.faults import tape as tapes
from harness.faults.network import NoNetworkError
from harness.faults.play import STRATEGIES, Outcome, Strategy
from harness.faults.properties import describe, largest_difference
from harness.faults.stage import Stage
from trainer.elastic.generation_record import generations

COUNTED = ("generations", "launches", "resumes", "parameter_server", "skipped")


@dataclass
class Campaign:
    """The seeds that are left, and the counts so far."""

    folder: Path
    strategy: Strategy = "ddp"
    seeds: SimpleQueue[int] = field(default_factory=SimpleQueue)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    largest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, name: str) -> None:
        """Play tapes until none is left; one of several threads runs this."""
        stage = Stage(self.folder / name)
        try:
            while True:
                self.one(stage, self.seeds.get_nowait())
        except Empty:
            pass
        finally:
            stage.close()

    def one(self, stage: Stage, seed: int) -> None:
        """Play the tape of one seed on this stage, and count its result."""
        try:
            outcome, wrong = stage.run(tapes.make(seed), self.strategy)
        except NoNetworkError as error:
            note(f"seed {seed} is skipped: {error}")
            with self.lock:
                self.counts["skipped"] += 1
            return
        except Exception:
            traceback.print_exc()
            with self.lock:
                self.counts["tapes"] += 1
                self.failed.append(seed)
            return
        history = generations(outcome.rundir.storage)
        difference = largest_difference(outcome.rundir, stage.reference(outcome.tape))
        with self.lock:
            self.counts["tapes"] += 1
            self.counts["launches"] += outcome.launches
            self.counts["generations"] += len(history)
            self.counts["resumes"] += sum(1 for _ in outcome.rundir.events("resume"))
            self.counts["parameter_server"] += sum(item.topology == "star" for item in history)
            self.faults += outcome.happened
            self.largest = max(self.largest, difference)
            _tell(outcome, wrong, len(history), difference)
            if wrong:
                self.failed.append(seed)


def _tell(outcome: Outcome, wrong: Sequence[str], generation_count: int, difference: float) -> None:
    seed, happened = outcome.tape.seed, dict(outcome.happened)
    line = f"seed {seed}: {outcome.seconds:.1f} s, {happened}, {generation_count} generations, {difference:.0e}"
    note(f"{line}: {'VIOLATED' if wrong else 'ok'}")
    if wrong:
        note("\n".join([*wrong, describe(outcome)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a tape failed or was not played, else 0."""
    parser = options_of("chaos", __doc__)
    parser.add_argument("--tapes", type=int, default=200, help="number of tapes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first tape; each further one has the next")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="ddp",
        help="of the trainings; hsdp: two ranks on each node; loop_of_two: a trainer.Loop",
    )
    parser.add_argument("--jobs", type=int, default=2, help="tapes played at a time")
    options = parser.parse_args(arguments)
    stop_on_signals()  # the nodes end with this process
    seeds = range(options.seed, options.seed + options.tapes)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        campaign = Campaign(Path(folder), options.strategy)
        for seed in seeds:
            campaign.seeds.put(seed)
        workers = [
            threading.Thread(target=campaign.work, args=(f"worker-{number}",), daemon=True)
            for number in range(min(options.jobs, len(seeds)))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    result: dict[str, Any] = {
        "strategy": options.strategy,
        "tapes": campaign.counts["tapes"],
        "violations": len(campaign.failed),
        "not_played": len(seeds) - campaign.counts["tapes"] - campaign.counts["skipped"],
        "failed_seeds": sorted(campaign.failed),
        "first_seed": options.seed,
        "faults": dict(sorted(campaign.faults.items())),
        **{name: campaign.counts[name] for name in COUNTED},
        "largest_weight_difference": campaign.largest,
        "seconds": round(time.time() - began, 1),
        "jobs": options.jobs,
    }
    tell("chaos", result, options.save, "chaos" if options.strategy == "ddp" else f"chaos_{options.strategy}")
    return 1 if campaign.failed or result["not_played"] else 0


if __name__ == "__main__":
    sys.exit(main())

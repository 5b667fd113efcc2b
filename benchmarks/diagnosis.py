"""Plant causes of slowness in real trainings, and count how often the report names the planted cause.

Run `python -m benchmarks.diagnosis`. A plant is made from a seed (`harness.clinic`): thirteen causes that the
diagnosis knows take turns, and there are trainings without a plant. Ranks really compute, on as many cores as there
are ranks except where missing cores are planted, and in the plants that need three hosts. There, and where other work
takes more than a fifth of a core before or after a training, missing cores are true besides, and the next cause that is
named is judged. `--load 0.5` lets a process beside all of it take half a core, `--load 4` four of them one each. The
default run of a laptop, one rank more than cores, is played beside it: there neither a rank nor the network may be
accused, in the report or in an alert while it runs.

    plants, right_percent   planted causes; percent named right (the cause, and the rank where it is one rank's)
    healthy, false_alarms   trainings without a plant; those in which the report blamed something
    mild_right_percent      percent named right of the plants that cost less than 15 % of a step
    laptop, accused         default runs of a laptop; those in which something but shared cores was named
    confusion               planted cause → named cause → number of plants
    wrong                   seed, planted cause, named cause, and the evidence given for it
    cores_elsewhere         mean of the cores that other work took, looked at before each training and after it
    skipped                 plants that need a network of hosts, where the kernel does not allow one
    not_played              plants and healthy trainings for which there was no time
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host import busy_beside, note, options_of, stop_on_signals, tell
from dtrain_dagster.monitoring.alerts import STRAGGLERS, alerts
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose
from dtrain_dagster.monitoring.windows import keep
from harness.clinic import (
    CAUSES,
    LARGE_GRADIENTS,
    Clinic,
    Plant,
    make_laptop_run,
    make_plant,
    seconds_of_round,
)
from harness.faults.network import NoNetworkError

MISSING_CORES = (SlowdownCause.CROWDED,)
ACCUSATIONS = (*STRAGGLERS, SlowdownCause.SLOW_LINK, SlowdownCause.COMMUNICATION, SlowdownCause.SMALL_BATCHES)
"""Causes that are a node's or the network's."""
LOOK_SECONDS, BUSY_CORES = 0.3, 0.2
"""How long other work is looked at, and the cores that it must take to count."""


def cores_elsewhere() -> float:
    """Return the cores that processes of this machine take now, while no training runs."""
    return psutil.cpu_percent(LOOK_SECONDS) / 100 * (psutil.cpu_count() or 1)


def named_cause(plant: Plant, found: Diagnosis, elsewhere: float) -> Diagnosis:
    """Return the diagnosis to judge: the first, but for missing cores where those are true besides what is planted."""
    if plant.cause in MISSING_CORES or not (elsewhere > BUSY_CORES or plant.is_crowded):
        return found
    others = [item for item in (found, *found.also) if item.cause not in MISSING_CORES]
    return others[0] if others else replace(found, cause=SlowdownCause.HEALTHY, rank=None, node_id=None)


def is_right(plant: Plant, named: Diagnosis) -> bool:
    """Return whether the diagnosis names the planted cause, and its place."""
    if named.cause is not plant.cause:
        return False
    return plant.node is None or named.node_id == plant.node


def accusations(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return what of these events' job is a node's or the network's fault, by the report and by alerts on the way."""
    found, recent = diagnose(events), keep((), ())
    told = [item.where for item in (found, *found.also) if item.cause in ACCUSATIONS]
    for event in events:
        recent = keep(recent, [event])
        if event["kind"] == "timing":
            told += [alert.title for alert in alerts(recent, told)]
    return told


def gradient_bytes(events: Sequence[dict[str, Any]]) -> int:
    """Return the bytes of gradients that one step sums, as a healthy run has recorded them."""
    timing = next(item for item in events if item["kind"] == "timing")
    return sum(entry["bytes"] for entry in timing["collectives"] if entry["name"].startswith("bucket"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 0 if all was played, 97 % are right, 90 % of the mild
    ones, and nothing healthy was blamed."""
    parser = options_of("diagnosis", __doc__)
    parser.add_argument("--plants", type=int, default=96, help="number of plants; causes take turns")
    parser.add_argument("--healthy", type=int, default=40, help="trainings without a plant")
    parser.add_argument("--laptop", type=int, default=4, help="default runs of a laptop, one rank more than cores")
    parser.add_argument("--seed", type=int, help="seed of everything that is drawn; by default drawn afresh")
    parser.add_argument("--load", type=float, default=0.0, help="cores that a process beside takes all the time")
    parser.add_argument("--minutes", type=float, default=25.0, help="no training is begun after so many minutes")
    options = parser.parse_args(arguments)
    stop_on_signals()  # the nodes end with this process
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    cases: list[tuple[SlowdownCause | None, int]] = [
        (SlowdownCause.HEALTHY, number) for number in range(options.healthy)
    ]
    cases += [(CAUSES[number % len(CAUSES)], number) for number in range(options.plants)]
    cases += [(None, number) for number in range(options.laptop)]
    random.Random(seed).shuffle(cases)  # whatever the machine does beside, no cause is hit more than others
    confusion: dict[str, Counter[str]] = {}
    wrong: list[dict[str, Any]] = []
    played: list[tuple[Plant, bool]] = []
    taken: list[float] = []
    skipped = not_played = 0
    began = time.time()
    laptop: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as folder, busy_beside(options.load):
        clinic = Clinic(Path(folder))
        try:
            pace = seconds_of_round()
            warm_up = Plant(seed=-1, cause=SlowdownCause.HEALTHY, model={"rounds": 1, "ballast": LARGE_GRADIENTS})
            size = gradient_bytes(clinic.events(warm_up, "warm-up"))
            for cause, number in cases:
                if time.time() - began > 60 * options.minutes:
                    not_played += 1
                    continue
                if cause is None:
                    events = clinic.events(make_laptop_run(number), f"laptop-{number}")
                    told, found = accusations(events), diagnose(events)
                    laptop.append(found.cause is SlowdownCause.CROWDED and not told)
                    if not laptop[-1]:
                        wrong.append({"name": f"laptop-{number}", "named": found.where, "accused": told})
                    note(f"laptop-{number}: {found.where}, {found.share:.1%}: {told or 'nobody is accused'}")
                    continue
                plant = make_plant(1000 * seed + number, cause, pace, size)
                name = f"{cause}-{number}".replace(" ", "-")
                before = cores_elsewhere()
                try:
                    found = diagnose(clinic.events(plant, name))
                except NoNetworkError as error:
                    note(f"{plant} is skipped: {error}")
                    skipped += 1
                    continue
                taken.append((before + cores_elsewhere()) / 2)
                named = named_cause(plant, found, taken[-1])
                good = is_right(plant, named)
                played.append((plant, good))
                confusion.setdefault(str(cause), Counter())[str(named.cause)] += 1
                if not good:
                    told = f"{named.where} ({named.share:.1%})"
                    wrong.append({"name": name, "planted": str(plant), "named": told, "evidence": named.evidence})
                besides = "" if named is found else f" besides {found.cause}, {found.share:.0%}"
                verdict = "ok" if good else f"WRONG: {named.evidence}"
                note(f"{name}: {plant} -> {named.where}, {named.share:.1%}{besides}: {verdict}")
        finally:
            clinic.close()
    planted = [good for plant, good in played if plant.cause is not SlowdownCause.HEALTHY]
    mild = [good for plant, good in played if plant.is_mild]
    healthy = [good for plant, good in played if plant.cause is SlowdownCause.HEALTHY]
    result = {
        "plants": len(planted),
        "right_percent": _percent(planted),
        "mild_plants": len(mild),
        "mild_right_percent": _percent(mild),
        "healthy": len(healthy),
        "false_alarms": healthy.count(False),
        "laptop": len(laptop),
        "accused": laptop.count(False),
        "confusion": {cause: dict(named) for cause, named in confusion.items()},
        "wrong": wrong,
        "skipped": skipped,
        "not_played": not_played,
        "seed": seed,
        "load": options.load,
        "cores_elsewhere": round(statistics.fmean(taken), 2) if taken else None,
        "seconds": round(time.time() - began, 1),
    }
    tell("diagnosis", result, options.save)
    good_enough = sum(planted) >= 0.97 * len(planted) and sum(mild) >= 0.9 * len(mild) and all([*healthy, *laptop])
    return 0 if (played or laptop) and good_enough and not not_played else 1


def _percent(rights: Sequence[bool]) -> float | None:
    return round(100 * sum(rights) / len(rights), 1) if rights else None


if __name__ == "__main__":
    sys.exit(main())

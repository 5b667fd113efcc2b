"""Attack this project: ``python -m benchmarks.abuse --seed S`` prints one line of JSON.

Each campaign is a module of this package with a function ``attack(random, rounds) -> Tally``; ``--only NAME`` runs one
of them. It makes everything that it attacks in a folder of its own, on loopback, and stops everything that it started.
``accepted``, ``outages``, ``executed`` and ``leaked`` must be 0; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import random
import sys
import time
from dataclasses import asdict
from typing import Any

import benchmarks.abuse
from benchmarks.abuse.tally import Tally
from benchmarks.checkpoint import RESULTS, _cpu


def campaigns() -> list[str]:
    """Return the names of the modules that have an ``attack``."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.abuse.__path__)]
    return sorted(name for name in names if name not in ("__main__", "forks", "tally"))


def main(arguments: list[str] | None = None) -> None:
    """Run the campaigns with these command-line arguments; exit with 0 if no attack succeeded, else with 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the attacks (default 0)")
    parser.add_argument("--rounds", type=int, default=20, help="variations of each kind of attack (default 20)")
    parser.add_argument("--only", choices=campaigns(), action="append", help="only this campaign (may be repeated)")
    parser.add_argument("--save", action="store_true", help="also write it to benchmarks/results/abuse.json")
    options = parser.parse_args(arguments)
    total, by_campaign, load_before = Tally(), dict[str, Any](), os.getloadavg()[0]
    for name in options.only or campaigns():
        began = time.monotonic()
        module = importlib.import_module(f"benchmarks.abuse.{name}")
        tally = module.attack(random.Random(f"{name}-{options.seed}"), options.rounds)
        by_campaign[name] = {**asdict(tally), "seconds": round(time.monotonic() - began, 1)}
        total.add(tally)
        print(f"{name}: {by_campaign[name]}", file=sys.stderr, flush=True)
    result = {
        "benchmark": "abuse", "seed": options.seed, "rounds": options.rounds, **asdict(total),
        "campaigns": {name: {key: value for key, value in row.items() if key != "findings"}
                      for name, row in by_campaign.items()},
        "date": time.strftime("%Y-%m-%d"), "cpu": _cpu(), "cores": os.cpu_count(),
        "load_before": round(load_before, 2), "load_after": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    line = json.dumps(result)
    print(line)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "abuse.json").write_text(line + "\n")
    sys.exit(0 if total.is_clean else 1)


if __name__ == "__main__":
    main()

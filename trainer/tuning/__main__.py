"""``python -m trainer.tuning --config job.json --seconds 300``: one rank of a tuning job, which measures settings.

The command line belongs here; what is measured, and how, is `trainer.tuning.tuner`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from trainer.config import ConfigError, parse_job
from trainer.engine.run_job import leave_process
from trainer.model.allowed_factories import refuse_foreign_factories
from trainer.observability.node_presence import record_presence
from trainer.rundir import RunDir
from trainer.storage.open import open_storage
from trainer.tuning.search import LEAST_SECONDS
from trainer.tuning.tuner import run_tuning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tuning",
        description="Measure which settings train a job.json fastest (tuned.json).",
    )
    parser.add_argument("--config", required=True, metavar="JOB", help="job.json: a path or any fsspec address")
    parser.add_argument("--seconds", type=float, default=300.0, help="what it may take once all ranks train (300)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    if not options.seconds >= LEAST_SECONDS:
        parser.error(f"--seconds {options.seconds:g}: settings cannot be compared in less than {LEAST_SECONDS:g}")
    folder, slash, name = options.config.rpartition("/")
    try:
        job = parse_job(open_storage(folder or slash or ".").read(name).decode(), source=options.config)
        refuse_foreign_factories(job)
        RunDir(job.run_dir).make()
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        parser.error(f"--config {options.config}: {error}")
    with record_presence(job, os.environ) as leaving:
        leaving.code = run_tuning(job, options.seconds)
    return leaving.code


if __name__ == "__main__":
    sys.exit(leave_process(main()))

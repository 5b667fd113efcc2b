"""``python -m trainer --config job.json``: one rank of a training. torchrun, a cluster or a person starts it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Sequence

from trainer.comm.descriptors import raise_descriptor_limit
from trainer.config import ConfigError, parse_job
from trainer.exit_codes import DONE, UNUSABLE, describe_exit_codes
from trainer.model.allowed_factories import refuse_foreign_factories
from trainer.rundir import RunDir
from trainer.storage.open import open_storage

_EPILOG = """
examples:
  python -m trainer --config job.json                                  one process
  torchrun --nproc-per-node 2 -m trainer --config job.json             two processes on this machine
  torchrun --nnodes 3 --node-rank K --master-addr HOST --master-port 29500 -m trainer --config job.json

exit codes:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code (`trainer.exit_codes`)."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train the job that a job.json describes; what happens is written to its run directory.",
        epilog=_EPILOG + describe_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="JOB", help="job.json: a path or any fsspec address")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a field, such as training.epochs=2 (repeatable)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the configuration and print it")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    folder, slash, name = options.config.rpartition("/")
    try:
        text = open_storage(folder or slash or ".").read(name).decode()
        job = parse_job(text, options.overrides, source=options.config)
        refuse_foreign_factories(job)
        if not options.dry_run:
            RunDir(job.run_dir).make()
    except FileNotFoundError:
        return _refuse(f"--config {options.config}: there is no such file")
    except ConfigError as error:
        return _refuse(str(error))
    except (OSError, UnicodeDecodeError) as error:
        return _refuse(f"--config {options.config} cannot be read: {error}")
    if options.dry_run:
        print(job.to_json())  # noqa: T201 - the output of --dry-run
        return DONE
    raise_descriptor_limit()
    gc.disable()  # the objects of torch stay, and to look through them while they are made takes an eighth of the time
    from trainer.engine.run_job import run_job  # loads torch, so only after the configuration was checked
    from trainer.observability.node_presence import record_presence

    gc.freeze()
    gc.enable()
    with record_presence(job, os.environ) as leaving:
        leaving.code = run_job(job)
    return leaving.code


def run(arguments: Sequence[str] | None = None) -> int:
    """Run `main` in a process that does nothing else; it may end here, see `trainer.engine.run_job.leave_process`, and
    else ends as `_QuickEnd` says."""
    end = _QuickEnd()
    code = main(arguments)
    end.set_code(code)
    if "trainer.engine.run_job" in sys.modules:
        from trainer.engine.run_job import leave_process

        leave_process(code)
    return code


class _QuickEnd:
    """Ends the process where the interpreter would begin to take its objects apart, which takes one that has loaded
    torch a second of processor time: after threads that are waited for, and after all exit handlers that were
    registered later. Make it before anything large is imported."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def set_code(self, code: int) -> None:
        """End with this exit code. Without it, as after an exception, the process ends as any other."""
        self._code = code

    def _end(self) -> None:
        if self._code is None:
            return
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):  # a closed pipe: nobody reads what is left
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self._code)


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)  # noqa: T201 - this is a command line
    return UNUSABLE


if __name__ == "__main__":
    sys.exit(run())

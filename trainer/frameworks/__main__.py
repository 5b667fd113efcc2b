"""``python -m trainer.frameworks --engine NAME -- COMMAND…``: one rank of a user's program under a framework."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trainer.comm.launch_secret import SECRET_FILE, read_launch_secret
from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.exit_codes import EVICTED, LOST, UNUSABLE
from trainer.frameworks.catalogue import FRAMEWORKS, TORCHRUN, explain_missing
from trainer.frameworks.child import Child
from trainer.frameworks.meeting import Meeting, MeetingError
from trainer.observability.node_presence import record_presence_in
from trainer.rundir import SCRIPT_FOLDER
from trainer.runtime.launch import LAUNCH_VARIABLE, Launch

_EPILOG = """
A cluster of dtrain or torchrun starts this once per process, with torchrun's variables. The exit code is the command's;
2 where it could not be started, 75 where the ranks lost each other before it began.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the command as its framework wants; return the exit code where that is impossible."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.frameworks",
        description="Run one rank of a program that uses Horovod, DeepSpeed, Ray Train or TensorFlow.",
        epilog=_EPILOG,
    )
    parser.add_argument("--engine", required=True, choices=sorted(FRAMEWORKS))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give the command after --")
    try:
        start(options.engine, command, os.environ)
    except ConfigError as error:
        return _fail(str(error), UNUSABLE)
    except MeetingError as error:
        return _fail(str(error), LOST)
    except _TerminatedError:
        return EVICTED


class _TerminatedError(BaseException):
    """This process was asked to end before there was a program to ask."""


def start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command under this framework, or run it and leave with its exit code. Raise `ConfigError` where it
    cannot be started, `MeetingError` where the ranks do not find each other."""
    framework = FRAMEWORKS[name]
    if missing := explain_missing(framework):
        raise ConfigError(f"{missing} (the Python of this node is {sys.executable})")
    refuse_missing(command)
    facts = rank_facts(environment, DistributedTrainingConfig())
    if name == TORCHRUN:
        run_or_become(command, environment, facts)
    before = signal.signal(signal.SIGTERM, _terminate)
    doing = importlib.import_module(f"trainer.frameworks.{name}")
    secret = read_launch_secret(environment)
    with Meeting(facts, secret, environment) as meeting:
        if framework.runs_once:
            # Variables that name the secret stay out of what a framework's own servers inherit.
            plain = {key: value for key, value in environment.items() if key not in (SECRET_FILE, LAUNCH_VARIABLE)}
            with record_presence_in(environment.get(SCRIPT_FOLDER, ""), facts, environment) as leaving:
                leaving.code = int(doing.run(facts, meeting, plain, command, secret))
            leave(leaving.code)
        added: dict[str, str] = doing.prepare(facts, meeting, environment)
    signal.signal(signal.SIGTERM, before)
    run_or_become(command, {**environment, **added}, facts, serves=framework.serves and facts.rank == 0)


def refuse_missing(command: Sequence[str]) -> None:
    """Raise `ConfigError` for a program, or a script of Python's, that is not on this node."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r} on this node")
    script = next(iter(command[1:]), "") if Path(command[0]).name.startswith("python") else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise ConfigError(
            f"there is no script {script} on this node, in {os.getcwd()}: only the trainer is sent to the nodes of a "
            "cluster; put it on storage that they share, or into their image, at the same path"
        )


def run_or_become(
    command: Sequence[str], environment: Mapping[str, str], facts: RankFacts, serves: bool = False
) -> NoReturn:
    """Run the command, where this process serves others meanwhile, or has to record the presence of its node; else
    become it: the command then keeps this process's number, its output and what it is sent."""
    records = Launch.read(environment).records_presence and not facts.local_rank and SCRIPT_FOLDER in environment
    if not records and not serves:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(command[0], list(command), dict(environment))
    with record_presence_in(environment.get(SCRIPT_FOLDER, ""), facts, environment if records else {}) as leaving:
        leaving.code = Child(command, environment).wait()
    leave(leaving.code)


def leave(code: int) -> NoReturn:
    """End this process with its connections open: the others take their end for the end of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off what ends the first's processes
    raise _TerminatedError


def _fail(why: str, code: int) -> int:
    print(why, file=sys.stderr, flush=True)  # noqa: T201 - the log of this process
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The command line of the node agent: ``python -m trainer.node RUN_DIR --launch L --node N --incarnation S``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trainer.comm.descriptors import raise_descriptor_limit
from trainer.errors import DamagedError
from trainer.exit_codes import LOST, UNUSABLE, describe_exit_codes
from trainer.node.agent import run_agent, say
from trainer.node.environment import LaunchError
from trainer.rundir import RunDir


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent of one node, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.node",
        description="Run one node of a job: its ranks, its record and its log, until all of it has ended. An engine "
        "such as SLURM, Kubernetes or Ray starts this on each node.",
        epilog=f"exit codes:\n{describe_exit_codes()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", help="the run directory, on storage that all nodes share")
    parser.add_argument("--launch", type=int, required=True, help="number of the job's launch")
    parser.add_argument("--node", type=int, required=True, help="number of the node, from 0")
    parser.add_argument("--incarnation", type=int, default=1, help="1, or more in the place of a lost node")
    parser.add_argument("--secret-file", default="", help="file with the secret of the launch, of this user alone")
    options = parser.parse_args(arguments)
    raise_descriptor_limit()
    try:
        rundir = RunDir(options.run_dir)
        return run_agent(rundir, options.launch, options.node, options.incarnation, options.secret_file)
    except (DamagedError, LaunchError) as error:
        say(str(error))
        return UNUSABLE
    except PermissionError as error:
        say(f"{error}: the nodes must run as the user who submits, or as a user who may write to the run directory")
        return UNUSABLE
    except OSError as error:
        say(f"the run directory cannot be used on this node: {error}")
        return LOST


if __name__ == "__main__":
    sys.exit(main())

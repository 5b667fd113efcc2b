"""The exit codes by which a process of a training says how it ended, and their meaning in words.

Only the numbers and their words belong here, and what a cluster says of a node that ends: `trainer.engine.run_job`
decides which code a failure leads to, `dtrain_dagster.clusters.exit_policy` what a cluster does about it. This module
imports nothing.
"""

DONE = 0
"""The training is done, or another process has ended it as done."""
FAILED = 1
"""An error that would occur again: starting again does not help."""
UNUSABLE = 2
"""The configuration, the data or a file of the run directory cannot be used: a person has to change it."""
LOST = 75
"""This process lost its peers, its device or remote storage and could not regroup: starting it again from the latest
checkpoint helps."""
UNFIT = 76
"""This node failed its pre-flight, and none of its ranks was started: another machine helps
(`trainer.node.preflight`)."""
BUDGET = 77
"""The node-seconds of the job are spent: starting again helps once the budget is raised (`trainer.engine.budget`)."""
EVICTED = 143
"""This process was asked to end (SIGTERM) and has written a checkpoint."""

MEANINGS = {
    DONE: "done",
    UNUSABLE: "unusable configuration or data",
    BUDGET: "its budget is spent",
    EVICTED: "stopped by SIGTERM",
    LOST: "lost its peers or its device",
    UNFIT: "failed its pre-flight",
    FAILED: "failed",
}
"""The words of messages for each code."""
REMEDIES = {
    BUDGET: "raise training.max_node_seconds",
    EVICTED: "a checkpoint was written before",
    LOST: "starting again helps",
    UNFIT: "another machine helps; its log says what failed",
    FAILED: "the same error would occur again; the same is true of any code that is not listed here",
}
"""The additions of ``--help`` to some of these."""


def is_loss(code: int) -> bool:
    """Return whether a process was killed, was evicted, lost its peers, or its node was unfit. Codes above 128 are a
    shell's form of a signal."""
    return code < 0 or code in (LOST, UNFIT) or code > 128


def describe_exit_codes() -> str:
    """Return the exit codes as lines of a command's help, one for each code."""
    lines = []
    for code, meaning in MEANINGS.items():
        remedy = f": {REMEDIES[code]}" if code in REMEDIES else ""
        lines.append(f"  {code:>3}  {meaning}{remedy}")
    return "\n".join(lines)

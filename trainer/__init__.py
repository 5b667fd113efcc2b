"""The code that runs on the nodes: a data-parallel trainer that knows a run directory, but neither Dagster, Azure nor
dollars.

Each package's docstring says what belongs in it. This one itself holds what belongs to none: the entry points
(`__main__`, `run`), the public names for a user's own parts (`losses`, `spec`), and the contract with the orchestrator
(`config`, `errors`, `exit_codes`, `rundir`). Importing a package is cheap: torch is imported by the modules that
compute, never by the contract, `documents`, `secrets` or `storage`, which the orchestrator reads too.
"""

__version__ = "0.1.0"

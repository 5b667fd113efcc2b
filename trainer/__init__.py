"""What runs on the nodes: a trainer, data-parallel, that knows a run directory, and neither Dagster, Azure nor dollars.

The packages in it say in their own docstrings what belongs in them. Directly in it is what belongs to none: the doors
(`__main__`, `run`), the faces of a user's own parts (`losses`, `spec`), and the contract with the orchestrator
(`config`, `errors`, `exit_codes`, `rundir`). Importing a package is cheap: torch is imported by the modules that
compute, never by the contract, `documents`, `secrets` or `storage`, which the orchestrator reads too.
"""

__version__ = "0.1.0"

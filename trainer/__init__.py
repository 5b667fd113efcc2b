"""What runs on the nodes: a trainer, data-parallel, that knows a run directory, and neither Dagster, Azure nor dollars.

Importing this package is cheap: torch is imported by the modules that compute (`data.shards`, `model.stock`,
`engine.step`…), never by those that only describe (`config`, `rundir`, `storage`), which the orchestrator reads too.
"""

__version__ = "0.1.0"

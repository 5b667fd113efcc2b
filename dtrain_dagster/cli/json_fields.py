"""The fields of what ``--json`` prints: name → meaning. Names are stable; new ones may be added.

Times are Unix seconds, durations seconds, dollars US dollars at list price. What is not known is null.
"""

from __future__ import annotations

from collections.abc import Mapping

JOB = {
    "job": "name of the job",
    "state": "queued, running, succeeded, failed, cancelled, or damaged where its run directory cannot be read",
    "message": "why it failed, with the last lines of its log, or what is damaged",
    "nodes": "nodes of its last launch",
    "nodes_alive": "nodes that are there now",
    "launches": "how often it was started",
    "started_at": "when its first launch began",
    "ended_at": "when it ended; null while it runs",
    "seconds": "for how long at least one node was there, over all launches",
    "node_hours": "hours of all its nodes, over all launches",
    "usd": "dollars of its own nodes, over all launches; `dtrain cost` adds what its probe cost",
    "step": "the last step that was reported",
    "loss": "the loss of that step",
    "run_dir": "its run directory",
}
STATUS = {
    **JOB,
    "phase": "what it does now, in words",
    "total_steps": "all steps of the training",
    "epoch": "the epoch of the last step, counted from 1",
    "valid_loss": "the last loss of the validation split",
    "samples_per_second": "the speed of the last steps",
    "eta_seconds": "seconds to the end",
    "eta_has_finish": "whether that is to the end of the job, rather than to the last step",
    "presences": "when each of its nodes was there",
    "presences[].launch": "the launch, counted from 1",
    "presences[].node": "the node, counted from 0",
    "presences[].incarnation": "1, and one more for each that took the place of a lost one",
    "presences[].started_at": "when its first process began",
    "presences[].ended_at": "when its last process ended; null while it is there",
    "presences[].exit_codes": "the exit codes of its processes",
    "studio_url": "its page at the service that runs it",
}
HEALTH = {
    "cluster": "name of the cluster",
    "healthy": "whether all of it is well",
    "message": "what is wrong",
    "running_jobs": "names of the jobs that run",
    "nodes": "the nodes that are there",
    "nodes[].node": "the node, counted from 0",
    "nodes[].healthy": "whether it is well",
    "nodes[].message": "its fault, or what it does",
}
SUMMARY = {
    "job": "name of the job",
    "figures": "the lines of the summary by name, as a person reads them: trained, took, cost, gate…",
    "steps": "steps that were trained",
    "epochs": "epochs that were trained",
    "world_size": "ranks that trained",
    "seconds": "for how long at least one node was there, over all launches",
    "node_hours": "hours of all its nodes, over all launches",
    "usd": "dollars of its own nodes, over all launches",
    "test": "the scores of the model on the test split, by name",
    "baselines": "the scores of each baseline on the test split",
    "gate_passed": "whether the model passed the gate; null where there is no baseline",
    "registered": "name, version and alias of the registered model; null where it was not registered",
}
COST = {
    "metrics": "totals, by name: dollars, node-hours, dollars per epoch, the error of the estimate",
    "total_usd": "dollars of the job and of its probe",
    "training_usd": "dollars of its own nodes, over all launches",
    "probe_usd": "dollars of the probe that its plan rests on",
    "price": "what the dollars are",
    "nodes": "an item for each interval for which a node was paid",
    "nodes[].node": "the node, counted from 0",
    "nodes[].purpose": "training or probe",
    "nodes[].sku": "the kind of node",
    "nodes[].tier": "the tier that was paid for",
    "nodes[].from_utc": "begin of the interval",
    "nodes[].to_utc": "end of the interval",
    "nodes[].seconds": "seconds of the interval",
    "nodes[].usd_per_hour": "the price of the node",
    "nodes[].usd": "dollars of the interval",
    "periods": "an item for each period, node and cause",
    "periods[].from_utc": "begin of the period",
    "periods[].to_utc": "end of the period",
    "periods[].from_unix_seconds": "begin of the period, in Unix seconds",
    "periods[].node": "the node, counted from 0",
    "periods[].cause": "the cause, as in the ledger",
    "periods[].node_seconds": "seconds of the node",
    "periods[].usd": "dollars of them",
    "ledger": "an item for each cause; their dollars are the total",
    "ledger[].cause": "name of the cause",
    "ledger[].node_seconds": "seconds of all nodes",
    "ledger[].percent": "their share of all seconds",
    "ledger[].usd": "dollars of them",
    "ledger[].meaning": "what they were paid for",
    "goodput": "the share of the node-time that trained; null for a program that is no training",
    "notes": "what limits the figures, as sentences",
    "running": "whether the job still costs money",
    "energy": "kWh, CO2 and what they rest on",
    "launches": "time, node-hours and dollars of all launches, and of the last one",
    "reconciliation": "the comparison with what was billed; only with --usage-export",
}
PRICE = {
    "sku": "name of the SKU",
    "region": "the region of the prices",
    "gpu": "its GPU",
    "gpus": "GPUs of one node",
    "gpu_memory_gib": "memory of one GPU",
    "gpu_watts": "thermal design power of one GPU",
    "vcpus": "processors of the host",
    "memory_gib": "memory of the host",
    "infiniband": "whether nodes are linked by InfiniBand",
    "speed": "speed relative to Standard_NC6s_v3",
    "speed_note": "what that rests on",
    "retired_on": "the day on which the SKU is retired; null where none is known",
    "usd_per_hour": "the price by tier, with its date and source; a tier that is not offered is absent",
}
PRICES_REFRESHED = {
    "file": "where the prices were written",
    "changes": "an item for each price that was found",
    "changes[].region": "its region",
    "changes[].sku": "its SKU",
    "changes[].tier": "its tier",
    "changes[].before_usd_per_hour": "the price before; null where none was known",
    "changes[].usd_per_hour": "the price now",
    "notes": "what was not found, as sentences",
}
FLEET_JOB = {
    "job_id": "name of the job",
    "state": "waiting, running, pausing, ending, paused, succeeded, failed or ended",
    "priority": "jobs of a higher one come first",
    "nodes": "nodes that it has now",
    "step": "the last step that was reported",
    "total_steps": "all steps of the training",
    "loss": "the loss of that step",
    "valid_loss": "the last loss of the validation split",
    "seconds_left": "seconds to the end of its training, while it trains",
    "begins_in_seconds": "seconds until it is expected to be given nodes",
    "ends_in_seconds": "seconds until it is expected to be over",
    "becomes": "the state in which it is expected to end",
    "waits_for": "the limit that keeps it from nodes",
    "waiting": "a sentence on that",
    "expected_end": "why it is expected to be ended, or never begun",
    "usd": "what it has cost",
    "promised_usd": "what it may cost when its nodes stop by themselves",
    "launches": "how often it was started",
    "reason": "why it ended",
    "presence": "from when to when each of its nodes was there",
    "why": "why it is where it is, in a line",
}
FLEET = {
    "name": "name of the fleet",
    "at": "the time of this look",
    "began_at": "when the fleet began",
    "budget_usd": "the dollars that all jobs may cost together",
    "deadline": "when all must have ended; null: at any time",
    "nodes": "nodes that all jobs have together",
    "usd_per_node_hour": "the price of a node",
    "is_run": "whether an orchestrator runs it",
    "is_cancelled": "whether it was cancelled",
    "may_grow": "whether more jobs may come",
    "used_usd": "what all jobs have cost",
    "promised_usd": "what they may cost when all nodes stop by themselves",
    "ends_in_seconds": "seconds until all known jobs are expected to be over",
    "busy_nodes": "nodes that jobs have now",
    "over": "jobs that are over",
    "left_out": "jobs that are expected not to succeed",
    "jobs": "an item for each job",
    **{f"jobs[].{name}": meaning for name, meaning in FLEET_JOB.items()},
}
FLEET_COST = {
    "node_seconds": "seconds of all nodes",
    "usd": "dollars of them",
    "budget_usd": "the dollars that all jobs may cost together",
    "causes": "node_seconds and usd by cause",
    "jobs": "node_seconds and usd by job",
}
TRIAL = {
    "trial": "number of the trial",
    "state": "how it ended",
    "score": "its best value of the metric",
    "evaluations": "evaluations that it had, of those to its end",
    "usd": "what it cost",
    "node_seconds": "seconds of its nodes",
    "values": "the value of each parameter",
    "reason": "why it ended early",
}
SEARCH_RESULT = {
    "name": "name of the search",
    "metric": "what is compared",
    "dataset_id": "the dataset",
    "pruner": "what ends trials early",
    "sampler": "what chooses the values of trials",
    "seed": "the seed",
    "budget_usd": "the dollars that all trials may cost together",
    "planned": "at_most_usd and expected_usd, as planned before the first trial",
    "ended": "why it ended before all trials; empty where it did not",
    "settings_file": "the settings of the best trial, for `dtrain train --settings`",
    "importance": "the share of each parameter in what made scores differ",
    "best": "the best trial, as an item of trials",
    "trials": "an item for each trial",
    **{f"trials[].{name}": meaning for name, meaning in TRIAL.items()},
    "counts": "how many trials ended in which state",
    "usd": "dollars of all trials and of the measurement before",
    "measuring_usd": "dollars of the measurement before the first trial",
    "improvements": "an item for each trial that was the best so far",
    "improvements[].trial": "number of the trial",
    "improvements[].score": "its value of the metric",
    "improvements[].usd": "dollars of all trials until then",
    "improvements[].gained": "how much better than the best before; null for the first one",
    "improvements[].usd_since": "dollars since the best before",
    "improvements[].usd_per_gain": "dollars for an improvement by 1, at the price of this one",
}
SEARCH_PLAN = {
    "plan": "only with --plan, beside the name: what the search is expected to cost, and the sentences on it",
}
KEPT_SEARCH = {
    "name": "name of the search",
    "state": "running, interrupted (the same command goes on with it) or over",
    "began_at": "when it began",
    "trials": "trials that were begun",
    "metric": "what is compared; null before it is over for the first time",
    "best_trial": "number of the best trial",
    "best_score": "its value of the metric",
    "usd": "dollars of all trials and of the measurement before; null before it is over for the first time",
    "settings_file": "the settings of the best trial, for `dtrain train --settings`",
}
DOCTOR = {
    "buys": "what the command changes, in a sentence",
    "counts": "how many lines have which verdict",
    "lines": "an item for each thing that was looked at",
    "lines[].check": "what was looked at",
    "lines[].verdict": "ok, warning or missing",
    "lines[].seen": "what was seen",
    "lines[].remedy": "how to mend it",
    "lines[].command": "the command that mends it",
}
ACCOUNT = {
    "job": "name of the job",
    "lines": "the comparison, as sentences, node by node",
}
FINDINGS = {
    "passed": "whether the endpoint is compatible with the model",
    "findings": "an item for each thing that was asked",
    "findings[].name": "what was asked",
    "findings[].passed": "whether it was answered as it must be",
    "findings[].message": "what was answered, in a sentence",
}
DATASET = {
    "dataset_id": "id of the dataset, for `dtrain train --dataset`",
    "built": "whether it was built now, rather than being there already",
    "samples": "samples by split",
    "folder": "where it lies",
}


def listed(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a list of such documents."""
    return {f"[].{name}": meaning for name, meaning in fields.items()}


def also(fields: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the fields with a word in front of each meaning that says when the document has them."""
    return {name: f"({where}) {meaning}" for name, meaning in fields.items()}

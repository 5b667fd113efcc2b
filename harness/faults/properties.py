"""What has to be true after every run, whatever happened: pure functions from what a run left to sentences on what is
wrong with it. `violations` reads a run directory and asks them all."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harness.faults import tape as tapes
from harness.faults.hosts import ObservedIncarnation
from harness.faults.play import Outcome
from trainer.checkpoint.manager import CheckpointManager
from trainer.data.coverage import find_coverage_errors
from trainer.documents.presences import NodePresence
from trainer.elastic.generation import Generation
from trainer.elastic.generation_record import generations
from trainer.parallel.replicas import plan_replicas
from trainer.rundir import RunDir

WEIGHTS_LIMIT = 1e-5
"""Of the largest weight of a tensor. The same for every strategy: a shared model is compared with the undisturbed
training with ``ddp``, so that another order of sums is in it; what another number of nodes changes is as large."""
LOSS_LIMIT = 1e-4
CLOCK_SECONDS = 3.0
"""How far the accounts may be off: the supervisor looks twenty times a second, on a machine with more to do."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the undisturbed run of the same configuration left."""

    weights: dict[str, Tensor]
    consumed: list[dict[str, Any]]
    losses: dict[int, float]


def read_reference(rundir: RunDir) -> Reference:
    result = rundir.read_json("result.json")
    assert result is not None
    return Reference(_weights(rundir), result["consumed"], {item["step"]: item["loss"] for item in _steps(rundir)})


def violations(outcome: Outcome, reference: Reference) -> list[str]:
    """What is wrong with a run; nothing, if all is well."""
    rundir, wrong = outcome.rundir, list(outcome.problems)
    result = rundir.read_json("result.json") or {}
    if result.get("status") != "succeeded":
        return [*wrong, f"it did not succeed: {result}"]
    history, steps = generations(rundir.storage), _steps(rundir)
    wrong += unequal_weights(_weights(rundir), reference.weights)
    wrong += wrong_samples(result, reference.consumed)
    wrong += wrong_losses(steps, reference.losses)
    wrong += wrong_history(history, outcome.strategy)
    wrong += redone_steps(steps, history, outcome.strategy)
    wrong += wrong_resumes(list(rundir.events()), history, outcome.strategy)
    wrong += split_brains(steps)
    wrong += several_writers(_manifests(rundir))
    wrong += wrong_accounts(rundir.nodes(), outcome.observed)
    wrong += wrong_codes(rundir.nodes())
    wrong += _checkpoint_that_does_not_load(rundir, outcome)
    if outcome.left:
        wrong.append(f"processes {outcome.left} were left running")
    return wrong


def unequal_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """By tensor: the largest difference, relative to the largest weight."""
    if set(found) != set(expected):
        return [f"the model's tensors are {sorted(found)}, not {sorted(expected)}"]
    return [
        f"{name} differs from the undisturbed run's by {difference:.1e}"
        for name in found
        if not (difference := relative_difference(found[name], expected[name])) <= WEIGHTS_LIMIT
    ]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale or 1.0)


def largest_difference(rundir: RunDir, reference: Reference) -> float:
    """Over all tensors; 0 where there is no model to compare."""
    if not rundir.storage.exists("model/weights.pt"):
        return 0.0
    found = _weights(rundir)
    return max(relative_difference(found[name], reference.weights[name]) for name in found)


def wrong_samples(result: Mapping[str, Any], expected: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every sample once per epoch: as in the undisturbed run, and as the count alone tells."""
    wrong = find_coverage_errors(result["consumed"], result["train_samples"], tapes.EPOCHS)
    if result["steps"] != tapes.STEPS:
        wrong.append(f"{result['steps']} steps instead of {tapes.STEPS}")
    if result["consumed"] != expected:
        wrong.append(f"consumed {result['consumed']}, not {expected}")
    if result["samples_seen"] != tapes.EPOCHS * result["train_samples"]:
        wrong.append(f"{result['samples_seen']} samples seen in all")
    return wrong


def wrong_losses(steps: Iterable[Mapping[str, Any]], expected: Mapping[int, float]) -> list[str]:
    """The loss curve is that of the undisturbed run, in every report, of every generation."""
    wrong = []
    for item in steps:
        loss, step = item["loss"], item["step"]
        if loss is None or step not in expected or not abs(loss / expected[step] - 1) <= LOSS_LIMIT:
            wrong.append(f"step {step} of generation {item['generation']}: loss {loss}, not {expected.get(step)}")
    return wrong


def keeps_all_rows(before: Generation, item: Generation, strategy: str) -> bool:
    """Do the survivors of a generation have the whole state of the model together, by what each rank holds?"""
    if strategy == "ddp":
        return item.has_state
    plan = plan_replicas(strategy, [seat.node for seat in before.members], before.topology == "mesh")
    left = {before.rank_of(seat.member) for seat in item.members if seat.was_in}
    return {plan.place_of(rank) for rank in left if rank is not None} == set(range(plan.size))


def wrong_history(history: Sequence[Generation], strategy: str = "ddp") -> list[str]:
    """One generation after the other: each with members of its own launch, and survivors only of the one before."""
    wrong = []
    if [item.number for item in history] != list(range(1, len(history) + 1)):
        wrong.append(f"generations {[item.number for item in history]}")
    before: Generation | None = None
    for item in history:
        names = [seat.member for seat in item.members]
        if len(set(names)) != len(names) or not names:
            wrong.append(f"generation {item.number} has the members {names}")
        nodes = [(seat.node, seat.local_rank) for seat in item.members]
        if len(set(nodes)) != len(nodes):
            wrong.append(f"generation {item.number} has a node twice: {nodes}")
        for seat in item.members:
            if seat.launch != item.launch:
                wrong.append(f"generation {item.number} of launch {item.launch} has {seat.member} of {seat.launch}")
            if seat.was_in and (before is None or seat.was_in != before.number or before.rank_of(seat.member) is None):
                wrong.append(f"{seat.member} came into generation {item.number} with a state that does not count")
        # With rows lost in between, what a generation says of its survivors' step is not where it goes on.
        goes_on = strategy == "ddp" and item.has_state
        if before and before.launch == item.launch and goes_on and item.step < before.step:
            wrong.append(f"generation {item.number} begins at step {item.step}, {before.number} at {before.step}")
        before = item
    return wrong


def redone_steps(
    steps: Iterable[Mapping[str, Any]], history: Sequence[Generation], strategy: str = "ddp"
) -> list[str]:  # fmt: skip
    """Steps that were reported as done, by all members, and that a later generation with survivors who have the whole
    state did once more."""
    return [
        f"generation {number} had done step {done}; {number + 1} went on from {began}"
        for number, (done, began) in sorted(progress(steps, history, strategy).items())
        if done > began
    ]


def progress(
    steps: Iterable[Mapping[str, Any]], history: Sequence[Generation], strategy: str = "ddp"
) -> dict[int, tuple[int, int]]:
    """Of each generation that survivors with the whole state came out of: the last step it reported, the one that the
    next began at."""
    last: dict[int, int] = defaultdict(int)
    for item in steps:
        last[item["generation"]] = max(last[item["generation"]], item["step"])
    following = {item.number - 1: item for before, item in pairwise(history) if keeps_all_rows(before, item, strategy)}
    return {number: (done, following[number].step) for number, done in last.items() if number in following}


def wrong_resumes(
    events: Sequence[Mapping[str, Any]], history: Sequence[Generation], strategy: str = "ddp"
) -> list[str]:  # fmt: skip
    """A checkpoint is read only where no survivors have the whole state, and then the newest that was complete."""
    wrong = []
    known = {item.number: item for item in history}
    for event in [event for event in events if event["kind"] == "resume"]:
        item, before = known[event["generation"]], known.get(event["generation"] - 1)
        if before and before.launch == item.launch and keeps_all_rows(before, item, strategy):
            wrong.append(f"generation {item.number} went back to step {event['step']}, and no rows were lost")
        saved = [other["step"] for other in events if other["kind"] == "checkpoint" and other["time"] < item.formed_at]
        if event["step"] < max(saved, default=0):
            wrong.append(f"generation {item.number} went back to step {event['step']}, and {max(saved)} was saved")
    return wrong


def split_brains(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """One process reports the steps of a generation: two reports of one mean that two groups took it for theirs."""
    reports = Counter((item["generation"], item["step"]) for item in steps)
    return [
        f"step {step} of generation {generation} was reported {count} times"
        for (generation, step), count in sorted(reports.items())
        if count > 1
    ]


def several_writers(manifests: Iterable[Mapping[str, Any]]) -> list[str]:
    """At most one process writes the checkpoints of a generation."""
    writers: dict[int, set[str]] = defaultdict(set)
    for manifest in manifests:
        writers[manifest["generation"]].add(manifest["writer"])
    return [
        f"{len(found)} processes wrote checkpoints of generation {number}"
        for number, found in sorted(writers.items())
        if len(found) > 1
    ]


def wrong_accounts(presences: Sequence[NodePresence], observed: Sequence[ObservedIncarnation]) -> list[str]:
    """The node-time that is paid is the node-time that was lived, by the harness's own clock: no gap, no overlap."""
    wrong = []
    accounted = {(item.launch, item.node_id, item.incarnation): item for item in presences}
    lived = {(incarnation.launch, incarnation.node, incarnation.incarnation): incarnation for incarnation in observed}
    for key in sorted(set(accounted) ^ set(lived)):
        wrong.append(
            f"launch, node, incarnation {key} was {'not accounted' if key in lived else 'accounted and never there'}"
        )
    for key in sorted(set(accounted) & set(lived)):
        item, incarnation = accounted[key], lived[key]
        if item.ended_at is None or incarnation.ended_at is None:
            wrong.append(f"launch, node, incarnation {key} never ended: {item}, {incarnation}")
        elif abs(item.started_at - incarnation.started_at) + abs(item.ended_at - incarnation.ended_at) > CLOCK_SECONDS:
            wrong.append(
                f"launch, node, incarnation {key}: {item.ended_at - item.started_at:.2f} s were accounted, "
                f"{incarnation.ended_at - incarnation.started_at:.2f} s were lived"
            )
    ordered = sorted(presences, key=lambda item: (item.node_id, item.launch, item.incarnation))
    for one, other in pairwise(ordered):
        if one.node_id == other.node_id and (one.ended_at or 0.0) > other.started_at:
            wrong.append(f"two incarnations of node {one.node_id} overlap: {one}, {other}")
    return wrong


def wrong_codes(presences: Iterable[NodePresence]) -> list[str]:
    """Nodes are killed, are told to go, or are done; none fails, and none is lost that could have gone on."""
    return [
        f"node {item.node_id}, incarnation {item.incarnation} of launch {item.launch} ended with exit code {code}"
        for item in presences
        for code in item.exit_codes
        if code not in (0, -9, -15, 143)
    ]


def _checkpoint_that_does_not_load(rundir: RunDir, outcome: Outcome) -> list[str]:
    pointer = rundir.read_json("checkpoints/LATEST.json")
    if pointer is None:
        return ["there is no latest checkpoint"]
    manifest = rundir.read_json(f"{pointer['path']}/manifest.json")
    if manifest is None:
        return [f"LATEST names {pointer['path']}, which has no manifest"]
    manager = CheckpointManager(rundir, 3, manifest["fingerprint"])
    try:
        found = manager.load_latest()
    except Exception as error:
        return [f"the latest checkpoint does not load: {error!r}"]
    finally:
        manager.close(1.0)
    if found is None or found[0] != pointer["path"]:
        return [f"LATEST names {pointer['path']}, but {found and found[0]} was loaded"]
    step = found[1]["progress"]["step"]
    if step != pointer["step"]:
        return [f"the latest checkpoint is of step {step}, LATEST says {pointer['step']}"]
    if step < tapes.STEPS - 2 * tapes.CHECKPOINT_FREQUENCY and not outcome.happened["storage"]:
        return [f"the latest checkpoint is of step {step}, and storage was there all the time"]
    return []


def _manifests(rundir: RunDir) -> list[dict[str, Any]]:
    names = [name for name in rundir.storage.list("checkpoints") if name.startswith("g")]
    found = [rundir.read_json(f"checkpoints/{name}/manifest.json") for name in names]
    return [manifest for manifest in found if manifest]


def _steps(rundir: RunDir) -> list[dict[str, Any]]:
    return list(rundir.events("step"))


def _weights(rundir: RunDir) -> dict[str, Tensor]:
    path = rundir.storage.local_path("model/weights.pt")
    return torch.load(path, map_location="cpu", weights_only=True)


def describe(outcome: Outcome) -> str:
    """For a person who looks at a run that failed."""
    lines = [outcome.tape.to_json(), f"run directory: {outcome.rundir.uri}"]
    for item in generations(outcome.rundir.storage):
        seats = ", ".join(f"{seat.member}{'' if seat.was_in else '*'}" for seat in item.members)
        lines.append(
            f"g{item.number} launch {item.launch} {item.topology} step {item.step} attempt {item.attempt} "
            f"at {item.formed_at - outcome.observed[0].started_at:.2f}: {seats} ({item.reason})"
        )
    for event in outcome.rundir.events():
        if event["kind"] in ("error", "communication_error", "checkpoint_failed", "out_of_memory", "resume"):
            lines.append(json.dumps({key: value for key, value in event.items() if key != "time"}))
    for incarnation in outcome.observed:
        until = f"{incarnation.ended_at - outcome.observed[0].started_at:.2f}" if incarnation.ended_at else "?"
        began = incarnation.started_at - outcome.observed[0].started_at
        which = f"node {incarnation.node}, incarnation {incarnation.incarnation} of launch {incarnation.launch}"
        lines.append(f"{which}: {began:.2f} to {until}")
    return "\n".join(lines)

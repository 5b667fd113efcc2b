"""The node agent: one node of a job, where an engine (SLURM, Kubernetes, Ray) runs nodes. It starts the ranks, records
the node's presence and ends the ranks in order.

It decides nothing about other nodes: that is the supervisor's part, which reads the presence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil

from trainer.comm.descriptors import raise_descriptor_limit
from trainer.comm.own_address import own_address
from trainer.documents.paid_time import limit_of, sum_paid
from trainer.documents.presences import NodePresence, heartbeat_seconds, stale_seconds
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.exit_codes import BUDGET, DONE, EVICTED, FAILED, LOST, UNFIT, UNUSABLE, describe_exit_codes, is_loss
from trainer.node.environment import (
    STOP_GRACE,
    LaunchError,
    Seat,
    choose_port,
    read_duration,
)
from trainer.node.line_log import LineLog
from trainer.node.node_processes import NodeProcesses, header_of, make_node, spawn_process
from trainer.node.preflight import Judgement, NodeNeeds, judge_node, read_setting
from trainer.node.preflight_measures import Errand, Measuring
from trainer.rundir import JOB, LAUNCH, LIMIT, LOGS, STATUS, RunDir
from trainer.runtime.clock import SteadyClock
from trainer.runtime.launch import Launch
from trainer.runtime.machine_warnings import NodeWarning, begin_watch

POLL_SECONDS = 0.05
MASTER_PORT = 29500
"""The port that ranks are told where they find each other in storage and use none."""
RENDEZVOUS = "rendezvous"
"""The folder with the address of rank 0, for launches whose ranks need it."""
WARM_SECONDS = 60.0
"""Seconds that a node which waits for its place takes at most to load what its ranks will load."""
MOST_AWAY = 5
"""Incarnations between a node and the one whose place it takes: those between them were unfit, or had no place."""
FINAL = ("succeeded", "failed", "cancelled")
"""The states of ``status.json`` after which no node is wanted."""


class NodeAgent:
    """The agent of one incarnation of a node."""

    def __init__(
        self,
        rundir: RunDir,
        launch: Mapping[str, Any],
        node_id: int,
        incarnation: int,
        secret: str,
        hold_seconds: float = 0.0,
    ) -> None:
        """``launch``: as in ``launch.json``. ``secret``: the path of the file with the secret of the launch.
        ``hold_seconds``: for how long it trains on after a SIGTERM of its engine, until another node is there."""
        self.rundir, self.launch, self.secret = rundir, launch, secret
        self.clock = SteadyClock.begin()
        self.host = own_address(os.environ)
        now = self.clock.now()
        self.presence = NodePresence(
            node_id=node_id,
            launch=launch["launch"],
            incarnation=incarnation,
            last_seen_at=now,
            host=self.host,
            started_at=min(now, psutil.Process().create_time()),
        )
        self.stop_grace = read_duration(*STOP_GRACE, launch["env"], os.environ)
        self.asked = False
        """Whether this node has to end now."""
        self.hold_seconds = hold_seconds
        self._told_at: float | None = None
        """When it was told that its machine will be taken away, and had time to heed it (`time.monotonic`)."""
        self._watch_events = begin_watch({**os.environ, **launch["env"]}, self.clock.now)
        self._looked_at = 0.0
        self.is_given_up = False
        """Whether its record was closed by the supervisor: its engine took it for lost, and another may have its
        place."""
        self._beat_at = 0.0
        self._failed_at: float | None = None

    def run(self) -> int:
        """Run the node from start to end, and return the agent's exit code. SIGTERM ends it in order."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_term)
        here = self.presence
        if self.rundir.read_node(here.launch, here.node_id, here.incarnation + 1) is not None:
            say(f"{self._name()} was replaced before it began, so it exits")
            return LOST
        if not self.rundir.begin_presence(here):
            say(f"another agent has begun {self._name()}: this one exits")
            return LOST
        log = LineLog(self.rundir.storage.local_path(f"{LOGS}/node-{self.presence.node_id}.log"), self._header())
        node: NodeProcesses | None = None
        codes: tuple[int, ...] = (FAILED,) * self.launch["processes_per_node"]
        try:
            self._check_fitness(log)
            if self.presence.preflight:
                codes = (UNFIT,) * self.launch["processes_per_node"]
            elif not self.asked and (seat := self._wait_for_seat()):
                node = make_node(self.launch, seat, log)
                node.start(self.launch, self.clock.variables(), spawn_process)
                codes = self._watch(node)
                self._keep(codes)
            else:
                codes = (EVICTED,) * self.launch["processes_per_node"]
        except LaunchError as error:
            codes = self._give_up(log, node, str(error), UNUSABLE)
        except OSError as error:  # as no processes left on this machine: another may do
            codes = self._give_up(log, node, str(error), LOST)
        self._write(exit_codes=codes, ended_at=self.clock.now())
        log.close()
        return summarize(codes)

    def _check_fitness(self, log: LineLog) -> None:
        """Make the pre-flight of this node and record it, unless it was switched off, or this node is asked to end."""
        try:
            mode, command = read_setting(self.launch.get("preflight", ""))
        except ValueError as error:
            raise LaunchError(f"preflight: {error}") from None
        if mode == "off":
            return
        here = self.presence
        others = self.rundir.nodes(skip_damaged=True)
        peers = {
            node.host: None
            for node in others
            if (node.launch, node.ended_at) == (here.launch, None) and node.node_id != here.node_id
            if node.host not in ("", here.host)
            and self.clock.now() - node.heard_at(self.clock.now()) < stale_seconds(self.rundir.storage)
        }
        errand = Errand(run_dir=str(self.rundir.storage.local_path()), mode=mode, command=command, peers=tuple(peers))
        told = Launch(number=here.launch, incarnation=here.incarnation).variables()
        place = {"NODE_RANK": str(here.node_id), **told}
        measuring = Measuring(errand, {**os.environ, **self.launch["env"], **place})
        while not measuring.is_over() and not self._rests():
            pass
        found = measuring.result()
        if self.asked:
            return
        wanted = NodeNeeds(ranks=self.launch["processes_per_node"], gpus=self.launch.get("gpus", 0))
        judged = judge_node(found, wanted)
        seconds = max(0.0, self.clock.now() - here.started_at)
        self._tell(log, describe_preflight(judged, seconds))
        self._write(preflight=judged.why, preflight_seconds=seconds)

    def _watch(self, node: NodeProcesses) -> tuple[int, ...]:
        """Look at the processes until nothing of the node is left, and return their exit codes."""
        while not node.look():
            node.log.pump()
            self._beat()
            self._end_where_due(node)
            time.sleep(POLL_SECONDS)
        return tuple(-signal.SIGKILL if code is None else code for code in node.codes)

    def _end_where_due(self, node: NodeProcesses) -> None:
        """End the node where it was asked to end, or where what still runs of it is of no use."""
        if self.asked or (node.is_useless if self.launch["elastic"] else not node.alive):
            node.end(self.stop_grace)
        elif any(node.codes):  # a process failed: the others have a moment to say what they saw
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > self.stop_grace:
                node.end(self.stop_grace)

    def _keep(self, codes: Sequence[int]) -> None:
        """Leave a node whose processes failed in place for a person, where the launch asks for that: until its time is
        over, it is asked to end, or the budget of its job is spent."""
        seconds = float(self.launch.get("keep_failed_seconds", 0.0))
        if not seconds or self.asked or not is_worth_keeping(codes, self.launch["elastic"]):
            return
        self.hold_seconds = 0.0  # there is nothing left that could train on
        now = self.clock.now()
        self._write(exit_codes=tuple(codes), last_seen_at=now, kept_since=now, kept_until=now + seconds)
        say(f"{self._name()} failed and is kept for {seconds:g} s; its ranks have ended")
        looked_at = float("-inf")
        while self.clock.now() < now + seconds and not self._rests():
            if time.monotonic() - looked_at >= heartbeat_seconds(self.rundir.storage):
                looked_at = time.monotonic()
                if self._is_budget_spent():
                    say("the budget of the job is spent, so this node is not kept any longer")
                    return

    def _is_budget_spent(self) -> bool:
        """Return whether the job has been paid for as long as it may be."""
        try:
            training = (self.rundir.read_json(JOB) or {}).get("training", {})
            limit = limit_of(self.rundir.read_json(LIMIT), training.get("max_node_seconds") or math.inf)
            if limit == math.inf:
                return False
            now, stale = self.clock.now(), stale_seconds(self.rundir.storage)
            return sum_paid(self.rundir.nodes(), self.presence.launch, now, stale).node_seconds >= limit
        except (OSError, ValueError) as error:  # money goes on only where it is known to be there
            say(f"what the job was paid cannot be read: {error}")
            return True

    def _wait_for_seat(self) -> Seat | None:
        """Return the place of this node in its launch once it can have it; None where it was asked to end before."""
        if self._is_occupied():
            say(f"an incarnation before {self._name()} still runs: this one waits for its end")
            if not self._wait_ready():
                return None
        address, port = self.host, self.launch["master_port"] or MASTER_PORT
        if not self.launch["elastic"]:
            place = f"{RENDEZVOUS}/l{self.launch['launch']:04d}.json"
            if self.presence.node_id == 0:
                port = choose_port(self.launch["master_port"])
                self.rundir.storage.create(place, json.dumps({"host": address, "port": port}).encode())
            while (found := self.rundir.read_json(place)) is None:
                if self._rests():
                    return None
            address, port = found["host"], found["port"]
        return Seat(
            node_id=self.presence.node_id,
            incarnation=self.presence.incarnation,
            host=self.host,
            master_addr=address,
            master_port=port,
            secret=self.secret,
            is_alone=True,
        )

    def _wait_ready(self) -> bool:
        """Wait for the end of the incarnation before this one, having loaded once what ranks will load: from a cold
        disk that takes far longer. Return False where this node was asked to end before."""
        warmed_until = time.monotonic() + WARM_SECONDS
        with subprocess.Popen([sys.executable, "-P", "-c", "import trainer.engine.trainer"]) as warming:
            try:
                while self._is_occupied():
                    is_warm = warming.poll() is not None or time.monotonic() > warmed_until
                    if is_warm and self.presence.ready_at is None:
                        self._write(ready_at=self.clock.now())
                    if self._rests():
                        return False
            finally:
                warming.kill()
        return True

    def _is_occupied(self) -> bool:
        """Return whether an incarnation before this one is still there, as one whose time limit is near."""
        here, now = self.presence, self.clock.now()
        for incarnation in range(max(1, here.incarnation - MOST_AWAY), here.incarnation):
            before = self.rundir.read_node(here.launch, here.node_id, incarnation)
            is_there = before is not None and before.ended_at is None
            if before is not None and is_there and now - before.heard_at(now) < stale_seconds(self.rundir.storage):
                return True
        return False

    def _has_successor(self) -> bool:
        """Return whether an incarnation after this one is ready to take its place."""
        here = self.presence
        after = range(here.incarnation + 1, here.incarnation + 1 + MOST_AWAY)
        found = (self.rundir.read_node(here.launch, here.node_id, incarnation) for incarnation in after)
        return any(one is not None and one.ended_at is None and one.ready_at is not None for one in found)

    def _rests(self) -> bool:
        """Wait a moment; return whether this node was asked to end."""
        self._beat()
        time.sleep(4 * POLL_SECONDS)
        return self.asked

    def _beat(self) -> None:
        """Write now and then that this node is there, and see whether it is wanted still."""
        if not self.asked and time.monotonic() - self._looked_at >= 4 * POLL_SECONDS:
            self._looked_at = time.monotonic()
            self._heed_warnings()
        if time.monotonic() - self._beat_at < heartbeat_seconds(self.rundir.storage):
            return
        self._beat_at = time.monotonic()
        try:
            self._see_whether_given_up()
            self._write(last_seen_at=self.clock.now())
            if not is_wanted(self.rundir, self.launch):
                self.asked = True
        except (OSError, DamagedError) as error:
            warn_once(f"cannot tell whether this node is still wanted: {error}")

    def _heed_warnings(self) -> None:
        """Record that this node will be taken away, so that another is ordered in its place, and end it once that one
        is there, or in time."""
        warning = self._watch_events.warning if self._watch_events is not None else None
        if self._told_at is not None and warning is None:
            told_ago = time.monotonic() - self._told_at
            warning = NodeWarning("its engine ends it", self.clock.now() - told_ago + self.hold_seconds)
            with contextlib.suppress(OSError, DamagedError):
                self.asked = self._has_successor() or not is_wanted(self.rundir, self.launch)
        known, at = self.presence.leaves_at, warning.leaves_at if warning is not None else None
        if (known is None) != (at is None) or abs((known or 0.0) - (at or 0.0)) > 1.0:
            why = warning.why if warning is not None else ""
            say(f"{self._name()} leaves soon: {why}" if why else f"{self._name()} stays: the warning was withdrawn")
            self._write(leaves_at=at, leaves_because=why)
        self.asked = self.asked or (at is not None and self.clock.now() >= at)

    def _see_whether_given_up(self) -> None:
        """End where this incarnation was given up while its machine could not be reached: the next one waits for no
        other sign that it may begin."""
        here = self.presence
        told = self.rundir.read_node(here.launch, here.node_id, here.incarnation)
        if not self.is_given_up and told is not None and told.ended_at is not None:
            say(f"{self._name()} was given up as lost: it exits")
            self.is_given_up = self.asked = True

    def _write(self, **changes: Any) -> None:
        if self.is_given_up:
            return  # its end is recorded
        self.presence = replace(self.presence, clock_jump_seconds=self.clock.jump(), **changes)
        try:
            self.rundir.write_node(self.presence)
        except OSError as error:  # a full disk must not end the training
            warn_once(f"could not write the presence of {self._name()}: {error}")

    def _give_up(self, log: LineLog, node: NodeProcesses | None, why: str, code: int) -> tuple[int, ...]:
        """Say why the node could not start, end what did start, and return its exit codes."""
        self._tell(log, why)
        if node is not None:
            node.kill()
            while not node.look():
                time.sleep(POLL_SECONDS)
        return (code,) * self.launch["processes_per_node"]

    def _tell(self, log: LineLog, text: str) -> None:
        """Say something into the engine's log and into the node's."""
        say(text)
        pipe = log.open_pipe()
        os.write(pipe, f"{text}\n".encode())
        os.close(pipe)

    def _header(self) -> str:
        where = "" if self.host.startswith("127.") else f" at {self.host}"
        return header_of(self.launch, self.presence.incarnation).replace(" ---", f"{where} ---")

    def _name(self) -> str:
        here = self.presence
        return f"incarnation {here.incarnation} of node {here.node_id} in launch {here.launch}"

    def _on_term(self, *_: object) -> None:
        if self.hold_seconds and self.launch["elastic"] and self._told_at is None:
            self._told_at, self._looked_at = time.monotonic(), 0.0
        else:
            self.asked = True


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
    help_text = "train on after SIGTERM for at most that many seconds, until another node has come in its place"
    parser.add_argument("--hold", type=float, default=0.0, help=help_text)
    options = parser.parse_args(arguments)
    raise_descriptor_limit()
    try:
        rundir = RunDir(options.run_dir)
        place = (options.launch, options.node, options.incarnation)
        return run_agent(rundir, *place, options.secret_file, options.hold)
    except (DamagedError, LaunchError) as error:
        say(str(error))
        return UNUSABLE
    except PermissionError as error:
        say(f"{error}: the nodes must run as the user who submits, or as a user who may write to the run directory")
        return UNUSABLE
    except OSError as error:
        say(f"the run directory cannot be used on this node: {error}")
        return LOST


def is_wanted(rundir: RunDir, launch: Mapping[str, Any]) -> bool:
    """Return whether the nodes of this launch are wanted: the job has not ended, and has not been started anew. A
    supervisor that could not reach its engine leaves nobody behind so."""
    status = rundir.read_json(STATUS) or {}
    if status.get("launch", launch["launch"]) > launch["launch"]:
        return False
    if status.get("is_ending"):
        return False
    return status.get("launch") != launch["launch"] or status.get("state") not in FINAL


def run_agent(
    rundir: RunDir, number: int, node_id: int, incarnation: int, secret: str, hold_seconds: float = 0.0
) -> int:
    """Run the agent of an incarnation in launch ``number``, and return its exit code. A launch that is over, or another
    one, starts nothing."""
    launch = rundir.read_json(LAUNCH)
    if launch is None:
        say(f"{rundir.uri} has no {LAUNCH}: mount the storage of the cluster at the same path on every node")
        return UNUSABLE
    if launch["launch"] != number or not is_wanted(rundir, launch):
        say(f"launch {number} of job {launch['job_id']} is over: nothing is started")
        return LOST
    return NodeAgent(rundir, launch, node_id, incarnation, secret, hold_seconds).run()


def is_worth_keeping(codes: Sequence[int], is_elastic: bool) -> bool:
    """Return whether these exit codes of a node's ranks are of a failure that a person may want to look into: not of an
    end in order, and not of a loss where another node takes its place."""
    in_order = (DONE, BUDGET, LOST, UNFIT, EVICTED, -signal.SIGTERM)
    return any(code not in in_order and not (is_elastic and is_loss(code)) for code in codes)


def describe_preflight(judged: Judgement, seconds: float) -> str:
    """Return the outcome of a pre-flight as lines of a log."""
    lines = [f"pre-flight: {'failed' if judged.failed else 'passed'} in {seconds:.1f} s"]
    for words, found in (("failed", judged.failed), ("warning", judged.warned), ("skipped", judged.skipped)):
        lines += [f"pre-flight {words}: {each}" for each in found]
    return "\n".join(lines)


def summarize(codes: Sequence[int]) -> int:
    """Return the exit code of the agent for those of its ranks: a failure before a loss, and 0 where all ended well."""
    failures = [code for code in codes if code != DONE and not is_loss(code)]
    if failures:
        return failures[0]
    losses = [code for code in codes if code != DONE]
    if UNFIT in losses:
        return UNFIT
    return EVICTED if losses and set(losses) <= {EVICTED, -signal.SIGTERM} else LOST if losses else DONE


def say(text: str) -> None:
    """Print a line into the engine's log of this node."""
    print(text, flush=True)  # noqa: T201 - the engine's log


if __name__ == "__main__":
    sys.exit(main())

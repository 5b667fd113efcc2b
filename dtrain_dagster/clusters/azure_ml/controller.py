"""The control of one job: submitted, looked at, continued elsewhere when it loses its nodes, cancelled, settled.

No lasting state is in memory: the record of launches and the status are in the run directory, the rest is in the
service. Any number of orchestrators may control the same job, or die in the middle of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.azure_ml.client import ScopeMissing, ServiceError, ServiceRefused, ServiceUnreachable
from dtrain_dagster.clusters.azure_ml.jobs import Jobs
from dtrain_dagster.clusters.azure_ml.launch_record import (
    Launches,
    Record,
    exclude_own,
    excluded,
    launch_durations,
    mark_of,
    next_launch,
    next_record,
)
from dtrain_dagster.clusters.azure_ml.provision import NODES_THERE, Provisioned, Provisioner
from dtrain_dagster.clusters.azure_ml.refusals import read_cluster_trouble, read_service_words
from dtrain_dagster.clusters.azure_ml.sku_chain import SkuChoice, chain
from dtrain_dagster.clusters.azure_ml.states import (
    CANCEL_NOT_FOUND,
    WAS_THERE,
    JobDecision,
    JobFacts,
    ServiceJob,
    decide_job,
    note_look,
    phase_of,
)
from dtrain_dagster.clusters.base import OWNER, ClusterError, JobSpec, JobState, JobStatus, NoCapacityError, Starved
from dtrain_dagster.clusters.exit_policy import is_failure
from dtrain_dagster.clusters.job_marks import ActiveJobs
from dtrain_dagster.clusters.notices import WAIT_SECONDS, tell
from dtrain_dagster.clusters.resume_advice import LOG_TAIL_LINES, how_to_go_on, memory_advice
from dtrain_dagster.costs.plan import reprice
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.cluster_kinds import tier_of
from trainer.documents.presences import stale_seconds
from trainer.rundir import RESULT, STATUS, RunDir

CANCEL_AGAIN_SECONDS = 30.0
SLACK_SECONDS = 300.0
"""Seconds that a node's record may have beyond the time between the order of its launch and its end, as seen from
here."""
_log = logging.getLogger(__name__)


class JobController:
    """The controller of the job in one run directory. ``active``: the marks of jobs that may run; ``run_id``: the
    Dagster run on whose behalf it acts."""

    def __init__(
        self,
        rundir: RunDir,
        provisioner: Provisioner,
        jobs: Jobs,
        active: ActiveJobs,
        run_id: str | None = None,
        tends: bool = True,
    ) -> None:
        self.rundir, self.provisioner, self.jobs, self.run_id, self.tends = rundir, provisioner, jobs, run_id, tends
        self.options, self.active = jobs.options, active
        self.launches = Launches(rundir)
        self.stale = stale_seconds(rundir.storage)
        self._looked_at = self._cancelled_at = float("-inf")
        self._last: JobStatus | None = None
        self._owned = False

    def submit(self, spec: JobSpec, got: Provisioned) -> None:
        """Start the job on the provisioned nodes, unless it runs or has succeeded."""
        while True:
            before, record = self.launches.read()
            if record is not None:
                status = self.look(fresh=True)
                before, record = self.launches.read()
                if status.state is JobState.SUCCEEDED:
                    return None
                if not status.state.is_final:
                    self._own()
                    if record is not None and not record["confirmed"] and not record["cancel_asked_at"]:
                        self._put(record)
                    return None
                if record is None or not self.is_final(record):
                    continue
            following = next_launch(record, spec, got, self.options.cluster_name, self.run_id)
            self.active.enter(mark_of(following["job_id"], following["launch"]))
            if self.launches.compare_and_swap(before, following):
                return self._put(following)

    def look(self, fresh: bool = False) -> JobStatus:
        """Return the status of the job, after doing what it requires (where this controller tends). The service is
        asked at most every ``poll_seconds``, unless a ``fresh`` look is wanted."""
        due = time.monotonic() - self._looked_at >= self.options.poll_seconds
        if self._last is not None and not fresh and not due:
            return self._last
        try:
            self._last = self._look()
        except OSError as error:  # the storage does not answer; what was seen last is still the best there is
            if self._last is None or fresh:
                raise
            _log.warning("job %s: %s cannot be read: %s", self._last.job_id, self.rundir.uri, error)
            self._last = replace(self._last, message=f"the run directory cannot be reached: {error}")
        self._looked_at = time.monotonic()
        return self._last

    def logs(self) -> dict[int, str]:
        """Return the output of all launches, by node, from the service. Raise `ServiceError` if it cannot be read."""
        record = self.launches.read()[1]
        assert record is not None, "the caller has seen the record"
        found: dict[int, str] = {}
        for launch in [*record["history"], record]:
            for node_id, text in self._logs_of(launch["job_name"], record).items():
                header = f"--- launch {launch['launch']}, {launch['job_name']} ---"
                found[node_id] = f"{found.get(node_id, '')}{header}\n{text}"
        return dict(sorted(found.items()))

    def has_ended(self, launch: int) -> bool:
        """Return whether the job has ended with this launch or a later one."""
        record = self.launches.read()[1]
        return record is not None and record["launch"] >= launch and self.is_final(record)

    def ask_to_cancel(self) -> None:
        """Record that the job has to end, so that no look continues it."""

        def ask(record: Record) -> Record:
            return record if record["cancel_asked_at"] else {**record, "cancel_asked_at": time.time()}

        self.launches.update(ask)

    def cancel(self) -> None:
        """End the job, and return when the service says that it has ended. Raise `ServiceError` if it does not say so
        within ``cancel_seconds``."""
        record = self.launches.read()[1] or {}
        if self.is_final(record):
            return
        self.ask_to_cancel()
        patience = self.options.cancel_seconds
        deadline = time.monotonic() + patience
        while not (status := self._look(cancelling=True)).state.is_final:
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"the end of job {status.job_id} is not confirmed after {patience:.0f} s ({status.message}): it "
                    f"may still cost money, look at {record.get('studio_url') or self.options.studio_url}"
                )
            time.sleep(min(self.options.poll_seconds, 2.0))
        self._last = status

    def _look(self, cancelling: bool = False) -> JobStatus:
        _, record = self.launches.read()
        assert record is not None, "the caller has seen the record"
        status = self._read_status()
        if self.is_final(record, status):
            return _job_status_of(status)
        if self.tends:
            self._own()
        try:
            with self.jobs.service.looking():
                job = self.jobs.get(record["job_name"])
                record = self._note_look(record, job, is_missing=job is None)
                facts = self._facts(record, job or ServiceJob(status=""), status)
        except ServiceError as error:
            if isinstance(error, ScopeMissing):
                record = self._note_look(record, None, is_missing=False)
            return self._repeat(record, f"cannot be seen now: {error}")
        decision = decide_job(facts, self.options)
        changes_nothing = decision.action in ("settle", "report", "wait", "make_sure")
        if not (self.tends or cancelling or changes_nothing):
            return self._report(facts, decision)
        try:
            return self._act(facts, decision)
        except ServiceError as error:
            if cancelling and error.status == 403:
                raise  # waiting grants no right; what was asked for stays noted, for whoever has it
            ended = self._read_status()
            if self.is_final(record, ended):
                return _job_status_of(ended)
            return self._repeat(record, f"cannot be seen now: {error}")

    def _note_look(self, record: Record, job: ServiceJob | None, is_missing: bool) -> Record:
        """Record that the service has this launch, or since when it does not know it; return its record."""
        since = note_look(record["missing_since"], is_missing, time.time(), record["submitted_at"], self.options)
        fields: Record = {"missing_since": since}
        if job is not None and not record["confirmed"]:
            fields |= {"confirmed": True, "studio_url": job.studio_url}
        if fields.items() <= record.items():
            return record
        return self.launches.change(record["token"], **fields) or record

    def _facts(self, record: Record, job: ServiceJob, status: Mapping[str, Any]) -> JobFacts:
        """Return the facts about a launch now. ``status``: ``status.json``. Raise `ServiceError` where the service does
        not say what nodes it has for a job that waits."""
        now, options, phase = time.time(), self.options, phase_of(job)
        nodes = [node for node in self.rundir.nodes() if node.launch == record["launch"]]
        latest = presences.find_latest_presences(nodes)
        since = record["submitted_at"]
        if status.get("launch") == record["launch"] and phase != "gone":
            since = status["phase_since"] if status.get("phase") == phase else now
        ready, error = None, ""
        if phase == "waiting":
            there = self.provisioner.nodes(record["compute"])
            ready = sum(state in NODES_THERE and not at_work for _, state, at_work in there)
            if ready < record["node_count"]:
                error = self.provisioner.allocation_error(record["compute"])
        here = SkuChoice(sku=record["sku"], tier=record["tier"])
        return JobFacts(
            record=record,
            job=job,
            now=now,
            phase_since=since,
            result=self.rundir.read_json(RESULT),
            heard_at=max((node.last_seen_at or node.started_at for node in nodes), default=None),
            vanished=tuple(node.node_id for node in latest if node.ended_at is None),
            exit_codes=tuple(code for node in latest for code in node.exit_codes),
            resubmissions_left=options.max_resubmissions - (record["launch"] - record["first_launch"]),
            nodes_ready=ready,
            allocation_error=error,
            has_alternative=bool(chain(record["sku"], options.chain, options.tiers, {here, *excluded(record)})),
        )

    def _act(self, facts: JobFacts, decision: JobDecision) -> JobStatus:
        record = facts.record
        if decision.action == "wait":
            return self._repeat(record, decision.message)
        if decision.action == "make_sure":
            return self._make_sure(facts, decision)
        if decision.action == "submit":
            self._put(record)
        elif decision.action == "cancel":
            self._cancel_in_service(record, "somebody asked for it")
            if not facts.job.status:
                return self._repeat(record, decision.message)
        elif decision.action == "stop":
            if not record["stopping"]:
                _log.warning("job %s: %s; ending it, in order to continue", record["job_name"], decision.message)
            fields = {"stopping": record["stopping"] or decision.message}
            if phase_of(facts.job) == "waiting":
                fields |= {"nodes_ready": facts.nodes_ready, "excluded": exclude_own(record)}
                fields |= {"waiting_since": record["waiting_since"] or record["submitted_at"]}
            if self.launches.change(record["token"], **fields):
                self._cancel_in_service(record, decision.message)
        elif decision.action == "next":
            return self._go_on(facts, decision)
        elif decision.action == "settle":
            larger = memory_advice(facts.result or {}, record) if decision.state is JobState.FAILED else ""
            message = "; ".join(filter(None, (decision.message, larger)))
            return self._settle(facts, replace(decision, message=message))
        status = self._report(facts, decision)
        if phase_of(facts.job) == "waiting" and decision.action == "report":
            self._tell_of_wait(record, record["waiting_since"] or record["submitted_at"])
        return status

    def _tell_of_wait(self, record: Record, since: float) -> None:
        """Tell people that this launch waits for nodes, where it does so for long."""
        if time.time() - since >= WAIT_SECONDS:
            tell(self.rundir, "waits", record["launch"])

    def _make_sure(self, facts: JobFacts, decision: JobDecision) -> JobStatus:
        """Cancel a job that seems to be gone, and decide again. If the service takes the cancellation, the job is
        there: it is then waited for, and gone on with elsewhere; also where it stays unknown after that."""
        record, answer = facts.record, CANCEL_NOT_FOUND
        try:
            why = "the service does not know it, but it might be running anyway"
            is_known = self.jobs.cancel(record["job_name"], why)
        except ServiceRefused as error:
            is_known, answer = False, f"refused: {error}"
        became = "taken" if is_known else answer
        _log.warning("job %s is not known to the service; its cancellation: %s", record["job_name"], became)
        if is_known and WAS_THERE not in record["stopping"]:
            why = "; ".join(filter(None, (record["stopping"], WAS_THERE)))
            self.launches.change(record["token"], missing_since=None, confirmed=True, stopping=why)
            return self._repeat(record, decision.message)
        current = self.launches.read()[1]
        if current is None or current["token"] != record["token"]:  # another launch counts by now
            return self._repeat(record, decision.message)
        facts = replace(facts, record=current, cancel_answer=became)
        decision = decide_job(facts, self.options)
        if decision.action == "next" and not self.tends:
            return self._repeat(record, decision.message)
        return self._act(facts, decision)

    def _go_on(self, facts: JobFacts, decision: JobDecision) -> JobStatus:
        """Make the next launch, from the latest checkpoint, with the nodes that are available."""
        record, now = facts.record, time.time()
        came_in_vain = record["nodes_ready"] is not None
        waiting_since = (record["waiting_since"] if record["retry_at"] or came_in_vain else None) or now
        if record["retry_at"] and now < record["retry_at"]:
            message = f"has been waiting for capacity for {now - waiting_since:.0f} s"
            return self._wait_for_nodes(facts, decision, message, waiting_since)
        if read_cluster_trouble(read_service_words(facts.job.error_message)) == "refused":
            kinds = exclude_own(record)
            record = self.launches.change(record["token"], excluded=kinds) or record
        try:
            got = self._get_nodes(record)
        except NoCapacityError as error:
            if came_in_vain or now - waiting_since > self.options.queue_deadline_seconds:
                # A Dagster run has a queue to go back to, so its job has not failed; a shell has none.
                state = JobState.CANCELLED if self.run_id else JobState.FAILED
                ended = JobDecision("settle", state, f"{decision.message}; and there is {error}")
                return self._settle(facts, ended, Starved(since=waiting_since, retry_at=error.retry_at))
            self.launches.change(record["token"], retry_at=error.retry_at, waiting_since=waiting_since)
            return self._wait_for_nodes(facts, decision, str(error), waiting_since)
        except ServiceError:
            raise
        except ClusterError as error:  # what no other size changes
            return self._settle(facts, JobDecision("settle", JobState.FAILED, f"{decision.message}; and {error}"))
        self._end_stays(facts.job.ended_at)
        before, current = self.launches.read()
        if current is None or current["token"] != record["token"] or current["cancel_asked_at"]:
            return self._report(facts, decision)  # somebody else was faster
        following = next_record(current, got, decision.message)
        if not self.launches.compare_and_swap(before, following):
            return self._report(facts, decision)
        message = f"launch {following['launch']} with {got.node_count} x {got.sku}: {decision.message}"
        _log.warning("job %s: continues as %s, %s", record["job_name"], following["job_name"], message)
        self.jobs.forget_secret(record)
        self._put(following)
        begun = JobFacts(
            record=following, job=ServiceJob(status="NotStarted"), now=now, phase_since=following["submitted_at"]
        )
        return self._report(begun, JobDecision("report", JobState.QUEUED, message))

    def _wait_for_nodes(self, facts: JobFacts, decision: JobDecision, why: str, since: float) -> JobStatus:
        status = self._report(facts, replace(decision, message=f"{decision.message}; {why}"))
        self._tell_of_wait(facts.record, since)
        return status

    def _get_nodes(self, record: Record) -> Provisioned:
        """Return all nodes that were requested, or as many as there are; where some did not come in time, those that
        did. Raise `NoCapacityError` where there is not one."""
        refusals: list[NoCapacityError] = []
        asked = record["asked_nodes"]
        came = record["nodes_ready"] or 0
        for count in range(asked, 0, -1):
            if count <= came:
                here = {name: record[name] for name in ("compute", "sku", "tier")}
                return Provisioned(**here, node_count=came, max_nodes=asked, attempts=())
            try:
                return self.provisioner.provision(count, record["sku"], excluded(record))
            except NoCapacityError as error:
                refusals.append(error)
        raise refusals[0]

    def _put(self, record: Record) -> None:
        """Submit this launch to the service, and act on decisions made meanwhile."""
        self._own()
        self._last = None
        try:
            self._keep_budget(record)
            job = self.jobs.submit(record, self.rundir)
        except ClusterError as error:
            if not isinstance(error, ServiceUnreachable):  # it would come again: nothing was bought, nor will be
                now = time.time()
                facts = JobFacts(record=record, job=ServiceJob(status=""), now=now, phase_since=record["submitted_at"])
                decision = JobDecision("settle", JobState.FAILED, f"it was not submitted: {error}")
                self._write_end(facts, decision, ended_at=now, exit_code=1)
            raise
        current = self.launches.change(record["token"], confirmed=True, studio_url=job.studio_url)
        if current is None or current["cancel_asked_at"]:  # cancelled, or superseded, while it was being submitted
            self._cancel_in_service(record, "it was cancelled while it was being submitted")
        if record["launch"] > 1:
            tell(self.rundir, "goes_on", record["launch"])
        _log.info("job %s: submitted, %s", record["job_name"], job.studio_url)

    def _keep_budget(self, record: Record) -> None:
        """Convert a budget in dollars to the price of this launch's nodes. Raise `ClusterError` where that is not
        known."""
        try:
            reprice(self.rundir, self.usage(record, True, time.time()), record["sku"], tier_of(record["tier"]))
        except ValueError as error:  # no price, or a damaged file
            raise ClusterError(f"stop_at_usd cannot be kept on these nodes: {error}") from error

    def _cancel_in_service(self, record: Record, why: str) -> None:
        if time.monotonic() - self._cancelled_at > CANCEL_AGAIN_SECONDS:
            self.jobs.cancel(record["job_name"], why)
            self._cancelled_at = time.monotonic()

    def _settle(self, facts: JobFacts, decision: JobDecision, starved: Starved | None = None) -> JobStatus:
        """Settle the job after its end: write the end of nodes that could not, and say why it ended."""
        record, ended_at = facts.record, min(facts.job.ended_at or facts.now, facts.now)
        self._end_stays(facts.job.ended_at)
        self.jobs.forget_secret(record)
        message = decision.message
        if decision.state is JobState.FAILED:
            message = f"{message}. {how_to_go_on(self.rundir, record['job_id'])}"
            message += f"; in the studio: {record['studio_url']}" if record["studio_url"] else ""
            message += self._said(record)
        codes = {JobState.SUCCEEDED: 0, JobState.CANCELLED: 143}
        failure = next((code for code in facts.exit_codes if is_failure(code)), 1)
        decision, code = replace(decision, message=message), codes.get(decision.state, failure)
        fields = {"starved": asdict(starved)} if starved else {}
        status = self._write_end(facts, decision, ended_at=ended_at, exit_code=code, **fields)
        tell(self.rundir)
        _log.info("job %s: %s %s", record["job_name"], decision.state, message.splitlines()[0] if message else "")
        return status

    def _own(self) -> None:
        """Record which Dagster run follows this job, so that its job is no orphan."""
        if self.run_id and not self._owned:
            if (self.rundir.read_json(OWNER) or {}).get("dagster_run_id") != self.run_id:
                self.rundir.write_json(OWNER, {"dagster_run_id": self.run_id, "since": time.time()})
            self._owned = True

    def _read_status(self) -> dict[str, Any]:
        return self.rundir.read_json(STATUS) or {}

    def is_final(self, record: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> bool:
        """Return whether this launch has ended. ``status``: the document, where it has been read already."""
        status = self._read_status() if status is None else status
        return status.get("launch") == record.get("launch", 0) and JobState(status["state"]).is_final

    def _report(self, facts: JobFacts, decision: JobDecision) -> JobStatus:
        """Return the job's status now. Who tends the job writes it, where anything but its words has changed."""
        status = _describe_status(facts, decision)
        if self.tends:
            known = self._read_status()
            if known | {"message": ""} != status | {"message": ""}:  # words alone, such as how long, are not worth it
                self.rundir.write_json(STATUS, status)
        return _job_status_of(status, self._count_alive(facts.now))

    def _repeat(self, record: Record, message: str) -> JobStatus:
        """Return the last seen status with this message, such as that the service does not know the job. It goes on
        from there if it is found again, so nothing is written."""
        known = self._read_status()
        _log.warning("job %s: %s", record["job_name"], message)
        return JobStatus(
            job_id=record["job_id"],
            state=JobState(known["state"] if known.get("launch") == record["launch"] else JobState.QUEUED),
            message=message,
            nodes_alive=self._count_alive(time.time()),
            started_at=record["first_submitted_at"],
        )

    def _write_end(self, facts: JobFacts, decision: JobDecision, **fields: Any) -> JobStatus:
        """Write how this launch ended, for any caller that looks, and return the status."""
        status = _describe_status(facts, decision) | fields
        self.rundir.write_json(STATUS, status)
        return _job_status_of(status)

    def _count_alive(self, now: float) -> int:
        latest = presences.find_latest_presences(self.rundir.nodes(True))
        return sum(presences.is_here(node, now, self.stale) for node in latest)

    def usage(self, record: Record, running: bool, now: float) -> list[NodeUsage]:
        """Return every presence of a node as paid time, with the SKU and tier that were really bought."""
        given = {item["launch"]: item for item in [*record["history"], record]}
        lasted, found = launch_durations(record, now), []
        for paid in presences.usage(self.rundir.nodes(), "", running, now, self.stale):
            # A node keeps its own record: it cannot have been there for longer than its launch.
            most = lasted.get(paid.launch, math.inf) + SLACK_SECONDS
            excess = max(0.0, paid.ended_at - paid.started_at - most)
            kind = given.get(paid.launch, record)
            ended_at, not_billed = paid.ended_at - excess, excess or paid.not_billed_seconds
            bought = {"sku": kind["sku"], "tier": kind["tier"]}
            found.append(replace(paid, **bought, ended_at=ended_at, not_billed_seconds=not_billed))
        return found

    def _end_stays(self, ended_at: float | None) -> None:
        """Write the end of nodes that could not: a node heard of shortly before the job ended was present until then; a
        silent one, and one in whose place another came, until it was last heard of."""
        end = min(ended_at or time.time(), time.time())
        nodes = self.rundir.nodes(skip_damaged=True)
        latest = presences.find_latest_presences(nodes)
        for node in nodes:
            if node.ended_at is None:
                seen = presences.end_of(node)
                was_here = node in latest and 0 <= end - seen < self.stale
                self.rundir.write_node(replace(node, ended_at=end if was_here else seen))

    def _logs_of(self, job_name: str, record: Record) -> dict[int, str]:
        with self.jobs.service.looking():
            return self.jobs.logs(job_name, record["processes_per_node"])

    def _said(self, record: Record) -> str:
        """Return the end of the log that most likely says why a launch failed, for its message; "" where there is none,
        or the service does not answer."""
        texts: dict[int, str] = {}
        with contextlib.suppress(ServiceError, OSError):
            texts = self._logs_of(record["job_name"], record)
        failed = [node.node_id for node in self.rundir.nodes(True) if any(map(is_failure, node.exit_codes))]
        node_id = next((node_id for node_id in [*failed, *texts] if has_words(texts.get(node_id, ""))), None)
        if node_id is None:
            return ""
        end = "\n".join(texts[node_id].splitlines()[-LOG_TAIL_LINES:])
        return f"; the end of the log of node {node_id}:\n{end}"


def _describe_status(facts: JobFacts, decision: JobDecision) -> dict[str, Any]:
    """Return the document for a launch that has not ended."""
    record = facts.record
    return {
        "job_id": record["job_id"],
        "state": decision.state,
        "message": decision.message,
        "launch": record["launch"],
        "phase": phase_of(facts.job),
        "phase_since": facts.phase_since,
        "started_at": record["first_submitted_at"],
        "ended_at": None,
        "exit_code": None,
        "studio_url": record["studio_url"],
    }


def _job_status_of(status: Mapping[str, Any], nodes_alive: int = 0) -> JobStatus:
    """Return the status that the document holds."""
    return JobStatus(
        job_id=status["job_id"],
        state=JobState(status["state"]),
        message=status["message"],
        nodes_alive=nodes_alive,
        started_at=status["started_at"],
        ended_at=status["ended_at"],
        starved=Starved(**status["starved"]) if status.get("starved") else None,
    )


def has_words(text: str) -> bool:
    """Return whether a log has more than headers. A rank that was killed because another one failed may have printed
    nothing."""
    return any(line and not line.startswith("--- ") for line in text.splitlines())

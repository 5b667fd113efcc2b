"""A Dagster run that works on its graph's cluster: whether spending allows it, whether there are nodes (else it gets a
place in the queue), what people are told, and what becomes of its job where the run is ended.

What the ceiling refuses is decided in `dtrain_dagster.costs.ceilings`; how a queue is kept, in
`dtrain_dagster.automation.capacity_queue`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import dagster as dg

from dtrain_dagster.automation.capacity_queue import (
    ATTEMPT_TAG,
    TICKET_TAG,
    Ticket,
    WaitingList,
    new_ticket,
    refused_again,
)
from dtrain_dagster.automation.retraining import CAUSE_TAG
from dtrain_dagster.clusters.base import OWNER, ClusterConfig, GPUClusterManager, NoCapacityError
from dtrain_dagster.clusters.notices import was_told
from dtrain_dagster.clusters.resume_advice import how_to_go_on
from dtrain_dagster.costs.ceilings import CeilingError, Stand
from dtrain_dagster.costs.money import usd
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.jobs.spending import SpendingBook, Wanted
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.notify import notify_and_log
from trainer.rundir import RunDir


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A run of an asset on a cluster. Make it with `of`."""

    context: dg.AssetExecutionContext
    cluster: GPUClusterResource
    project: ProjectResource
    manager: GPUClusterManager

    @classmethod
    def of(cls, context: dg.AssetExecutionContext, cluster: GPUClusterResource, project: ProjectResource) -> ClusterRun:
        """Return the run of this context. Raise as `GPUClusterResource.manager` does."""
        return cls(context, cluster, project, cluster.manager(context.run.run_id))

    def tell(self, title: str, text: str) -> None:
        """Send people a message with the address of this run."""
        text = f"{text}\n{self.project.run_url(self.context.run.run_id)}"
        notify_and_log(self.project.notify_urls(), f"dtrain: {title}", text, self.context.log)

    # Spending

    def refuse_excess(self, wanted: Wanted) -> float | None:
        """Return the dollars that the ceiling leaves for a start; None without a ceiling. Raise `dagster.Failure`, and
        tell people, where it would be exceeded, or that cannot be told."""
        with self._telling_refusals():
            stand = self._book().judge(wanted)
            self._log_stand(stand)
            if stand is not None and (refusal := stand.refusal):
                raise CeilingError(refusal)
        return None if stand is None else usd(stand.left)

    @contextmanager
    def promising(self, wanted: Wanted) -> Iterator[None]:
        """Promise what a start may cost for as long as the block needs to launch it. Raise as `refuse_excess`."""
        with self._telling_refusals(), self._book().promised(wanted) as stand:
            self._log_stand(stand)
            yield

    def refuse_plan(self, nodes: str, said: str, would_fit: Sequence[str] = ()) -> dg.Failure:
        """Tell people that a plan on these ``nodes`` does not fit its limits, and what would; return the
        `dagster.Failure` to raise."""
        remedy = (
            f"What would fit: {'; '.join(would_fit)}." if would_fit else "No known way to run this training would fit."
        )
        text = (
            f"this training is not started: on {nodes} {said}. {remedy} Or raise the limit in the launchpad of "
            "cost_estimate."
        )
        self.tell("a training does not fit its budget or deadline", text)
        return dg.Failure(text, metadata={"objection": said, "would_fit": list(would_fit)}, allow_retries=False)

    def _book(self) -> SpendingBook:
        return SpendingBook(Path(self.project.home), self.project.jobs_uri, self.cluster.first_tier)

    def _log_stand(self, stand: Stand | None) -> None:
        if stand is not None:
            self.context.log.info(f"ceiling: {stand.text}")

    @contextmanager
    def _telling_refusals(self) -> Iterator[None]:
        try:
            yield
        except CeilingError as error:
            text = f"nothing is started: {error}"
            self.tell("a job would exceed the ceiling on spending", text)
            raise dg.Failure(text, metadata={"objection": str(error)}, allow_retries=False) from None

    # Capacity

    def provision(self, sku: str, node_count: int) -> ClusterConfig:
        """Get the cluster's nodes ready, or the cloud's word that they may come, and return them. Raise as `queueing`
        does."""
        with self.queueing():
            config = self.manager.provision_cluster(node_count, sku)
        if not self.manager.brings_nodes_later:
            self.leave_queue(config)
        return config

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Let a lack of capacity within the block give the run a place in the queue, which is its old one if it has had
        one: the sensor ``queue`` starts it again. Raise `dagster.Failure`, which names the place."""
        try:
            yield
        except NoCapacityError as error:
            raise self._queued(error) from error

    def leave_queue(self, config: ClusterConfig) -> None:
        """Give the run's ticket back, now that its nodes are there, and tell people that it starts; once."""
        if TICKET_TAG not in self.context.run.tags:
            return
        waiting = WaitingList(self.project.shared_uri)
        mine = self._ticket(waiting)
        if mine is None:
            return
        waiting.remove(mine.ticket)
        waited = format_duration(time.time() - mine.queued_at)
        self.context.log.info(f"capacity is available after {waited}: ticket {mine.ticket} is given back")
        self.tell("a run that waited for capacity starts", f"{config.node_count} x {config.gpu_type} after {waited}")

    def attempts(self) -> dict[str, dg.MetadataValue]:
        """Return metadata: the tries to get nodes, with the cloud's codes and messages; empty if there were none."""
        tried = [asdict(attempt) for attempt in self.manager.attempts]
        return {"provisioning": dg.JsonMetadataValue(tried)} if tried else {}

    def _ticket(self, waiting: WaitingList) -> Ticket | None:
        tags = self.context.run.tags
        return waiting.find(tags[TICKET_TAG]) if TICKET_TAG in tags else None

    def _queued(self, error: NoCapacityError) -> dg.Failure:
        run, now = self.context.run, time.time()
        waiting = WaitingList(self.project.shared_uri, self.cluster.cluster_key)
        mine = self._ticket(waiting)
        if mine is None:
            # A run of a whole job names no assets: the job does.
            selection = run.asset_selection or self.context.job_def.asset_layer.selected_asset_keys
            ticket = new_ticket(
                run.run_id,
                sorted(key.to_user_string() for key in selection),
                run.run_config,
                str(error),
                now,
                self.project.queue_deadline_hours * 3600,
                error.retry_at,
                tags={CAUSE_TAG: run.tags[CAUSE_TAG]} if CAUSE_TAG in run.tags else {},
                since=error.since,
                cluster=waiting.cluster,
            )
            if TICKET_TAG in run.tags:  # it had left the queue when its first nodes came: its place is kept
                ticket = replace(ticket, ticket=run.tags[TICKET_TAG], attempt=int(run.tags[ATTEMPT_TAG]) + 1)
        else:
            ticket = refused_again(mine, run.run_id, str(error), now, error.retry_at)
        position = waiting.put(ticket)
        pause = format_duration(ticket.retry_at - now)
        # Later places are told by the sensor's ticks.
        job = run.tags.get(JOB_TAG)
        is_told = job is not None and was_told(RunDir(f"{self.project.jobs_uri}/{job}"), "waits")  # by its cluster
        if mine is None and error.since is not None and not is_told:
            said = f"position {position}; it is tried again in {pause}; why: {error}"
            self.tell("a run waits for capacity", said)
        return dg.Failure(
            description=(
                f"no capacity: {error}\nThis run waits in the queue at position {position} (ticket {ticket.ticket}). "
                f"The sensor `queue` tries again in {pause} and says when it starts; it gives up after "
                f"{format_duration(ticket.deadline_at - now)} (queue_deadline_hours in DTRAIN_OPTIONS)."
            ),
            metadata={
                "ticket": ticket.ticket,
                "position": position,
                "tries": ticket.attempt - 1,
                "attempts": dg.JsonMetadataValue(list(error.attempts)),
            },
            allow_retries=False,
        )

    # Its job

    @contextmanager
    def owning(self, rundir: RunDir, job_id: str) -> Iterator[None]:
        """Note that this run follows a job, and cancel the job where a person ends the run within the block: by
        *Terminate*, or by Ctrl-C at the command that runs it. A process that is ended for another reason (a drained
        machine, systemd, a container that is stopped) leaves the paid job running: the next run of the asset takes it
        over. The interruption then says which, and how to go on."""
        seen: set[int] = set()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: FrameType | None) -> None:
            seen.add(number)
            if callable(handler := before[signal.Signals(number)]):  # Dagster's, which raises the same for both
                handler(number, frame)

        in_main = threading.current_thread() is threading.main_thread() and all(map(callable, before.values()))
        for number in before if in_main else ():
            signal.signal(number, note)
        context = self.context
        try:
            rundir.write_json(OWNER, {"dagster_run_id": context.run.run_id})
            context.instance.add_run_tags(context.run.run_id, {JOB_TAG: job_id})
            yield
        except dg.DagsterExecutionInterruptedError:
            run = context.instance.get_run_by_id(context.run.run_id) or context.run
            # As it was given to this process: no server launched it. A command's run is given an origin in the record.
            is_of_command = context.run.remote_job_origin is None
            if run.status is dg.DagsterRunStatus.CANCELING or (is_of_command and signal.SIGINT in seen):
                context.log.warning(f"terminated: cancelling job {job_id}")
                self.manager.cancel_job(job_id)
                words = f"terminated, and job {job_id} was cancelled. {how_to_go_on(rundir, job_id)}"
            else:
                words = (
                    f"this run's process was ended, but nobody asked for the run to end: job {job_id} goes on. "
                    f"Materialize {context.asset_key.to_user_string()} again to follow it, or `dtrain cancel {job_id}`"
                )
            context.log.warning(words)
            raise dg.DagsterExecutionInterruptedError(words) from None
        finally:
            for number, handler in before.items() if in_main else ():
                signal.signal(number, handler)

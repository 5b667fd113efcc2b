"""`Participant`: this process among those that train a job, from when it knows its peers to its end.

Its rank, device, budget and world belong here, whatever is trained; the data, the model and the progress of training
are `trainer.engine.session`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.comm.world import World, choose_device
from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig
from trainer.engine.budget import begin_budget
from trainer.engine.reports import RankReports
from trainer.engine.result import forget_stop
from trainer.rundir import RESULT
from trainer.runtime import clock
from trainer.runtime.cores import available_cores
from trainer.runtime.fault_injection import Faults
from trainer.runtime.host_memory import keep_freed_memory
from trainer.runtime.launch import Launch
from trainer.runtime.packages import load

if TYPE_CHECKING:
    from trainer.elastic.dynamic_rendezvous import DynamicRendezvous
    from trainer.runtime.machine_warnings import WarningWatch

_log = logging.getLogger(__name__)
BEGIN_WATCH = "trainer.runtime.machine_warnings:begin_watch"
"""What only some need."""
FIXED = "trainer.comm.static_rendezvous:join_world"
REGROUPING = "trainer.elastic.dynamic_rendezvous:DynamicRendezvous"
"""How a process finds its peers, where they stay and where they come and go."""


def prepare_process(
    config: DistributedTrainingConfig, facts: RankFacts, device: torch.device, environment: Mapping[str, str]
) -> int:
    """Set the number of torch's threads in this rank and return it; on a CPU, keep freed memory. To be called before
    other threads start, which keep the number that they start with."""
    threads = config.threads_per_rank
    if threads is None and "OMP_NUM_THREADS" not in environment:  # the launcher's choice comes first
        threads = max(1, available_cores() // (1 if facts.has_own_cores else facts.local_world_size))
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    return torch.get_num_threads()


class Participant:
    """This process's identity in a job, and the resources that it holds from start to end. If making it fails, nothing
    is left open.

    In a world of fixed ranks it has joined its peers when it is made. On a cluster (`Launch.is_elastic`)
    its world is of itself alone until the first generation is formed.
    """

    def __init__(
        self,
        job: JobConfig,
        reports: RankReports,
        environment: Mapping[str, str],
        steps_done: Callable[[], int],
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        """``world_size`` and ``rank``, where given, must agree with the environment. ``steps_done`` is called from
        another thread, where the budget ends the process."""
        self.job, self.config, self.reports, self.rundir = job, job.training, reports, reports.rundir
        self.facts = facts = rank_facts(environment, self.config)
        for name, given, found in (("WORLD_SIZE", world_size, facts.world_size), ("RANK", rank, facts.rank)):
            if given is not None and given != found:
                raise ConfigError(f"{name} is {found} in the environment, but {given} was asked for")
        self.faults = Faults(environment, facts.node_rank)
        told = Launch.read(environment)
        is_elastic = told.is_elastic and self.config.regroup
        self.launch = told.number if is_elastic else None
        """The launch of the cluster that this process regroups in; None in a world of fixed ranks."""
        if self.launch is None and facts.rank == 0:
            self.rundir.storage.delete(RESULT)  # it is of an earlier start: the result is this start's
        if self.launch is not None:
            forget_stop(self.rundir, self.launch)
        self.leaves_when_done = is_elastic and told.releases_nodes
        """Whether this process leaves as soon as it has nothing to do, before the job has ended."""
        self._is_asked = False
        self._warnings: WarningWatch | None = None
        """What hears of the end of this machine, where no agent of its node does."""
        self._old_handler: Any = None
        with ExitStack() as undo:  # in reverse
            undo.callback(self._restore_handler)
            self.budget = begin_budget(self.config, self.rundir, facts, environment, self.launch, steps_done)
            undo.callback(self.budget.close)
            self.device, backend = choose_device(facts, self.config.backend)
            prepare_process(self.config, facts, self.device, environment)
            self.world = World(facts, self.device, backend)
            self.elastic: DynamicRendezvous | None = None
            if self.launch is not None:
                self.elastic = load(REGROUPING)(self.rundir, self.config, facts, self.device, environment, job.job_id)
                undo.callback(self.elastic.close)
            else:
                self.world = load(FIXED)(self.config, environment)
                undo.callback(self.world.close)
            if threading.current_thread() is threading.main_thread():
                # Only now: before this, SIGTERM may end the process at once, since nothing has been done yet.
                self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
            if told.records_presence:
                self._warnings = load(BEGIN_WATCH)(environment, clock.now, float(max(1, facts.local_world_size)))
            if self.elastic is None:
                [generation, *_] = self.world.all_gather_object(self.rundir.last_generation() + 1)
                self.world = replace(self.world, generation=generation)
                reports.adopt_world(self.world)
            self._undo = undo.pop_all()

    def announce(self) -> None:
        """Announce this process to a cluster before it has its data and its model."""
        if self.elastic is not None:
            self.elastic.announce()

    def close(self) -> None:
        """Leave the group, and release the resources of this process."""
        self._undo.close()

    @property
    def asked_to_stop(self) -> bool:
        """Whether this process is to end, by a signal or since its machine will be taken away."""
        watch = self._warnings
        warning = watch.warning if watch is not None else None
        if warning is not None and not self._is_asked and clock.now() >= warning.leaves_at:
            _log.warning("this node leaves, as its machine will be taken away: %s", warning.why)
            self._is_asked = True
        return self._is_asked

    def _on_sigterm(self, *_: object) -> None:
        self._is_asked = True  # nothing more here: the other ranks are told in the next step

    def _restore_handler(self) -> None:
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

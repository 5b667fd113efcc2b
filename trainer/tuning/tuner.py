"""`Tuner`: one rank of a tuning job, which measures settings. Its command is `trainer.tuning.__main__`.

All ranks try candidates one after the other in the same processes, each as a training of its own: model, step, sampler,
loader and group as `trainer.engine.workload` makes them, so that whole real steps are timed, with their input and their
commit. `trainer.tuning.search` decides what to try next on every rank, from figures that all of them have gathered;
since these are the same everywhere, so are the decisions. ``tuned.json`` of the run directory holds the result, from
the first group of settings on.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from trainer.comm.group import GroupError
from trainer.comm.launcher_env import rank_facts
from trainer.comm.static_rendezvous import PeersMissingError, join_world
from trainer.comm.world import World, choose_device
from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig
from trainer.data.dataset_data import DatasetData
from trainer.data.loader import TrainingData, batches_ahead, fits_on_device
from trainer.data.shards import DatasetError, DataShardManager
from trainer.engine.out_of_memory import is_out_of_memory
from trainer.engine.participant import prepare_process
from trainer.engine.problem import maker_of
from trainer.engine.steps import NonFiniteError
from trainer.engine.workload import BATCH_NORMS
from trainer.exit_codes import DONE, EVICTED, FAILED, LOST, UNUSABLE
from trainer.observability.reporter import Reporter, finite
from trainer.rundir import TUNED, RunDir
from trainer.runtime.cores import available_cores
from trainer.runtime.fault_injection import Faults
from trainer.tuning.search import OUT_OF_MEMORY, LearningResult, Search
from trainer.tuning.search_space import LAYOUT, TrialSettings, TuningContext
from trainer.tuning.trial import TuningTrial

WARM_UP = 2
"""The steps before a candidate is measured for the first time, and those of that first measurement."""
FIRST_STEP_BY, LEAST_FOR_IT = 0.85, 5.0
"""The share of the budget by which the first step of a candidate, which may include compiling, must be done; and the
seconds that it has in any case."""
MEASUREMENTS = 300
"""The approximate number of measurements that a budget is divided into."""
SHORTEST, LONGEST = 0.1, 3.0
"""The shortest and the longest measurement, in seconds."""
LISTENING_STEPS = 20
"""The number of steps after which ranks that are judged ask each other whether one was told to end."""


class Interrupted(Exception):
    """A rank was told to end (SIGTERM); all ranks know."""


@dataclass(frozen=True, slots=True)
class Alone(World):
    """A world in which a rank computes alone but keeps its number: a failure here cannot leave others waiting."""

    @property
    def rank(self) -> int:
        """The rank in the world of all ranks."""
        return self.facts.rank

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.facts.world_size


class Tuner:
    """The `trainer.tuning.search.TrialRunner` on real ranks, which also reports and writes the result."""

    def __init__(self, job: JobConfig, seconds: float) -> None:
        self.rundir, self.facts = RunDir(job.run_dir), rank_facts(os.environ, job.training)
        self.device, self.backend = choose_device(self.facts, job.training.backend)
        threads = prepare_process(job.training, self.facts, self.device, os.environ)
        self.job = replace(job, training=replace(job.training, threads_per_rank=threads))
        self.seconds, self.elapsed, self.asked_to_stop = seconds, 0.0, False
        self.faults = Faults(os.environ, self.facts.node_rank)
        self.world = join_world(job.training)
        maker = maker_of(job)
        self.data = maker.open_data(job, torch.device("cpu"))
        module = maker.make(self.job, self.data, torch.device("cpu")).module
        self.world.barrier()  # one may have unpacked the data for minutes
        signal.signal(signal.SIGTERM, self._on_sigterm)
        hosts = self.world.all_gather_object(platform.node())
        self._began: float | None = None
        """When the budget began: after the configuration was set up, which any job has to pay for, and had run."""
        self.reporter = Reporter(self.rundir, 0, 1, []) if self.world.rank == 0 else None
        gc.freeze()  # what is loaded once need not be looked through at each clean-up
        self._is_untidy = False
        self._running: dict[TrialSettings, TuningTrial] = {}
        self._measurement_seconds = min(LONGEST, max(SHORTEST, seconds / MEASUREMENTS))
        self._step_seconds: dict[TrialSettings, float] = {}
        self.search = Search(
            config=self.job.training,
            runner=self,
            seconds=seconds,
            say=self._say,
            keep=self.write,
            facts=TuningContext(
                world_size=self.world.world_size,
                local_world_size=self.facts.local_world_size,
                cores=available_cores(),
                ranks_per_host=hosts.count(platform.node()),
                batch_matters=any(isinstance(part, BATCH_NORMS) for part in module.modules()),
                fits_gpu=all(self.world.all_gather_object(fits_gpu(self.data, self.device))),
                has_gpu=all(self.world.all_gather_object(self.device.type == "cuda")),
                batches_ahead=usual_batches_ahead(self.data, self.device),
            ),
        )

    def prepare(self, candidate: TrialSettings) -> str:
        """Do one step alone, which may fail on any rank by itself, and then steps with the others; return "" or the
        error in words."""
        if candidate in self._running:
            return ""
        if self._is_untidy:
            self._clean_up()
        trial, why = self._first_step(candidate)
        if trial is not None:
            try:
                trial.enter_world(self.world)
                trial.train_steps(WARM_UP)
            except GroupError:
                raise
            except Exception as error:
                why = _in_words(error)
            why = self._agree(why)
        if trial is None or why:
            if trial is not None:
                trial.close()
            trial = None
            self._clean_up()
            return why
        began = time.monotonic()
        trial.train_steps(WARM_UP)
        self._step_seconds[candidate] = max(self._gather(time.monotonic() - began)) / WARM_UP
        self._running[candidate] = trial
        if self._began is None:
            self._began = time.monotonic()
        return ""

    def _first_step(self, candidate: TrialSettings, stays: bool = True) -> tuple[TuningTrial | None, str]:
        """Return a trial that has done one step alone, or why there is none, on all ranks. Unless the step ``stays``,
        the trial has its first weights again."""
        trial, why = None, ""
        try:
            trial = TuningTrial(self.job, candidate, self.world, self.faults)
            with self._in_time():
                before = None if stays else copy.deepcopy(trial.state.capture())
                trial.enter_world(Alone(self.facts, self.device, self.backend))
                trial.train_steps(1)
                if before is not None:
                    trial.state.restore(before)
        except Exception as error:  # a user's model or a compiler may raise anything
            why = _in_words(error)
        self.world.barrier()  # to compile takes one rank longer than another, and may take longer than a collective
        why = self._agree(why)
        if why and trial is not None:
            trial.close()
            trial = None
        return trial, why

    def measure(self, candidate: TrialSettings) -> float:
        trial, samples, seconds = self._running[candidate], 0, 0.0
        steps = max(2, round(self._measurement_seconds / self._step_seconds[candidate]))
        self.world.barrier()
        try:
            trial.train_steps(1)  # caches and threads are its own again
            began = time.monotonic()
            samples = trial.train_steps(steps)
            seconds = time.monotonic() - began
        except NonFiniteError:  # on all ranks
            samples = 0
        slowest = max(self._gather(seconds if samples else 0.0))
        if not samples:
            return 0.0
        self._step_seconds[candidate] = slowest / steps
        return samples / slowest

    def release(self, candidate: TrialSettings) -> None:
        trial = self._running.pop(candidate, None)
        if trial is not None:
            trial.close()
        trial = None
        self._is_untidy = True

    def learn(self, candidate: TrialSettings, steps: int) -> LearningResult:
        if self._is_untidy:
            self._clean_up()
        trial, why = self._first_step(candidate, stays=False)
        first = loss = math.nan
        if trial is not None:
            trial.total_steps = left = steps
            try:
                trial.enter_world(self.world)
                first = trial.validation_loss()
                while left:  # in parts, so that nobody who wants to end has to wait long
                    part = min(left, LISTENING_STEPS)
                    trial.train_steps(part)
                    left -= part
                    self._gather(0.0)
                loss = trial.validation_loss()
            except NonFiniteError:  # on all ranks
                loss = math.nan
            except (GroupError, Interrupted):
                raise
            except Exception as error:
                why = _in_words(error)
            trial.close()
        self._is_untidy = True
        is_likelihood = trial is not None and trial.is_likelihood
        return LearningResult(first=first, loss=loss, is_likelihood=is_likelihood, why=self._agree(why))

    def step_seconds(self, candidate: TrialSettings) -> float:
        return self._step_seconds[candidate]

    def document(self) -> dict[str, Any]:
        """Return the content of ``tuned.json``."""
        search, training = self.search, self.job.training
        return {
            "training": with_layout(search.best.settings, training),
            "evidence": {
                "complete": search.is_complete,
                "dataset_id": self.data.dataset_id,
                "model": asdict(self.job.model),
                "loss": asdict(self.job.loss),
                "world_size": self.world.world_size,
                "samples_per_rank": training.batch_size_per_gpu * training.gradient_accumulation_steps,
                "baseline": {
                    "settings": {name: getattr(training, name) for name in dict(search.best.settings)},
                    "samples_per_second": _figures(search.baseline_rate),
                },
                "chosen": {"samples_per_second": _figures(search.best_rate)},
                "gain": _figures(search.gain),
                "candidates": search.rows,
                "host": {
                    "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else _cpu(),
                    "cores": self.search.facts.cores,
                    "ranks_per_node": self.facts.local_world_size,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "seconds": round(self.elapsed, 1),
                "budget_seconds": self.seconds,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        }

    def write(self) -> None:
        """Write the best settings so far, on rank 0."""
        if self.world.rank == 0:
            self.rundir.write_json(TUNED, finite(self.document()))

    def close(self) -> None:
        """Release all candidates and leave the world."""
        for candidate in list(self._running):
            self.release(candidate)
        if self.reporter:
            self.reporter.close()
        self.world.close()

    def _gather(self, value: Any) -> list[Any]:
        """Return one value of each rank. The same message carries the time, by rank 0's clock, and whether a rank was
        told to end, which raises `Interrupted`."""
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        found = self.world.all_gather_object((value, elapsed, self.asked_to_stop))
        self.elapsed = found[0][1]
        if any(stop for _, _, stop in found):
            raise Interrupted
        return [value for value, _, _ in found]

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Raise TimeoutError if the first step of a candidate would take the time that the rest of the search needs."""
        left = max(LEAST_FOR_IT, FIRST_STEP_BY * self.seconds - self.elapsed)

        def ring(*_: object) -> None:
            raise TimeoutError(f"its first step takes longer than the {left:.0f} s that are left for it")

        if self._began is None:  # the configuration itself may take its time
            yield
            return
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _agree(self, why: str) -> str:
        """Return the first reason that any rank has, or ""."""
        return next(filter(None, self._gather(why)), "")

    def _clean_up(self) -> None:
        self._is_untidy = False
        gc.collect()  # buckets and their hooks refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _say(self, **what: Any) -> None:
        if self.reporter:
            self.reporter.emit("tune", elapsed_seconds=self.elapsed, budget_seconds=self.seconds, **what)

    def _on_sigterm(self, *_: object) -> None:
        self.asked_to_stop = True  # no more here: the ranks hear of it at the end of the measurement


def fits_gpu(data: TrainingData, device: torch.device) -> bool:
    """Return whether the data can be kept on the GPU of this rank."""
    if device.type != "cuda" or not isinstance(data, DataShardManager):
        return False
    return fits_on_device(data.sample_bytes, torch.cuda.mem_get_info(device)[0])


def usual_batches_ahead(data: TrainingData, device: torch.device) -> int | None:
    """Return the value that the trainer takes for ``prefetch_batches`` if it is not given; None where the user's own
    loader reads."""
    if isinstance(data, DatasetData):
        return None
    return batches_ahead(None, device, False, bool(getattr(data, "is_larger_than_memory", False)))


def with_layout(settings: Sequence[tuple[str, Any]], training: DistributedTrainingConfig) -> dict[str, Any]:
    """Return the settings with both parts of a layout if they have one of them: another job may divide its batch
    otherwise."""
    found = dict(settings)
    both = {name: found.get(name, getattr(training, name)) for name in LAYOUT}
    return {**found, **both} if any(name in found for name in LAYOUT) else found


def _in_words(error: Exception) -> str:
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, ConfigError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _figures(spread: Any) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def run_tuning(job: JobConfig, seconds: float) -> int:
    """Tune in this process, together with its peers; return the exit code."""
    tuner = None
    try:
        tuner = Tuner(job, seconds)
        tuner.search.run()
        return DONE
    except Interrupted:
        assert tuner is not None
        tuner.write()
        return EVICTED
    except (ConfigError, DatasetError) as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
        return UNUSABLE
    except (GroupError, PeersMissingError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return LOST
    except Exception:
        traceback.print_exc()
        return FAILED
    finally:
        if tuner is not None:
            tuner.close()

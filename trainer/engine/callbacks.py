"""Callbacks of a caller's own: what they are told, and what is guaranteed when nodes are lost.

A callback is any object with some of the methods of `Callback`. If it has ``state_dict`` and ``load_state_dict``, its
state is a part of checkpoints, and is given to nodes that join. An error that it raises ends the training.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, DistributedTrainingConfig

MOST_FIGURES = 50
"""The most names under which a training logs figures."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./ -]{0,99}")
Occasion = Literal["start", "world", "step", "evaluation", "checkpoint", "end"]
OCCASIONS: tuple[Occasion, ...] = ("start", "world", "step", "evaluation", "checkpoint", "end")


class Run:
    """The training as callbacks see it, in this process."""

    def __init__(self, session: Any) -> None:
        """``session``: the `trainer.engine.session.Session`."""
        self._session = session
        self._logged: dict[str, float | None] = {}
        self._names: set[str] = set()
        self.metrics: Mapping[str, float] = {}
        """``loss``, metrics and measures of the latest evaluation on the validation split, equal on all ranks."""
        self.is_best = False
        """Whether that evaluation was the best so far."""
        self.checkpoint = ""
        """The folder of the latest checkpoint that counts, in the run directory; on rank 0."""

    @property
    def rank(self) -> int:
        """This process's rank in the present world; it changes when nodes come and go."""
        return self._session.world.rank

    @property
    def world_size(self) -> int:
        """The ranks of the present world."""
        return self._session.world.world_size

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self._session.device
        return device

    @property
    def step(self) -> int:
        """The optimizer steps done."""
        return self._session.progress.step

    @property
    def total_steps(self) -> int:
        """The optimizer steps at the end of the training."""
        return self._session.total_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._session.position[0]

    @property
    def model(self) -> nn.Module:
        """The model, with the weights after the latest step. With ``fsdp`` and ``hsdp`` each rank holds rows."""
        return self._session.state.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; another object after a change of the world where ranks hold rows."""
        return self._session.step.optimizer

    def log(self, name: str, value: float | Tensor) -> None:
        """Report a figure of rank 0's with the next report of steps; of one that is logged several times until then,
        the last value. It comes to the events, TensorBoard, MLflow and the job's page. On other ranks nothing happens.
        Raise `ConfigError` for a name that is none, for too many of them, and for what is no number."""
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"log({name!r}, …) was given a {type(value).__name__}: give one number")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"log({name!r}, …): a name has letters, digits, blanks and _ . / -, at most 100")
        self._names.add(name)
        if len(self._names) > MOST_FIGURES:
            raise ConfigError(f"log({name!r}, …): more than {MOST_FIGURES} names; log fewer figures")
        self._logged[name] = float(number) if math.isfinite(number) else None

    def report(self) -> None:
        """Emit what was logged since the last report."""
        logged, self._logged = self._logged, {}
        if logged and self.rank == 0:
            self._session.reports.emit("figures", step=self.step, figures=logged)


class Callback:
    """A base of callbacks, whose methods do nothing. All are called on every rank, in the training's own thread, and
    must do the same on all of them where they change the model or the optimizer. In the next collective the others wait
    for who takes longer, at most ``collective_timeout_seconds``; after an evaluation ``solo_timeout_seconds``."""

    def on_start(self, run: Run) -> None:
        """Called once per process, when the model is made. Its weights, and the state of this callback, may yet come
        from a checkpoint or from another node."""

    def on_world(self, run: Run) -> None:
        """Called when this process works in a world: the first, and each that is formed as nodes are lost or come."""

    def on_step(self, run: Run) -> None:
        """Called after a step's update: at most once per process and step. A process that takes over a state from
        others never sees the steps before."""

    def on_evaluation(self, run: Run) -> None:
        """Called after the validation split was evaluated. If a node is lost meanwhile, it is evaluated again."""

    def on_checkpoint(self, run: Run) -> None:
        """Called on rank 0 only, when a checkpoint counts: it is written in the background, so some steps later, and of
        the last one after ``on_end``."""

    def on_end(self, run: Run) -> None:
        """Called at most once per process, after the last step and evaluation, before the final report. The model has
        the last weights."""


class Callbacks:
    """The callbacks of a training in this process."""

    def __init__(self, given: Sequence[Any], session: Any) -> None:
        self._given, self.run = tuple(given), Run(session)
        self._saved: deque[str] = deque()
        self._told_world: int | None = None
        self._has_ended = False

    def call(self, occasion: Occasion) -> None:
        """Call the methods for an occasion, in order."""
        self.deliver()
        self._call(occasion)

    def note_world(self, generation: int) -> None:
        """Call ``on_world``, unless they know of this generation."""
        if generation != self._told_world:
            self._told_world = generation
            self.call("world")

    def note_checkpoint(self, folder: str) -> None:
        """Remember that a checkpoint counts, to be told of in the training's own thread. Any thread may call this."""
        if self._given:
            self._saved.append(folder)

    def note_evaluation(self, figures: Mapping[str, float], is_best: bool) -> None:
        """Call ``on_evaluation``, and report what it logs."""
        self.run.metrics, self.run.is_best = dict(figures), is_best
        self.call("evaluation")
        self.run.report()

    def end(self) -> None:
        """Call ``on_end``, unless that was done."""
        if not self._has_ended:
            self._has_ended = True
            self.call("end")
            self.run.report()

    def deliver(self) -> None:
        """Tell of the checkpoints that have come to count."""
        while self._saved:
            self.run.checkpoint = self._saved.popleft()
            self._call("checkpoint")

    def _call(self, occasion: Occasion) -> None:
        for each in self._given:
            method = getattr(each, f"on_{occasion}", None)
            if method is not None:
                method(self.run)


def name_stateful(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the callbacks that have a state, by names which are the same in each process."""
    seen, found = Counter[str](), dict[str, Any]()
    for each in callbacks:
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            kind = type(each).__qualname__
            seen[kind] += 1
            found[kind if seen[kind] == 1 else f"{kind} {seen[kind]}"] = each
    return found


def check_callbacks(callbacks: Sequence[Any], config: DistributedTrainingConfig) -> None:
    """Raise `ConfigError` for what is no callback, and for one with a state where ranks share the model."""
    for each in callbacks:
        if isinstance(each, type):
            raise ConfigError(f"the callback {each.__name__} is a class: give an object, such as {each.__name__}()")
        known = {f"on_{occasion}" for occasion in OCCASIONS}
        own = {name for name in dir(each) if name.startswith("on_")}
        if not own or (isinstance(each, Callback) and own - known):
            odd = f" has {', '.join(sorted(own - known))}, and" if own - known else ""
            raise ConfigError(f"{type(each).__name__}{odd} is no callback: its methods are {', '.join(sorted(known))}")
    if (named := name_stateful(callbacks)) and (config.is_sharded or config.strategy == "deepspeed"):
        raise ConfigError(
            f"the callback {next(iter(named))} has a state, which training.strategy = {config.strategy!r} would have "
            "to divide among ranks: leave out its state_dict, or set training.strategy = 'ddp'"
        )

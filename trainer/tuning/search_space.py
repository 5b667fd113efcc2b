"""The settings that auto-tuning can set: which values of them it tries, in which groups, and the time for each group.

What the measured figures mean does not belong here: see `trainer.tuning.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainer.config import DistributedTrainingConfig

Settings = dict[str, Any]
FIELDS = {item.name for item in fields(DistributedTrainingConfig)}
LAYOUT = ("batch_size_per_gpu", "gradient_accumulation_steps")
"""The two settings of a layout: their product is the number of samples of a rank in a step."""
KNOBS = (
    *LAYOUT,
    "precision",
    "threads_per_rank",
    "prefetch_batches",
    "data_on_device",
    "communication",
    "topk_fraction",
    "compile",
)
"""The settings that tuning may change: they decide how fast a training is, and not what is trained."""
COMPILE_SECONDS, LEAST_EACH = 30.0, 10.0
"""Seconds. Compiling is not started with less than the first left in its group. That much is reserved for it if each
group has at least the second besides."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """Settings that differ from the configuration."""

    settings: tuple[tuple[str, Any], ...] = ()

    def but(self, changes: Settings) -> TrialSettings:
        """Return these settings with some changed."""
        return TrialSettings(tuple({**dict(self.settings), **changes}.items()))

    @property
    def label(self) -> str:
        """The settings in words."""
        return ", ".join(f"{name} = {value}" for name, value in self.settings) or "as configured"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningContext:
    """The facts on which the choice of candidates depends besides the configuration."""

    world_size: int
    local_world_size: int
    cores: int
    ranks_per_host: int
    """The number of ranks that share these cores, of one node or of several."""
    batch_matters: bool = False
    """Whether the model has layers that look at a whole micro-batch, so that its size decides what they compute."""
    has_gpu: bool = False
    fits_gpu: bool = False
    """Whether the data can be kept on the GPU."""
    batches_ahead: int | None = 0
    """The value that the trainer takes for ``prefetch_batches`` if it is not given; None where it has no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsGroup:
    """A group of settings that are searched together."""

    name: str
    options: Callable[[DistributedTrainingConfig, TuningContext], list[Settings]]
    """Given the present configuration, the changes that can be tried, in this order."""
    changes_numbers: bool = False
    """Whether results change by more than rounding: then what was learned is compared with the baseline."""
    least_seconds: float = 0.0


def layouts(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return layouts with the same samples of each rank and step in other micro-batches: the largest first, each half
    of the one before. So the first ones that do not run out of memory are the largest that fit."""
    per_rank = config.batch_size_per_gpu * config.gradient_accumulation_steps
    least = min(config.micro_batch_floor, config.batch_size_per_gpu)
    found, parts = [], 1
    while per_rank % parts == 0 and per_rank // parts >= least:
        if parts != config.gradient_accumulation_steps:
            found.append({"batch_size_per_gpu": per_rank // parts, "gradient_accumulation_steps": parts})
        parts *= 2
    return found


def precisions(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return the other precisions; TF32 only where there is a GPU, as no other device has it."""
    return _other("precision", "fp32", *(["tf32"] if facts.has_gpu else []), "bf16", "fp16")(config, facts)


def thread_counts(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return half and twice the threads, and a fair share of the cores: threads without a core of their own wait for
    each other."""
    now, share = config.threads_per_rank or 1, facts.cores // facts.ranks_per_host
    counts = {now // 2, 2 * now, share} - {now}
    return [{"threads_per_rank": count} for count in sorted(counts) if 1 <= count <= share]


def communications(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return the ways to sum gradients that differ in this world."""
    if facts.world_size == 1:
        return []
    is_two_level = 1 < facts.local_world_size < facts.world_size
    return _other("communication", "allreduce", "fp16", "topk", *(["hierarchical"] if is_two_level else []))(
        config, facts
    )


def places(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return where the data can be kept, if there is a choice."""
    return _other("data_on_device", True, False)(config, facts) if facts.fits_gpu else []


def depths(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return other numbers of batches that are gathered ahead; none if the setting has no effect: if the data are
    on the GPU, or read by a loader of the user's own."""
    if facts.batches_ahead is None or (facts.fits_gpu and config.data_on_device):
        return []
    now = facts.batches_ahead if config.prefetch_batches is None else config.prefetch_batches
    return [{"prefetch_batches": count} for count in (0, 1, 2, 4) if count != now]


def compilations(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
    """Return the modes of compiling. CUDA graphs are among them only if there is a GPU: otherwise the report would say
    that they were not tried for want of time."""
    return _other("compile", "off", "default", *(["reduce-overhead"] if facts.has_gpu else []))(config, facts)


def _other(name: str, *values: Any) -> Callable[[DistributedTrainingConfig, TuningContext], list[Settings]]:
    """Return a function for the values of a field that it does not have now; none for a field that the trainer does not
    have."""

    def options(config: DistributedTrainingConfig, facts: TuningContext) -> list[Settings]:
        return [{name: value} for value in values if name in FIELDS and value != getattr(config, name)]

    return options


def groups(facts: TuningContext) -> list[SettingsGroup]:
    """Return the groups in the order of their influence: the layout and the precision decide how long a step computes,
    and so what all others are worth. Compiling comes last, because nothing else can take so much of the budget."""
    return [
        SettingsGroup(name="layout", options=layouts, changes_numbers=facts.batch_matters),
        SettingsGroup(name="precision", options=precisions, changes_numbers=True),
        SettingsGroup(name="threads", options=thread_counts),
        SettingsGroup(name="device", options=places),
        SettingsGroup(name="input", options=depths),
        SettingsGroup(name="communication", options=communications, changes_numbers=True),
        SettingsGroup(name="compile", options=compilations, changes_numbers=True, least_seconds=COMPILE_SECONDS),
    ]


def share(parts: Sequence[SettingsGroup], left: float) -> float:
    """Return the seconds for the first of these groups: an equal share of the ``left`` seconds, beside what is reserved
    for the groups that cannot begin without."""
    held = sum(group.least_seconds for group in parts)
    each = (left - held) / len(parts)
    return parts[0].least_seconds + each if each >= LEAST_EACH else left / len(parts)

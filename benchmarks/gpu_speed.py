"""How fast trainings on a GPU are beside bare loops, which `benchmarks.gpu` reports as ``speed``.

A bare loop is the same model, loss, batch, clipping and AdamW on the same data, written in a few lines, without ranks,
checkpoints and reports: run operation by operation (``eager``), through `torch.compile` (``compiled``), or as one CUDA
graph (``captured``); with ``workers``, batches come from torch's DataLoader, else all data are on the device. Sides
take turns in each round, in one process. Of a training, the seconds of a step are the median over its ``step`` events
after the first `WARM_STEPS`. Language and images are a caller's own dataset, whose batches are copied to a GPU while it
computes; ``workers`` reads them in other processes.

    step_ms     milliseconds of a step, the median over rounds, by side
    input_ms    milliseconds of a step that a training waited for its batch, by its settings
    share       the time of the fastest bare loop ÷ that of the training, by its settings
    peak_mib    the most memory that was allocated, by side
    busy_share  the part of a traced stretch of the training during which the GPU computed
    end_ratio   seconds from the last step to the end ÷ seconds that writing the same bytes takes
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.host import note
from trainer.config import DatasetRef, FactoryConfig, JobConfig, TrackingConfig
from trainer.engine.precision import tf32_products
from trainer.engine.problem import maker_of
from trainer.engine.run_job import train_job
from trainer.engine.steps import carry_out
from trainer.fit import DistributedConfig, Trainer
from trainer.model.allowed_factories import usual_parts
from trainer.rundir import RunDir
from trainer.spec import WINDOWS

WARM_STEPS, ROUNDS, CLIP, RATE, EPSILON = 20, 2, 1.0, 1e-4, 1e-6
WORKERS = "workers"
"""The name of the sides whose batches are read by processes of torch's DataLoader."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a training and the bare loops beside it train."""

    name: str
    make: Callable[[], nn.Module]
    losses: Callable[[Any, tuple[Tensor, ...]], Tensor]
    """Returns one loss for each sample, from the model and a batch."""
    data: tuple[Tensor, ...]
    """All samples (N, …), on the device."""
    batch: int
    steps: int
    ours: Mapping[str, Mapping[str, Any]]
    """The settings of each training that is compared."""
    sides: tuple[str, ...] = ("eager", "captured")
    precision: str = "fp32"


class GPT(nn.Module):
    """A decoder of 124 million parameters, as GPT-2 has them."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        options: dict[str, Any] = {"activation": "gelu", "norm_first": True, "batch_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(given, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        around = nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.around = nn.Identity() if given == width and stride == 1 else around

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.around(x))


def resnet(width: int = 64, classes: int = 10) -> nn.Module:
    """Return a ResNet-18 for images of 32 × 32."""
    stem = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    widths = [width, *(width << stage for stage in range(4))]
    blocks = [
        block
        for given, wide in pairwise(widths)
        for block in (Residual(given, wide, wide // given), Residual(wide, wide, 1))
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


@dataclass(frozen=True, slots=True)
class GivenTask:
    """The task of a case."""

    losses: Callable[[Any, tuple[Tensor, ...]], Tensor]

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return one loss for each sample."""
        return self.losses(model, batch)


def token_losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy of the tokens of each text."""
    [tokens] = batch
    scores = model(tokens[:, :-1]).float()
    return functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def image_losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the cross entropy of each image."""
    images, labels = batch
    return functional.cross_entropy(model(images).float(), labels, reduction="none")


def loader_of(case: Case) -> DataLoader[Any]:
    """Return a loader of a case's data, with worker processes."""
    data, pins = TensorDataset(*(each.cpu() for each in case.data)), case.data[0].is_cuda
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "persistent_workers": True}
    return DataLoader(data, case.batch, num_workers=4, pin_memory=pins, **options)


class BareLoop:
    """A training loop of a few lines."""

    def __init__(self, case: Case, how: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.module = case.make().to(device).train()
        self.parameters = [each for each in self.module.parameters() if each.requires_grad]
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, fused=True, capturable=on_gpu)
        losses = case.losses
        self.loss = torch.compile(lambda batch: losses(self.module, batch)) if how == "compiled" else self._plain
        self.positions = torch.zeros(case.batch, dtype=torch.int64, device=device)
        self.graph: Any = None
        self.batches = self._read(loader_of(case)) if how == WORKERS else None
        if how == "captured":
            self._capture()

    def _plain(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.case.losses(self.module, batch)

    def _capture(self) -> None:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self._work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._work()

    def _read(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, ...]]:
        while True:
            for batch in loader:
                yield tuple(each.to(self.device, non_blocking=True) for each in batch)

    def _work(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.graph is None)
        if self.batches is None:
            batch = tuple(each.index_select(0, self.positions) for each in self.case.data)
        else:
            batch = next(self.batches)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.precision == "bf16"):
            loss = self.loss(batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()

    def run(self, steps: int) -> float:
        """Return the seconds of a step, over so many of them."""
        with tf32_products() if self.case.precision == "tf32" else nullcontext():
            return self._run(steps)

    def _run(self, steps: int) -> float:
        count = len(self.case.data[0])
        order = torch.randperm(count, device=self.device)
        wait_for(self.device)
        began = time.perf_counter()
        for number in range(steps):
            first = number * self.case.batch % max(1, count - self.case.batch + 1)
            self.positions.copy_(order[first : first + self.case.batch])
            if self.graph is None:
                self._work()
            else:
                self.graph.replay()
        wait_for(self.device)
        return (time.perf_counter() - began) / steps


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(rundir: RunDir) -> tuple[float, float, float]:
    """Return the seconds of a step (median), those of it that waited for a batch, and those from the last step to the
    end."""
    events = list(rundir.events())
    steps = [item for item in events if item["kind"] == "step"]
    step = statistics.median([item["step_seconds"] for item in steps][WARM_STEPS:])
    waits = [max(item["segments"]["input"]) for item in events if item["kind"] == "timing"]
    return step, statistics.median(waits) if waits else math.nan, events[-1]["time"] - steps[-1]["time"]


def settings_of(case: Case, name: str) -> dict[str, Any]:
    """Return the settings of a training of a case."""
    return {
        "world_size": 1,
        "batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": 1,
        "max_steps": WARM_STEPS + case.steps,
        "epochs": 10**4,
        "log_frequency": 1,
        "checkpoint_frequency": 10**6,
        "learning_rate": RATE,
        "clip_norm": CLIP,
        "precision": case.precision,
        **case.ours[name],
    }


def train_case(case: Case, name: str, folder: Path) -> RunDir:
    """Train a case by its own dataset, and return the run directory."""
    data = loader_of(case) if name == WORKERS else TensorDataset(*(each.cpu() for each in case.data))
    run_dir = str(folder / f"{case.name}-{name}-{time.monotonic_ns()}")
    torch.manual_seed(0)
    config = DistributedConfig(**settings_of(case, name))
    Trainer(case.make(), config, task=GivenTask(case.losses), run_dir=run_dir, progress=False).fit(data)
    return RunDir(run_dir)


def compare(
    case: Case, folder: Path, device: torch.device, rounds: int, train: Callable[[Case, str, Path], RunDir]
) -> dict[str, Any]:
    """Return the figures of a case. ``train`` returns the run directory of a training with settings of this name."""
    found: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    failed: dict[str, str] = {}
    waits: dict[str, float] = {}
    ends: dict[str, float] = {}

    def take(side: str, work: Callable[[], float]) -> None:
        if side in failed:
            return
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            found.setdefault(side, []).append(work())
        except Exception as error:  # one side is no reason to lose the others
            failed[side] = f"{type(error).__name__}: {str(error)[:300]}"
        if device.type == "cuda":
            peaks[side] = max(peaks.get(side, 0), torch.cuda.max_memory_allocated(device) >> 20)
        note(f"{case.name} {side}: {failed.get(side) or round(1000 * found[side][-1], 3)}")

    def bare(how: str) -> float:
        torch.compiler.reset()
        loop = BareLoop(case, how, device)
        loop.run(WARM_STEPS)
        return loop.run(case.steps)

    def ours(name: str) -> float:
        torch.compiler.reset()
        step, waits[name], ends[name] = seconds_of(train(case, name, folder))
        return step

    for _ in range(rounds):
        for side in case.sides:
            take(f"bare {side}", lambda side=side: bare(side))  # type: ignore[misc]
        for name in case.ours:
            take(f"ours {name}", lambda name=name: ours(name))  # type: ignore[misc]
    middle = {side: statistics.median(values) for side, values in found.items() if values}
    fastest = min((value for side, value in middle.items() if side.startswith("bare")), default=None)
    return {
        "batch": case.batch,
        "step_ms": {side: round(1000 * value, 3) for side, value in middle.items()},
        "input_ms": {name: round(1000 * value, 3) for name, value in waits.items()},
        "share": {
            side.removeprefix("ours "): round(fastest / value, 3)
            for side, value in middle.items()
            if side.startswith("ours") and fastest is not None
        },
        "peak_mib": peaks,
        "end_seconds": {name: round(value, 3) for name, value in ends.items()},
        "failed": failed,
    }


def price_case(dataset: DatasetRef, batch: int, steps: int, device: torch.device, folder: Path) -> Case:
    """Return the case of the default model on windows of prices."""
    model, loss = usual_parts(WINDOWS, None)
    job = JobConfig(
        job_id="prices",
        run_dir=str(folder / "prices"),
        dataset=dataset,
        model=FactoryConfig(factory=model),
        loss=FactoryConfig(factory=loss),
    )
    maker = maker_of(job)
    data = maker.open_data(job, device)
    problem = maker.make(job, data, device)
    windows = data.read("train", np.arange(min(data.count("train"), 3 * max(batch, 1 << 15))), device)
    graphs = {"graphs": {"cuda_graphs": "auto"}} if device.type == "cuda" else {}
    return Case(
        name=f"prices-{batch}",
        make=lambda: maker.make(job, data, device).module,
        losses=problem.task.loss,
        data=windows,
        batch=batch,
        steps=steps,
        ours={"eager": {}, **({"tf32": {"precision": "tf32"}} if graphs else {}), **graphs},
        sides=("eager", "captured") if device.type == "cuda" else ("eager",),
    )


def train_prices(dataset: DatasetRef, case: Case, name: str, folder: Path) -> RunDir:
    """Train the default model, and return the run directory."""
    model, loss = usual_parts(WINDOWS, None)
    job_id = f"{case.name}-{name}-{time.monotonic_ns()}"
    job = JobConfig(
        job_id=job_id,
        run_dir=str(folder / job_id),
        dataset=dataset,
        model=FactoryConfig(factory=model),
        loss=FactoryConfig(factory=loss),
        training=DistributedConfig(**{**settings_of(case, name), "eval_frequency": 10**6}),
        tracking=TrackingConfig(tensorboard=False),
    )
    rundir = RunDir(job.run_dir)
    rundir.make()
    rundir.write_job(job)
    code, result = carry_out(train_job(job, maker_of(job)))
    if code or result.get("status") != "succeeded":
        raise RuntimeError(result.get("error") or f"exit code {code}")
    return rundir


def other_cases(device: torch.device, tiny: bool) -> list[Case]:
    """Return the cases of a language model and of images; ``tiny``: small enough for a CPU."""
    length, width, depth, texts, batch = (16, 32, 1, 64, 4) if tiny else (1024, 768, 12, 512, 16)
    heads, vocabulary = (2, 64) if tiny else (12, 50304)
    tokens = torch.randint(vocabulary, (texts, length + 1), device=device)
    images, image_batch = (64, 8) if tiny else (8192, 512)
    pictures = torch.randn(images, 3, 32, 32, device=device), torch.randint(10, (images,), device=device)
    steps = 5 if tiny else 40
    compiled = {} if tiny else {"compiled": {"compile": "default"}}
    graphs = {} if tiny else {"graphs": {"cuda_graphs": "auto"}}
    bare = ("eager",) if tiny else ("eager", "compiled")
    language = Case(
        name="gpt",
        make=lambda: GPT(vocabulary, length, width, heads, depth),
        losses=token_losses,
        data=(tokens,),
        batch=batch,
        steps=steps,
        ours={"eager": {}, **compiled},
        sides=bare,
        precision="bf16",
    )
    vision = replace(
        language,
        name="resnet",
        make=partial(resnet, 4 if tiny else 64),
        losses=image_losses,
        data=pictures,
        batch=image_batch,
        ours={"eager": {}, WORKERS: {}, **graphs},
        sides=("eager", WORKERS) if tiny else ("eager", "captured", WORKERS),
    )
    # In float32, of which only matrix products are in TF32; a CPU has none.
    products = [
        replace(language, name=f"gpt-{precision}", precision=precision, ours={"eager": {}}, sides=("eager",))
        for precision in ("fp32", "tf32")
    ]
    return [language, vision, *(products if device.type == "cuda" else [])]


def busy_share(rundir: RunDir) -> float | None:
    """Return the part of the traced time in which the GPU computed, None without a trace of one."""
    [trace, *_] = [*Path(rundir.uri, "profile").glob("trace-*.json"), None]
    if trace is None:
        return None
    events = json.loads(trace.read_text())["traceEvents"]
    spans = sorted((item["ts"], item["ts"] + item["dur"]) for item in events if item.get("cat") == "kernel")
    busy = end = 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return round(busy / (spans[-1][1] - spans[0][0]), 3) if spans else None


def seconds_to_write(folder: Path, bytes_: int) -> float:
    """Return the seconds that writing so many bytes to a file takes, until they are on the disk."""
    piece = os.urandom(1 << 22)
    began = time.perf_counter()
    with open(folder / "bytes", "wb") as file:
        for _ in range(max(1, bytes_ // len(piece))):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def measure_speed(folder: Path, dataset: DatasetRef, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Return the figures of all cases. ``tiny``: as a check that they run, on a CPU too."""
    figures: dict[str, Any] = {}
    rounds = 1 if tiny else ROUNDS
    for batch in (64,) if tiny else (768, 8192, 32768):
        case = price_case(dataset, batch, 5 if tiny else 200, device, folder)
        figures[case.name] = compare(case, folder, device, rounds, lambda *given: train_prices(dataset, *given))
    for case in other_cases(device, tiny):
        figures[case.name] = compare(case, folder, device, rounds, train_case)
        if case.name == "gpt":
            bytes_ = 3 * sum(each.nbytes for each in case.make().parameters())  # weights and moments
            writing, ends = seconds_to_write(folder, bytes_), figures["gpt"]["end_seconds"]
            figures["gpt"]["end_ratio"] = {name: round(value / writing, 2) for name, value in ends.items()}
    if device.type == "cuda":
        traced = {"profile_steps": 20, "profile_from_step": WARM_STEPS, "profile_python": False}
        case = price_case(dataset, 768, 200, device, folder)
        for name, settings in case.ours.items():
            with_trace = replace(case, ours={name: {**settings, **traced}})
            figures[case.name.split("-")[0] + f"-768 {name}"] = {
                "busy_share": busy_share(train_prices(dataset, with_trace, name, folder))
            }
    return figures

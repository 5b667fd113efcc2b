"""Measure a model that ranks share (`training.strategy = "fsdp"`) against one that each rank holds, and against torch's
own FSDP2.

Run `python -m benchmarks.large_model`. Three worlds of ``--ranks`` processes train the same model on the same samples,
in turns of a few steps, in an order that changes with each round: `ddp` and `fsdp` by
`trainer.engine.step.TrainingStep`, and `plain`, a loop around `torch.distributed.fsdp.fully_shard` over torch's default
group, with the same blocks, fused AdamW and clipping. The learning rate grows from zero, as in every training.

    peak_vs_ddp          bytes of parameters, gradients and moments on a rank after a backward pass, when all of them
                         are there: those of fsdp over those of ddp. Counted from the tensors
    peak_bytes           these bytes, of each
    gathered_bytes       the most that fsdp gathers at once for two blocks (one computes, one is fetched), beside that
    rss_bytes            growth of the resident memory of a rank at its peak, from before the model was made: it
                         includes activations, buffers of communication, and what the allocator keeps
    rss_vs_ddp           that of fsdp over that of ddp
    min_vs_plain_fsdp2   samples per second of fsdp over those of plain in the median of the rounds
    vs_plain_rounds      the same for each round, in ascending order
    vs_ddp               samples per second of fsdp over those of ddp, the median of the rounds
    loss_difference      the largest difference of a step's loss between fsdp and ddp; ``…_plain``: and plain
    losses               of ddp, in the first step and in the last: they fall, or differences tell of the training
    load_before          processes that want to run, before (`os.getloadavg`)

All ranks share the cores of one machine, and gloo on loopback is their network: times say how the two implementations
compare here, not what a cluster gains.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.host import free_port, options_of, tell

SIDES = ("ddp", "fsdp", "plain")
DEFAULTS = {"ranks": 4, "rounds": 8, "steps": 3, "batch": 128, "width": 512, "depth": 8}
"""The sizes that are quoted."""
MICRO_BATCHES = 2
"""Micro-batches of each rank in a step."""


class Block(nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


class Model(nn.Module):
    """Blocks in a row, and a number for each sample."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B,) for (B, width)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0].clone()


def conclude(rounds: list[dict[str, float]], peaks: dict[str, list[int]], losses: dict[str, list[float]]) -> dict:
    """Return the figures from seconds by side for each round, bytes by side and rank, and losses by side. Pure."""
    vs_plain = sorted(one["plain"] / one["fsdp"] for one in rounds)
    return {
        "peak_vs_ddp": max(peaks["fsdp"]) / max(peaks["ddp"]),
        "peak_bytes": {side: max(bytes_) for side, bytes_ in peaks.items()},
        "min_vs_plain_fsdp2": statistics.median(vs_plain),
        "vs_plain_rounds": vs_plain,
        "vs_ddp": statistics.median(one["ddp"] / one["fsdp"] for one in rounds),
        "loss_difference": _difference(losses["fsdp"], losses["ddp"]),
        "loss_difference_plain": _difference(losses["fsdp"], losses["plain"]),
        "losses": [losses["ddp"][0], losses["ddp"][-1]],
    }


def _difference(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def rate_of(step: int) -> float:
    """Return the learning rate of a step (0-based), which grows over 50 steps. Pure.

    At ten times this rate the loss grows again after twenty steps, and each step multiplies the rounding of the one
    before: `ddp` then differs by 5e-5 from `ddp` whose ranks have each other's samples."""
    return 1e-4 * min(1.0, (step + 1) / 50)


class Data:
    """The samples of a step, the same for each side."""

    def __init__(self, rank: int, ranks: int, batch: int, width: int) -> None:
        self.rank, self.ranks, self.batch, self.width = rank, ranks, batch, width

    def parts(self, step: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return (number, inputs, targets) of this rank's micro-batches."""
        found = []
        for number in range(self.rank, MICRO_BATCHES * self.ranks, self.ranks):
            made = torch.Generator().manual_seed(1000 * step + number)
            x = torch.randn(self.batch, self.width, generator=made)
            found.append((number, x, x[:, :4].sum(1).tanh()))
        return found


class Ours:
    """A side that is trained by `TrainingStep`."""

    def __init__(self, side: str, model: nn.Module, data: Data, port: int) -> None:
        from trainer.comm.group import InterruptibleGroup
        from trainer.comm.launcher_env import RankFacts
        from trainer.comm.torch_transport import make_torch_transport
        from trainer.comm.world import World
        from trainer.config import DistributedTrainingConfig
        from trainer.engine.state import Entry
        from trainer.engine.steps import StepFlags
        from trainer.engine.workload import kinds_of
        from trainer.model.task import SupervisedTask
        from trainer.runtime.fault_injection import Faults

        rank, ranks, cpu = data.rank, data.ranks, torch.device("cpu")
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=300), wait_for_workers=False)
        group = InterruptibleGroup(
            rank, ranks, lambda: make_torch_transport(store, rank, ranks, None, 600.0, 600.0, "127.0.0.1")
        )
        self.world, self.data, self.flags = (
            World(RankFacts(rank=rank, world_size=ranks), cpu, "gloo", 1, group),
            data,
            StepFlags(),
        )
        config = DistributedTrainingConfig(
            strategy=side, world_size=ranks, gradient_accumulation_steps=MICRO_BATCHES, batch_size_per_gpu=data.batch
        )
        make_step, make_state = kinds_of(side)
        self.step = make_step(model, SupervisedTask(nn.MSELoss(reduction="none")), config, cpu, Faults({}, 0))
        make_state(self.step).enter(self.world, Entry(), lambda _: None)
        self.step.adopt(self.world)

    def train(self, number: int) -> float:
        """Do a step; return the global loss."""
        from trainer.data.batches import Batch, Samples

        data = self.data
        parts = tuple(Samples(place, data.batch, (x, y)) for place, x, y in data.parts(number))
        batch = Batch(data.batch * data.ranks * MICRO_BATCHES, parts, 0)
        result = self.step(batch, number, rate_of(number), self.flags)
        total = self.world.all_reduce(torch.tensor([result.loss_sum], dtype=torch.float64))
        return total.item() / batch.samples

    def bytes_held(self) -> int:
        """Return the bytes of parameters, gradients and moments on this rank, after a step."""
        from trainer.engine.sharded import ShardedStep

        step = self.step
        if isinstance(step, ShardedStep):
            held = [*step.sharded.rows.values(), *(step.sync.flat_gradients() or ())]
        else:
            held = [*step.parameters, *(item.grad for item in step.parameters if item.grad is not None)]
        for of_one in step.optimizer.state.values():
            held += [of_one["exp_avg"], of_one["exp_avg_sq"]]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


class Plain:
    """A side that is a loop around torch's `fully_shard`."""

    def __init__(self, side: str, model: nn.Module, data: Data, port: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=data.rank,
            world_size=data.ranks,
            timeout=timedelta(seconds=600),
        )
        mesh = init_device_mesh("cpu", (data.ranks,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model, self.data = model, data
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)

    def train(self, number: int) -> float:
        """Do a step; return the global loss."""
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] = rate_of(number)
        total = torch.zeros(1, dtype=torch.float64)
        for _, x, y in self.data.parts(number):
            loss = nn.functional.mse_loss(self.model(x), y, reduction="sum")
            (loss / (self.data.batch * MICRO_BATCHES)).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        dist.all_reduce(total)
        return total.item() / (self.data.batch * self.data.ranks * MICRO_BATCHES)

    def bytes_held(self) -> int:
        """Return the bytes of parameters, gradients and moments on this rank, after a step."""
        held: list[Any] = list(self.model.parameters())
        held += [item.grad for item in self.model.parameters() if item.grad is not None]
        for of_one in self.optimizer.state.values():
            held += [of_one["exp_avg"], of_one["exp_avg_sq"]]
        return sum(tensor.to_local().nbytes for tensor in held)


def be_rank(side: str, rank: int, options: argparse.Namespace, port: int, asked: Connection) -> None:
    """The life of a rank: for each (first step, steps) that is asked, the seconds and the losses; at the end None."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = _rss()
    model = Model(options.width, options.depth)
    data = Data(rank, options.ranks, options.batch, options.width)
    trained: Any = (Plain if side == "plain" else Ours)(side, model, data, port)
    while (turn := asked.recv()) is not None:
        first, steps = turn
        began = time.perf_counter()
        losses = [trained.train(step) for step in range(first, first + steps)]
        asked.send((time.perf_counter() - began, losses))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked.send((trained.bytes_held(), peak - started))
    os._exit(0)


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    spawn = get_context("spawn")
    ranks: dict[str, list[Connection]] = {}
    processes = []
    for side in SIDES:
        port, ranks[side] = free_port(), []
        for rank in range(options.ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=be_rank, args=(side, rank, options, port, theirs), daemon=True)
            process.start()
            processes.append(process)
            ranks[side].append(ours)
    losses: dict[str, list[float]] = {side: [] for side in SIDES}
    rounds: list[dict[str, float]] = []
    order = random.Random(0)
    for number in range(options.rounds + 1):
        seconds = {}
        for side in order.sample(SIDES, len(SIDES)):
            for connection in ranks[side]:
                connection.send((number * options.steps, options.steps))
            answers = [connection.recv() for connection in ranks[side]]
            seconds[side] = max(took for took, _ in answers)
            losses[side] += answers[0][1]
        if number:  # the first round warms up
            rounds.append(seconds)
    peaks, resident = {}, {}
    for side in SIDES:
        for connection in ranks[side]:
            connection.send(None)
        answers = [connection.recv() for connection in ranks[side]]
        peaks[side], resident[side] = [held for held, _ in answers], max(grown for _, grown in answers)
    for process in processes:
        process.join(30)
    block = 4 * sum(parameter.numel() for parameter in Block(options.width).parameters())
    return {
        **conclude(rounds, peaks, losses),
        "gathered_bytes": 2 * 2 * block,
        "rss_bytes": resident,
        "rss_vs_ddp": resident["fsdp"] / resident["ddp"],
        "seconds_per_step": {side: statistics.median(one[side] for one in rounds) / options.steps for side in SIDES},
        "parameters": sum(parameter.numel() for parameter in Model(options.width, options.depth).parameters()),
        "ranks": options.ranks,
        "rounds": options.rounds,
        "steps": options.steps,
        "batch": options.batch,
        "width": options.width,
        "depth": options.depth,
    }


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = options_of("large_model", __doc__)
    about = {"steps": "steps of a side in a round", "batch": "samples of a micro-batch"}
    for name, usual in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=usual, help=about.get(name))
    options = parser.parse_args()
    tell("large_model", measure(options), options.save)


if __name__ == "__main__":
    main()

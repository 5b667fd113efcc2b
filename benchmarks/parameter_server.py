"""Measure how long summing gradients over ranks takes: parameter-server mode, plain and with TLS, against gloo.

Run `python -m benchmarks.parameter_server`. All three are set up in the same processes and used alternately, in an
order that changes from round to round, so that other work on the machine disturbs them alike. Each sums a tensor of the
same size in place. After a barrier, a sum lasts from when the first rank begins to when the last one has the result,
which is checked. In the keys of the line, ``star`` is parameter-server mode.

    star_p50_seconds, star_tls_p50_seconds, gloo_p50_seconds    medians over rounds; *_p90_seconds likewise
    star_times_gloo, star_tls_times_gloo, star_tls_times_star   ratios of the medians
    bytes                                                       of the tensor, on each rank
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trainer"))

from certificates import Authority  # noqa: E402

from benchmarks.checkpoint import RESULTS, _cpu  # noqa: E402
from trainer.comm.parameter_server import ParameterServerGroup  # noqa: E402
from trainer.comm.tls import CertificateFiles  # noqa: E402
from trainer.comm.torch_transport import Transport, make_torch_transport  # noqa: E402
from trainer.config import TLSConfig  # noqa: E402

KINDS = ("star", "star_tls", "gloo")
"""Ways to sum; these names are keys of the saved results."""
SECONDS = 300.0
"""Seconds for which a rank waits for the others."""
WARM_UP = 3
"""Rounds that do not count."""


def be(
    pipe: Connection, listeners: dict[str, socket.socket], rank: int, size: int, numel: int, rounds: int, tls: TLSConfig
) -> None:
    """Run one rank: it sends when it began and ended each sum, by the machine's clock (s)."""
    torch.set_num_threads(1)
    transports = {kind: connect(kind, listeners[kind], rank, size, tls) for kind in KINDS}
    order = random.Random(0)
    times: list[tuple[str, float, float]] = []
    for number in range(WARM_UP + rounds):
        for kind in order.sample(KINDS, len(KINDS)):
            tensor = torch.full((numel,), rank + 1.0)
            transports[kind].barrier(SECONDS)
            began = time.monotonic()
            transports[kind].all_reduce(tensor)
            ended = time.monotonic()
            assert (tensor == size * (size + 1) / 2).all(), kind
            if number >= WARM_UP:
                times.append((kind, began, ended))
    pipe.send(times)
    transports["star"].barrier(SECONDS)  # no rank leaves before all are done


def connect(kind: str, listener: socket.socket, rank: int, size: int, tls: TLSConfig) -> Transport:
    """Return this rank's transport of one kind."""
    address = listener.getsockname()
    if kind == "gloo":
        options: dict[str, Any] = {"master_listen_fd": listener.detach()} if rank == 0 else {}
        listener.close()
        store = dist.TCPStore(*address, size, rank == 0, wait_for_workers=False, **options)
        return make_torch_transport(store, rank, size, None, SECONDS, SECONDS, "127.0.0.1")
    contexts, key = CertificateFiles(tls) if kind == "star_tls" else None, kind.encode()
    if rank == 0:
        return ParameterServerGroup.serve(listener, size, key, SECONDS, contexts)
    listener.close()
    return ParameterServerGroup.connect_worker(address, rank, size, key, SECONDS, contexts)


def measure(size: int, numel: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every sum, by kind."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="star-") as folder:
        tls = Authority(Path(folder)).node()
        listeners = {kind: socket.create_server(("127.0.0.1", 0)) for kind in KINDS}
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, listeners, rank, size, numel, rounds, tls)
            processes.append(context.Process(target=be, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        for listener in listeners.values():
            listener.close()
        by_rank = [pipe.recv() for pipe in pipes]  # EOFError if a rank has failed
        for process in processes:
            process.join()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for ranks in zip(*by_rank, strict=True):
        seconds[ranks[0][0]].append(max(ended for *_, ended in ranks) - min(began for _, began, _ in ranks))
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.parameter_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=3, help="number of ranks, each a process (3)")
    parser.add_argument("--megabytes", type=float, default=38.0, help="gradients of each rank, in 10^6 bytes (38)")
    parser.add_argument("--rounds", type=int, default=30, help="sums of each kind (30)")
    parser.add_argument(
        "--out", nargs="?", const="star.json", help="also write the line to benchmarks/results/OUT (star.json)"
    )
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.rounds < 2:
        parser.error("--ranks and --rounds must be 2 or more")
    numel = round(options.megabytes * 1e6 / 4)
    load_before = os.getloadavg()[0]
    seconds = measure(options.ranks, numel, options.rounds)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    result: dict[str, Any] = {
        "benchmark": "star",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "torch": torch.__version__,
        "ranks": options.ranks,
        "bytes": 4 * numel,
        "rounds": options.rounds,
        **{f"{kind}_p50_seconds": round(medians[kind], 4) for kind in KINDS},
        **{f"{kind}_p90_seconds": round(statistics.quantiles(seconds[kind], n=10)[-1], 4) for kind in KINDS},
        "star_times_gloo": round(medians["star"] / medians["gloo"], 2),
        "star_tls_times_gloo": round(medians["star_tls"] / medians["gloo"], 2),
        "star_tls_times_star": round(medians["star_tls"] / medians["star"], 2),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    line = json.dumps(result)
    print(line)
    if options.out:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / options.out).write_text(line + "\n")


if __name__ == "__main__":
    main()

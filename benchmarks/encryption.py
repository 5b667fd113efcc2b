"""Measure what encryption between hosts costs: the mesh of TLS connections against gloo in clear, and against
parameter-server mode with TLS.

Run `python -m benchmarks.encryption` as root. Hosts are network namespaces of this machine, joined by a bridge, with
one rank on each; a link is unlimited, or held to 1 Gbit/s. All three ways are set up in the same processes and used
alternately, in an order that changes from round to round, so that other work on the machine disturbs them alike. After
a barrier, a sum lasts from when the first rank begins to when the last one has the result, which is checked. All ranks
share this machine's cores, which encrypt for both ends of every link: on an unlimited link the cores are the limit, and
hosts of their own are faster. Beside other work the ways suffer unequally, because encryption needs more of the cores:
``autogroup_nice`` says how this session was preferred to others (0: not), and ``load`` what else there was.

    p50_seconds           medians over rounds, by way; best_seconds: the shortest
    mesh_times_gloo       ratio of the medians; mesh_times_gloo_best: of the shortest; star_tls_times_gloo likewise
    forming_seconds       from the first connection of the mesh to the last, at the rank that took longest
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "faults"))

import switch  # noqa: E402

from benchmarks.checkpoint import RESULTS, _cpu  # noqa: E402
from benchmarks.namespaces import Hosts  # noqa: E402
from trainer.comm.launch_certificate import LaunchCertificate  # noqa: E402
from trainer.comm.launch_secret import LaunchSecret  # noqa: E402
from trainer.comm.parameter_server import ParameterServerGroup  # noqa: E402
from trainer.comm.rendezvous_store import AuthenticatedStore  # noqa: E402
from trainer.comm.socket_group import MeshGroup, connect_mesh  # noqa: E402
from trainer.comm.static_rendezvous import open_listener  # noqa: E402
from trainer.comm.torch_transport import Transport, make_torch_transport  # noqa: E402

KINDS = ("gloo", "mesh", "star_tls")
"""Ways to sum; these names are keys of the saved results."""
ROUNDS = {1_000: 100, 1_000_000: 40, 50_000_000: 10}
"""Bytes of a tensor → sums of each kind."""
SECONDS, WARM_UP = 300.0, 3
SECRET, KEY = LaunchSecret(b"benchmark" * 4), b"benchmark"


def be(pipe: Connection, namespace: str, host: str, rank: int, size: int, rounds: dict[int, int]) -> None:
    """Run one rank: it sends where it listens, then the times of its sums by the machine's clock (s)."""
    switch.enter(namespace)
    torch.set_num_threads(1)
    listeners = {kind: open_listener(host) for kind in KINDS}
    pipe.send({kind: listener.getsockname()[:2] for kind, listener in listeners.items()})
    places: list[dict[str, tuple[str, int]]] = pipe.recv()
    began = time.monotonic()
    contexts = LaunchCertificate(SECRET, "benchmark")
    links = connect_mesh([one["mesh"] for one in places], rank, listeners["mesh"], KEY, SECONDS, contexts)
    forming = time.monotonic() - began
    first = {kind: places[0][kind] for kind in KINDS}
    store = AuthenticatedStore(first["gloo"], rank, size, KEY, SECONDS, listeners["gloo"] if rank == 0 else None)
    if rank == 0:
        star = ParameterServerGroup.serve(listeners["star_tls"], size, KEY, SECONDS, contexts)
    else:
        star = ParameterServerGroup.connect_worker(first["star_tls"], rank, size, KEY, SECONDS, contexts)
    transports: dict[str, Transport] = {
        "mesh": MeshGroup(rank, links, SECONDS),
        "gloo": make_torch_transport(store, rank, size, None, SECONDS, SECONDS, host, key=KEY),
        "star_tls": star,
    }
    pipe.send(forming)
    while (order := pipe.recv()) is not None:
        pipe.send(in_turns(transports, rank, size, order, rounds[order]))


def in_turns(
    transports: dict[str, Transport], rank: int, size: int, bytes_: int, rounds: int
) -> list[tuple[str, float, float]]:
    """Return kind, begin and end of each sum of this rank."""
    order, times = random.Random(bytes_), list[tuple[str, float, float]]()
    for number in range(WARM_UP + rounds):
        for kind in order.sample(KINDS, len(KINDS)):
            tensor = torch.full((bytes_ // 4,), rank + 1.0)
            transports[kind].barrier(SECONDS)
            began = time.monotonic()
            transports[kind].all_reduce(tensor)
            ended = time.monotonic()
            assert (tensor == size * (size + 1) / 2).all(), kind
            if number >= WARM_UP:
                times.append((kind, began, ended))
    return times


def measure(size: int, rates: Sequence[str], rounds: dict[int, int]) -> list[dict[str, Any]]:
    """Return a row for each rate and number of bytes, on ``size`` hosts."""
    context, rows = multiprocessing.get_context("spawn"), []
    with Hosts(size) as hosts:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, hosts.paths[rank], hosts.address(rank), rank, size, rounds)
            processes.append(context.Process(target=be, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        places = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(places)
        forming = max(pipe.recv() for pipe in pipes)
        for rate in rates:  # the unlimited one first: a limit stays
            if rate != "unlimited":
                hosts.limit(rate)
            for bytes_ in rounds:
                print(f"{size} hosts, {rate}, {bytes_} bytes", file=sys.stderr, flush=True)
                load = os.getloadavg()[0]
                for pipe in pipes:
                    pipe.send(bytes_)
                figures = figures_of([pipe.recv() for pipe in pipes])
                rows.append({"hosts": size, "rate": rate, "bytes": bytes_, **figures, "load": round(load, 2)})
                rows[-1]["forming_seconds"] = round(forming, 4)
                print(rows[-1], file=sys.stderr, flush=True)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(30)
    return rows


def figures_of(by_rank: Sequence[Sequence[tuple[str, float, float]]]) -> dict[str, Any]:
    """Return the figures of a row from the times of all ranks. Pure."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for ranks in zip(*by_rank, strict=True):
        seconds[ranks[0][0]].append(max(ended for *_, ended in ranks) - min(began for _, began, _ in ranks))
    p50 = {kind: statistics.median(values) for kind, values in seconds.items()}
    best = {kind: min(values) for kind, values in seconds.items()}
    return {
        "rounds": len(seconds["gloo"]),
        "p50_seconds": {kind: round(value, 6) for kind, value in p50.items()},
        "best_seconds": {kind: round(value, 6) for kind, value in best.items()},
        "mesh_times_gloo": round(p50["mesh"] / p50["gloo"], 3),
        "mesh_times_gloo_best": round(best["mesh"] / best["gloo"], 3),
        "star_tls_times_gloo": round(p50["star_tls"] / p50["gloo"], 3),
    }


def autogroup_nice() -> int | None:
    """Return the priority of this session against others of the machine (Linux), None if the kernel groups none."""
    try:
        return int(Path("/proc/self/autogroup").read_text().split()[-1])
    except (OSError, ValueError):
        return None


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.encryption", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3], help="numbers of hosts (2 3)")
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit"], help="rates of links (unlimited 1gbit)")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument(
        "--out", nargs="?", const="encryption.json", help="also write the line to benchmarks/results/OUT"
    )
    options = parser.parse_args(arguments)
    rounds = {bytes_: ROUNDS[bytes_] for bytes_ in options.bytes}
    load_before = os.getloadavg()[0]
    rows = [row for size in options.hosts for row in measure(size, sorted(options.rates, reverse=True), rounds)]
    result = {
        "benchmark": "encryption",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "torch": torch.__version__,
        "autogroup_nice": autogroup_nice(),
        "rows": rows,
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

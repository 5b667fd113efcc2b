"""`HorovodSynchronizer`: the buckets of `trainer.parallel.synchronizer`, summed by Horovod.

Horovod is given each bucket as soon as it is full, and sums on a thread of its own; the communication thread of the
world waits for it, so that a sum has its times, and its wait can be interrupted, as any other collective. All else that
ranks exchange goes over the world itself.

Horovod's own world is formed among the ranks of a `trainer.comm.world.World`, and anew for each generation. Horovod
reads its ranks from variables and finds its peers through a small web server, which rank 0 runs here while the world
forms. Neither that server nor Horovod's connections are encrypted or authenticated.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.group import CollectiveResult, CompletedCollective, GroupError, InterruptibleGroup, shorten_error
from trainer.comm.horovod import horovod_variables, serve_rendezvous
from trainer.comm.own_address import interface_of, is_loopback, own_address
from trainer.comm.torch_transport import Transport
from trainer.comm.world import World
from trainer.errors import NoGenerationError
from trainer.parallel.buckets import Bucket
from trainer.parallel.synchronizer import GradientSynchronizer

MOST_SECONDS = 10
"""The most seconds that Horovod waits for a message of a peer. Its threads exchange some in each millisecond, whatever
the ranks do; a survivor that waits for another one, and not for the rank that is lost, notices the loss by this alone.
Also at most half of ``training.collective_timeout_seconds``, so that its world has ended before others give up."""
_log = logging.getLogger(__name__)
_FORMING = threading.Lock()
"""Held while Horovod starts or ends: a thread that was left behind may still be in there."""
_OURS = False
"""Whether this process's Horovod was started here, and not by the caller's script."""
_SPOILT = False
"""Whether a start has failed: Horovod remembers that, and no later one in this process would succeed."""


class HorovodSynchronizer(GradientSynchronizer):
    """The sums of gradients over the ranks of one world, by Horovod. In parameter-server mode, and on one rank, Horovod
    is left out."""

    def wrap(self, module: nn.Module) -> None:
        """Sum the gradients of each later backward pass over ranks, after Horovod's world has formed."""
        if self.world.group is not None and self.world.topology != "star":
            form_horovod(self.world, min(MOST_SECONDS, math.ceil(self.config.collective_timeout_seconds / 2)))
        else:
            leave_horovod()
        super().wrap(module)

    def submit_sum(self, bucket: Bucket, group: InterruptibleGroup, what: str) -> CollectiveResult:
        """Have Horovod sum a bucket, and the communication thread wait for it."""
        import horovod.torch as hvd

        gradients = bucket.buffer
        kind = hvd.Compression.fp16 if self.config.communication == "fp16" else hvd.Compression.none
        sent, context = kind.compress(gradients)
        if sent.is_cuda and not hvd.nccl_built():
            sent = sent.cpu()
        try:
            handle = hvd.allreduce_async_(sent, name=f"gradients.{bucket.number}", op=hvd.Sum)
        except Exception as error:  # its world has ended, as where a peer is lost
            group.fail(shorten_error(error))
            return CompletedCollective(error=group.error)
        done = partial(_wait, hvd, handle, lambda summed: kind.decompress(summed, context), gradients)
        return group.submit(what, done, sent.nbytes)


def _wait(hvd: Any, handle: int, decompress: Any, gradients: Tensor, _: Transport) -> None:
    summed = hvd.synchronize(handle)
    if summed.data_ptr() != gradients.data_ptr():
        with torch.no_grad():
            gradients.copy_(decompress(summed))


def form_horovod(world: World, timeout: float) -> None:
    """Start Horovod with the ranks of this world, which has several; a Horovod of an earlier world ends. One that the
    caller's script has started with the same ranks is kept. A collective. ``timeout``: the seconds that one of
    Horovod's operations may wait for a peer.

    Raise `trainer.comm.group.GroupError` where that fails, and `NoGenerationError` where it failed within Horovod: then
    this process must leave, since Horovod never starts again in it.
    """
    import horovod.torch as hvd

    group = world.group
    assert group is not None
    is_mine = bool(hvd.is_initialized()) and not _OURS
    fits = is_mine and (hvd.rank(), hvd.size()) == (world.rank, world.world_size)
    server, host, port = None, own_address(os.environ), 0
    if world.rank == 0:
        server = serve_rendezvous(host)
        port = int(server.server_address[1])
    try:
        found: list[Any] = world.all_gather_object([fits, world.node_rank, host, port])
        if all(fits for fits, *_ in found):
            return
        _, _, first, port = found[0]
        if world.rank == 0 and not is_loopback(first):
            _log.warning("Horovod's connections are neither encrypted nor authenticated: use a private network")
        nodes, name = [node for _, node, *_ in found], f"g{world.generation}-"
        variables = horovod_variables(world.rank, nodes, (first, port), interface_of(host), name)
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(max(1, round(timeout)))
        try:
            group.run("forming Horovod's world", lambda _: _start(hvd, variables))
        except GroupError as error:
            if _SPOILT:
                raise NoGenerationError(
                    f"Horovod did not start, and cannot do so again in this process: {error}"
                ) from error
            raise
        world.all_gather_object(world.rank)  # until then others may need the server
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def leave_horovod() -> None:
    """End the Horovod that `form_horovod` has started, if there is one. Waits until it has ended."""
    global _OURS
    with _FORMING:
        if _OURS:
            import horovod.torch as hvd

            hvd.shutdown()
            _OURS = False


def _start(hvd: Any, variables: dict[str, str]) -> None:
    global _OURS, _SPOILT
    with _FORMING:
        hvd.shutdown()
        os.environ.update(variables)
        _SPOILT = True  # until it has started
        hvd.init()
        _OURS, _SPOILT = True, False

"""`HorovodSynchronizer`: the buckets of `trainer.parallel.synchronizer`, summed by Horovod.

Horovod is given each bucket as soon as it is full, and sums on a thread of its own; the communication thread of the
world waits for it, so that a sum has its times, and its wait can be interrupted, as any other collective. All else that
ranks exchange goes over the world itself.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.group import CollectiveResult, CompletedCollective, InterruptibleGroup, shorten_error
from trainer.comm.torch_transport import Transport
from trainer.parallel.buckets import Bucket
from trainer.parallel.horovod_world import form_horovod, leave_horovod
from trainer.parallel.synchronizer import GradientSynchronizer

MOST_SECONDS = 10
"""The most seconds that Horovod waits for a message of a peer. Its threads exchange some in each millisecond, whatever
the ranks do; a survivor that waits for another one, and not for the rank that is lost, notices the loss by this alone.
Also at most half of ``training.collective_timeout_seconds``, so that its world has ended before others give up."""


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

        gradients = bucket.buffer()
        kind = hvd.Compression.fp16 if self.config.communication == "fp16" else hvd.Compression.none
        sent, context = kind.compress(gradients)
        if sent.is_cuda and not hvd.nccl_built():
            sent = sent.cpu()
        try:
            handle = hvd.allreduce_async_(sent, name=f"gradients.{bucket.index()}", op=hvd.Sum)
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

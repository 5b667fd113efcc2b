"""A state that is passed from one rank to others: in pieces, to those that need it, and tensor by tensor.

No piece is larger than `PIECE_BYTES`, so that each fits into the timeout of an operation however large the state is.
The sender copies no tensor as a whole, and a receiver holds each once.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.comm.group import GroupError
from trainer.comm.torch_transport import Transport
from trainer.comm.world import World

PIECE_BYTES = 64 << 20
"""At 100 Mbit/s, a piece takes 5 s."""
Move = Callable[[Tensor], None]


def pass_state(
    world: World, source: int, takers: Collection[int], capture: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return at each of the ranks ``takers`` the state that ``capture`` returns at rank ``source``: tensors, on the
    CPU, and plain values, in dictionaries, lists and tuples. Return None at all other ranks. A collective of all ranks;
    those that need no state wait as long as for work that some do alone."""
    takers = sorted(set(takers) - {source})
    if world.group is None or not takers:
        return None
    outline, tensors = take_apart(capture()) if world.rank == source else (b"", [])
    [size, *_] = world.all_gather_object([len(outline)])[source]
    group = world.group

    def carry_out(transport: Transport) -> dict[str, Any] | None:
        move = _mover(transport, world.rank, source, takers, world.world_size)
        if move is None:
            return None

        def step(piece: Tensor) -> None:
            if group.error is not None:  # this thread was left behind, and the tensors change
                raise GroupError(str(group.error), communication=False)
            move(piece)

        head = torch.frombuffer(bytearray(outline or size), dtype=torch.uint8)
        step(head)
        if world.rank == source:
            _move_all(tensors, step)
            return None
        state, coming = put_together(head.numpy().tobytes(), is_kept=world.rank in takers)
        _move_all(coming, step, is_coming=True)
        return state if world.rank in takers else None

    # One action on all ranks, so that collectives are counted alike.
    state: dict[str, Any] | None = group.run("the state for newcomers", carry_out)
    world.barrier()  # which has the patience for what others still get
    return state


def _mover(transport: Transport, rank: int, source: int, takers: list[int], ranks: int) -> Move | None:
    """Return what moves a piece, sent or received in place; None where this rank has no part in it. Few receive it one
    after the other; a broadcast reaches many in the time of as many as the logarithm of all ranks, and all of them."""
    send, receive = getattr(transport, "send", None), getattr(transport, "receive", None)
    if send is None or receive is None or len(takers) > max(1, ranks.bit_length() - 1):
        return lambda piece: transport.broadcast(piece, source)

    def send_each(piece: Tensor) -> None:
        for taker in takers:
            send(piece, taker)

    if rank == source:
        return send_each
    return (lambda piece: receive(piece, source)) if rank in takers else None


def take_apart(state: Any) -> tuple[bytes, list[Tensor]]:
    """Return a state without the content of its tensors, as bytes, and the tensors, in order."""
    tensors: list[Tensor] = []

    def outline(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.detach().cpu()  # it is a part of the outline, whole
        tensor = tensor.detach().resolve_conj().resolve_neg()
        tensors.append(tensor if _is_dense(tensor) else tensor.contiguous())
        return torch.empty_strided(tensors[-1].shape, tensors[-1].stride(), dtype=tensor.dtype, device="meta")

    buffer = io.BytesIO()
    torch.save(_mapped(state, outline), buffer)
    return buffer.getvalue(), tensors


def put_together(outline: bytes, is_kept: bool = True) -> tuple[Any, list[Tensor]]:
    """Return a state whose tensors have no content yet, and the tensors, as `take_apart` has listed them; they have no
    memory either unless ``is_kept``."""
    tensors: list[Tensor] = []

    def made(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:  # it is whole, as a part of the outline
            return tensor
        device = "cpu" if is_kept else "meta"
        tensors.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device))
        return tensors[-1]

    return _mapped(torch.load(io.BytesIO(outline), weights_only=True), made), tensors


def _move_all(tensors: list[Tensor], move: Move, is_coming: bool = False) -> None:
    """Move the content of these tensors in pieces, into them if it ``is_coming``."""
    buffer = torch.empty(min(sum(tensor.nbytes for tensor in tensors), PIECE_BYTES), dtype=torch.uint8)
    for parts in _pieces(tensors):
        places = buffer.split([*map(len, parts), len(buffer) - sum(map(len, parts))])
        if not is_coming:
            for place, part in zip(places, parts, strict=False):
                place.copy_(part)
        move(buffer[: sum(map(len, parts))])
        if is_coming and not parts[0].is_meta:
            for place, part in zip(places, parts, strict=False):
                part.copy_(place)


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bytes of these tensors, as they lie in memory, in lists of `PIECE_BYTES` together."""
    parts, room = list[Tensor](), PIECE_BYTES
    for tensor in filter(torch.numel, tensors):
        left = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
        while len(left):
            parts.append(left[:room])
            left, room = left[room:], room - len(parts[-1])
            if not room:
                yield parts
                parts, room = [], PIECE_BYTES
    if parts:
        yield parts


def _mapped(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # a state dict has metadata beside its items
        for key, part in value.items():  # not `update`, which adds to a Counter, such as the milestones of MultiStepLR
            made[key] = _mapped(part, make)
        return made
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, make) for part in value)
    return value


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor lie in memory one after the other, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True

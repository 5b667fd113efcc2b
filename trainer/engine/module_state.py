"""What a model holds beside its parameters: buffers, and the extra state of its modules.

While ranks train, each has its own: running statistics, counters, caches that grow with what the rank has seen.
Copying it, putting it back, and giving all ranks that of one belongs here; so does loading a whole state dict into a
model whose buffers have grown since it was made.
"""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.world import World
from trainer.config import ConfigError
from trainer.engine.state_passing import pass_state

_EXTRA = "_extra_state"
"""The end of the key that a module's extra state has in a state dict."""
Values = dict[str, dict[str, Any]]
"""The buffers and the extra state of modules, by the module's name and their own."""


def read_module_state(modules: Mapping[str, nn.Module]) -> Values:
    """Return copies of the buffers and the extra states of these modules, which are given by their names."""
    found: Values = {}
    for prefix, module in modules.items():
        held: dict[str, Any] = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
        if _has_extra(module):
            held[_EXTRA] = copy.deepcopy(module.get_extra_state())
        found[prefix] = held
    return found


def put_module_state(modules: Mapping[str, nn.Module], values: Values) -> None:
    """Let these modules hold the values that `read_module_state` has returned, here or on another rank."""
    with torch.no_grad():
        for prefix, module in modules.items():
            held = values.get(prefix, {})
            present = dict(module.named_buffers(recurse=False))
            for name in [*present, *(name for name in held if name not in present and name != _EXTRA)]:
                _put(module, name, held.get(name))
            if _EXTRA in held:
                module.set_extra_state(held[_EXTRA])


def share_module_state(module: nn.Module, world: World, source: int) -> None:
    """Let all ranks hold the buffers and extra states of rank ``source``. A collective."""
    modules = dict(module.named_modules())
    # As bytes: gloo and NCCL know neither all types of tensors nor tensors of other shapes than their own.
    values = pass_state(world, source, range(world.world_size), lambda: read_module_state(modules))
    if values is not None:
        put_module_state(modules, values)


def holds_module_state(module: nn.Module) -> bool:
    """Return whether a module itself has buffers, set or not, or extra state."""
    return bool(module._buffers) or _has_extra(module)


def copy_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a copy of a module's state dict, on the CPU."""
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in module.state_dict().items()
    }


def take_buffers(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Let the buffers of a module hold those of these values, by their full names, that are theirs."""
    with torch.no_grad():
        for prefix, part in module.named_modules():
            for name, _ in list(part.named_buffers(recurse=False)):
                if (whole := f"{prefix}.{name}" if prefix else name) in values:
                    _put(part, name, values[whole])


def load_state_dict(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Let a module hold a state dict, whose buffers may have other shapes than its own, or be set where its own are
    not."""
    own = module.state_dict()
    with torch.no_grad():
        for name in {**own, **state}:
            prefix, _, leaf = name.rpartition(".")
            try:
                part = module.get_submodule(prefix)
            except AttributeError:
                continue  # which `load_state_dict` will say
            held: Any = getattr(part, leaf, _NOTHING)
            saved = state.get(name)
            if isinstance(held, nn.Parameter) or held is _NOTHING:
                continue
            if isinstance(saved, Tensor) and (held is None or not _fits(held, saved)):
                device = next((each.device for each in module.parameters()), saved.device)
                setattr(part, leaf, torch.empty_like(saved, device=device))
            elif saved is None and isinstance(held, Tensor):
                setattr(part, leaf, None)
    module.load_state_dict(dict(state))


_NOTHING = object()


def buffer_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the shape of each buffer, by its name."""
    return {name: list(buffer.shape) for name, buffer in module.named_buffers()}


def is_extra(name: str) -> bool:
    """Return whether this key of a state dict is that of extra state."""
    return name.rpartition(".")[2] == _EXTRA


def refuse_extra_state(module: nn.Module, strategy: str) -> None:
    """Raise `ConfigError` for extra state that a checkpoint could not keep: it is loaded with ``weights_only=True``,
    and where ranks divide a model among them, it holds tensors only."""
    for name, part in module.named_modules():
        if not _has_extra(part):
            continue
        what = f"the extra state of {name or 'the model'} ({type(part).__name__}.get_extra_state)"
        if strategy not in ("ddp", "horovod"):
            raise ConfigError(f"{what} is not kept by training.strategy = {strategy!r}: set it to 'ddp'")
        try:
            torch.load(io.BytesIO(_pickled(part.get_extra_state())), weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"{what} cannot be kept in a checkpoint, which holds tensors and plain values only: return a tensor or "
                f"a dictionary of numbers and texts ({str(error).splitlines()[0]})"
            ) from None


def digest_state_dict(state: Mapping[str, Any]) -> str:
    """Return the sha256 of the names, shapes and bytes of a state dict, in its order."""
    result = hashlib.sha256()
    for name, value in state.items():
        result.update(name.encode())
        _update(result, value)
    return result.hexdigest()


def _update(result: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        result.update(f"{tuple(flat.shape)}{flat.dtype}".encode())
        result.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            result.update(str(key).encode())
            _update(result, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            _update(result, each)
    else:
        result.update(repr(value).encode())


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _fits(buffer: Tensor, value: Tensor) -> bool:
    """Return whether a buffer can take a value in its place; an expanded one, whose elements share memory, cannot."""
    is_apart = buffer.numel() < 2 or 0 not in [
        step for step, size in zip(buffer.stride(), buffer.shape, strict=True) if size > 1
    ]
    return buffer.shape == value.shape and buffer.dtype == value.dtype and is_apart


def _put(module: nn.Module, name: str, value: Tensor | None) -> None:
    buffer = getattr(module, name)
    if buffer is not None and value is not None and _fits(buffer, value):
        buffer.copy_(value)  # where it lies: others may have views of it
    else:
        like = next(module.parameters(), buffer) if buffer is None else buffer
        setattr(module, name, value if value is None or like is None else value.to(like.device))


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()

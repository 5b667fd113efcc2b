"""What a model holds beside its parameters: buffers, and the extra state of its modules.

While ranks train, each has its own: running statistics, counters, caches that grow with what the rank has seen.
Copying it, putting it back, and giving all ranks that of one belongs here; so does loading a whole state dict into a
model whose buffers have grown since it was made.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.state_passing import pass_state
from trainer.comm.world import World
from trainer.config import ConfigError
from trainer.runtime.nested import find_odd_part

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
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
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
    """Let a module hold a state dict, whose buffers may have other forms than its own, or be set where its own are
    not."""
    modules, device = dict(module.named_modules()), next((each.device for each in module.parameters()), None)
    with torch.no_grad():
        for name in {**module.state_dict(), **state}:
            prefix, _, leaf = name.rpartition(".")
            part = modules.get(prefix)
            held: Any = getattr(part, leaf, _NOTHING)
            saved = state.get(name)
            if part is None or isinstance(held, nn.Parameter) or is_extra(name):
                continue  # what does not fit, `load_state_dict` says
            if isinstance(saved, Tensor) and not (isinstance(held, Tensor) and _fits(held, saved)):
                fresh = saved.to(device, copy=True)
                if held is _NOTHING:  # it is registered in a forward pass
                    part.register_buffer(leaf, fresh)
                else:
                    setattr(part, leaf, fresh)
            elif saved is None and isinstance(held, Tensor):
                setattr(part, leaf, None)
    module.load_state_dict(dict(state))


_NOTHING = object()


def buffer_forms(module: nn.Module) -> dict[str, list[str]]:
    """Return shape and type of each buffer, by its names."""
    return {name: form_of(buffer) for name, buffer in module.named_buffers(remove_duplicate=False)}


def form_of(tensor: Tensor) -> list[str]:
    """Return shape and type of a tensor."""
    return [str(tuple(tensor.shape)), str(tensor.dtype)]


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
        require_plain_state({f"{name}.{_EXTRA}": part.get_extra_state()})


def require_plain_state(state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for extra state in a state dict that a checkpoint could not keep."""
    for name, value in state.items():
        if is_extra(name) and (odd := find_odd_part(value)) is not None:
            raise ConfigError(
                f"the extra state of {name.rpartition('.')[0] or 'the model'} (get_extra_state) has a "
                f"{type(odd).__name__}, and a checkpoint holds tensors and plain values only: return tensors, "
                "numbers and strings, in dictionaries, lists and tuples"
            )


def digest_state_dict(state: Mapping[str, Any]) -> str:
    """Return the sha256 of the names, shapes and bytes of a state dict, in its order."""
    result = hashlib.sha256()
    for name, value in state.items():
        result.update(name.encode())
        _update(result, value)
    return result.hexdigest()


def _update(result: Any, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        result.update(f"{tuple(value.shape)}{value.layout}".encode())
        for part in _parts_of_sparse(value.detach().cpu()):
            _update(result, part)
    elif isinstance(value, Tensor):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        result.update(f"{tuple(flat.shape)}{flat.dtype}".encode())
        if flat.is_quantized:
            flat = flat.int_repr()
        result.update(flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            result.update(str(key).encode())
            _update(result, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            _update(result, each)
    else:
        result.update(repr(value).encode())


def _parts_of_sparse(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _fits(buffer: Tensor, value: Tensor) -> bool:
    """Return whether a buffer can take a value in its place; an expanded one, whose elements share memory, cannot."""
    if buffer.layout is not torch.strided or value.layout is not torch.strided or buffer.is_quantized:
        return False
    is_apart = buffer.numel() < 2 or 0 not in [
        step for step, size in zip(buffer.stride(), buffer.shape, strict=True) if size > 1
    ]
    return buffer.shape == value.shape and buffer.dtype == value.dtype and is_apart


def _put(module: nn.Module, name: str, value: Tensor | None) -> None:
    buffer: Any = getattr(module, name, _NOTHING)
    if buffer is _NOTHING:  # it is registered in a forward pass, which this rank has yet to make
        return
    if buffer is not None and value is not None and _fits(buffer, value):
        buffer.copy_(value)  # where it lies: others may have views of it
    else:
        like = next(module.parameters(), buffer) if buffer is None else buffer
        setattr(module, name, value if value is None or like is None else value.to(like.device))

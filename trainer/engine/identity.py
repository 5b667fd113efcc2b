"""What a checkpoint belongs to, and what its best score was measured with, as documents that can be compared.

`describe_structure` and `describe_loss` give what must stay the same: a checkpoint of something else is refused, by the
name of what differs. `digest_measure` gives what scores depend on besides: the code of model and loss, values that they
hold, the validation samples. Where that has changed, training goes on and the best score begins anew. Code of the
model that is no module's structure, such as a function called in ``forward``, is only a part of the second.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from itertools import islice
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.data.dataset_data import digest_array
from trainer.model.task import SupervisedTask

_OF_A_PROCESS = re.compile(r"0x[0-9a-f]+|\(GPU \d+\)|cuda(:\d+)?")
"""Parts of a description that are of this process: addresses, and its device."""
_MOST_CHARACTERS = 1 << 18
"""The longest structure that is kept as text; of a longer one the digest is."""
_DEEPEST, _MOST_VALUES = 4, 1000
"""Where what an object holds is no longer looked at: depth, and values of one list."""
Plain = bool | int | float | str | None


def describe_structure(module: nn.Module) -> dict[str, str]:
    """Return the class of each module of a model, and the arguments that it shows (``extra_repr``), by its name."""
    found = {name or "(model)": _show(part) for name, part in module.named_modules()}
    if sum(map(len, found.values())) > _MOST_CHARACTERS:
        return {"sha256": digest(found)}
    return found


def describe_loss(task: Any) -> dict[str, Any]:
    """Return the arguments that a loss was made with, of torch's own losses and of a `functools.partial`."""
    loss = task.given if isinstance(task, SupervisedTask) else task
    if isinstance(loss, functools.partial):
        arguments = dict(zip(map(str, range(len(loss.args))), loss.args, strict=True)) | loss.keywords
        function = getattr(loss.func, "__qualname__", type(loss.func).__qualname__)
        return {"function": function, "arguments": {name: _value(each) for name, each in arguments.items()}}
    return {"arguments": _values(loss)} if isinstance(loss, nn.Module) and _is_torchs(loss) else {}


def digest_measure(module: nn.Module, task: Any, valid: str) -> dict[str, str]:
    """Return digests of what a validation loss depends on beside data, structure and arguments. ``valid``: the name of
    the validation samples."""
    own = {name: part for name, part in module.named_modules() if not _is_torchs(part)}
    kinds = {kind for part in own.values() for kind in type(part).__mro__}
    held = {name: {**_attributes(part), **_buffers(part)} for name, part in own.items()}
    loss = task.criterion if isinstance(task, SupervisedTask) else task
    return {
        "the model's code": digest({kind.__qualname__: _code_of(kind) for kind in kinds}),
        "a value that the model holds": digest(held),
        "the loss": digest(_contents(loss)),
        "the validation samples": valid,
    }


def digest(value: Any) -> str:
    """Return sixteen hex digits over a value of JSON's types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _is_torchs(part: Any) -> bool:
    return type(part).__module__.startswith("torch.")


def _show(module: nn.Module) -> str:
    try:
        shown = module.extra_repr()
    except Exception:  # a caller's own, which may need what is not there yet
        shown = ""
    return f"{type(module).__qualname__}({_OF_A_PROCESS.sub('', shown)})"


def _contents(loss: Any, depth: int = 0) -> Any:
    """Return the code of a function or an object, and the values that it holds."""
    if isinstance(loss, functools.partial):
        held = {"args": loss.args, **loss.keywords}
        return [_contents(loss.func, depth + 1), {name: _value(each, depth) for name, each in held.items()}]
    if inspect.ismethod(loss):
        return [_contents(loss.__func__, depth + 1), _value(loss.__self__, depth)]
    if inspect.isfunction(loss):
        held = {"defaults": loss.__defaults__, "named": loss.__kwdefaults__, **inspect.getclosurevars(loss).nonlocals}
        return [_code_of(loss), {name: _value(each, depth) for name, each in held.items()}]
    if isinstance(loss, type) or inspect.isbuiltin(loss):
        return _code_of(loss)
    return [[_code_of(kind) for kind in type(loss).__mro__], _values(loss, depth)]


def _values(part: Any, depth: int = 0) -> dict[str, Any]:
    """Return the public attributes of an object, and of a module without parameters to train its tensors and modules;
    weights to train are no arguments."""
    found = _attributes(part, depth)
    if isinstance(part, nn.Module) and not any(each.requires_grad for each in part.parameters()):
        tensors = dict(part.named_parameters(recurse=False)) | dict(part.named_children())
        found |= _buffers(part) | {name: _value(each, depth) for name, each in tensors.items()}
    return found


def _attributes(part: Any, depth: int = 0) -> dict[str, Any]:
    held = {name: each for name, each in getattr(part, "__dict__", {}).items() if not name.startswith("_")}
    held.pop("training", None)  # of a module: which mode it is in
    return {name: _value(each, depth) for name, each in held.items()}


def _buffers(module: nn.Module) -> dict[str, Any]:
    return {name: _value(each) for name, each in module.named_buffers(recurse=False)}


def _value(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Plain):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return digest_array(value)
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(name): _value(each, depth + 1) for name, each in islice(value.items(), _MOST_VALUES)}
    if isinstance(value, list | tuple):
        return [_value(each, depth + 1) for each in value[:_MOST_VALUES]]
    if callable(value) and not isinstance(value, nn.Module):
        return _contents(value, depth + 1)
    if not hasattr(value, "__dict__"):
        return _OF_A_PROCESS.sub("", repr(value))
    return [type(value).__qualname__, _values(value, depth + 1)]


def _code_of(part: Any) -> str:
    """Return a digest of the source of a class or a function of the user's own, without comments and layout; of an
    installed package's, and where there is no source, its name."""
    own, code = getattr(part, "__qualname__", type(part).__qualname__), getattr(part, "__code__", None)
    name = f"{getattr(part, '__module__', '')}.{own}"
    if code is not None and code.co_name == "<lambda>":  # whose source is the whole statement that it stands in
        return _digest_code(code)
    try:
        if "site-packages" in (inspect.getsourcefile(part) or ""):
            return name
        source = ast.dump(ast.parse(textwrap.dedent(inspect.getsource(part))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return name if code is None else _digest_code(code)
    return digest(source)


def _digest_code(code: CodeType) -> str:
    inner = [_digest_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return digest([code.co_code.hex(), inner, code.co_names, code.co_varnames])

"""What a checkpoint belongs to, and what its best score was measured with, as documents that can be compared.

`describe_structure` and `describe_loss` give what must stay the same: a checkpoint of something else is refused, by the
name of what differs. `digest_measure` gives what scores depend on besides: the code of model and loss, values that they
were made with, the validation samples. Where that has changed, training goes on and the best score begins anew.

Values that an object's own methods set later, such as counters, are its state and not what it was made with. Code of
installed packages, hooks, and what functions call beyond a few levels are not looked at.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Set
from itertools import islice
from types import CodeType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.data.dataset_data import digest_array
from trainer.model.task import SupervisedTask

_OF_A_PROCESS = re.compile(r"0x[0-9a-f]+|\(GPU \d+\)|\bcuda(:\d+)?|\bcpu\b")
"""Parts of a description that are of this process: addresses, and its device."""
_MOST_CHARACTERS = 1 << 18
"""The longest structure that is kept as text; of a longer one the digest is."""
_DEEPEST, _MOST_VALUES = 4, 1000
"""Where what an object holds is no longer looked at: depth, and values of one list."""
_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}
"""Attributes by which torch keeps a module's parts and hooks, and which mode it is in."""
Plain = bool | int | float | str | None


def describe_structure(module: nn.Module) -> dict[str, str]:
    """Return the class of each module of a model by its name, and of torch's modules their arguments."""
    found = {name or "(model)": _show(part) for name, part in module.named_modules()}
    if sum(map(len, found.values())) > _MOST_CHARACTERS:
        return {"sha256": digest(found)}
    return found


def describe_weights(module: nn.Module) -> dict[str, str]:
    """Return the shape of each parameter by its name, and whether it is frozen."""
    return {
        name: f"{tuple(parameter.shape)}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in module.named_parameters()
    }


def describe_loss(task: Any) -> dict[str, Any]:
    """Return the arguments that a loss was made with, of torch's own losses and of a `functools.partial`."""
    loss = task.given if isinstance(task, SupervisedTask) else task
    if isinstance(loss, functools.partial):
        arguments = dict(zip(map(str, range(len(loss.args))), loss.args, strict=True)) | loss.keywords
        function = getattr(loss.func, "__qualname__", type(loss.func).__qualname__)
        return {"function": function, "arguments": {name: _value(each) for name, each in arguments.items()}}
    return {"arguments": _values(loss)} if isinstance(loss, nn.Module) and _is_torchs(type(loss)) else {}


def digest_measure(module: nn.Module, task: Any, valid: str, collate: Callable[..., Any] | None) -> dict[str, str]:
    """Return digests of what a validation loss depends on beside data, structure and arguments. ``valid``: the name of
    the validation samples; ``collate``: what makes batches of them, None for the usual way."""
    own = {name: part for name, part in module.named_modules() if not _is_torchs(type(part))}
    kinds = {kind for part in own.values() for kind in type(part).__mro__}
    held = {name: _made_with(part, with_tensors=False) for name, part in own.items()}
    patched = {name: _patches(part) for name, part in module.named_modules()}
    loss = task.criterion if isinstance(task, SupervisedTask) else task
    return {
        "the model's code": digest([{kind.__qualname__: _class(kind) for kind in kinds}, patched]),
        "a value that the model holds": digest(held),
        "the loss": digest(_contents(loss)),
        "the validation samples": digest([valid, None if collate is None else _contents(collate)]),
    }


def digest(value: Any) -> str:
    """Return sixteen hex digits over a value of JSON's types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _show(module: nn.Module) -> str:
    name = type(module).__qualname__
    if not _is_torchs(type(module)):  # what its author shows may be a weight
        return name
    plain = {key: each for key, each in vars(module).items() if key not in _OF_MODULES and not key.startswith("_")}
    shown = {key: _name(each) for key, each in plain.items() if isinstance(each, Plain | tuple) or callable(each)}
    said = module.extra_repr()
    further = [f"{key}={each}" for key, each in sorted(shown.items()) if key != "forward" and f"{key}=" not in said]
    return _OF_A_PROCESS.sub("", f"{name}({', '.join(filter(None, [said, *further]))})")


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else repr(value)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _patches(module: nn.Module) -> Any:
    """Return what a caller has put in the place of a module's forward; what computes activations twice is ours."""
    forward = vars(module).get("forward")
    return None if forward is None or isinstance(forward, functools.partial) else _contents(forward, 1)


def _contents(part: Any, depth: int = 0) -> Any:
    """Return the code of a function or an object, and the values that it holds or refers to."""
    if depth > _DEEPEST:
        return getattr(part, "__qualname__", type(part).__qualname__)
    if isinstance(part, functools.partial):
        return [_contents(part.func, depth + 1), _value({"args": part.args, **part.keywords}, depth)]
    if inspect.ismethod(part):
        return [_contents(part.__func__, depth + 1), _value(part.__self__, depth)]
    if inspect.isfunction(part):
        return [_code_of(part), _value({"defaults": part.__defaults__, "named": part.__kwdefaults__}, depth)] + [
            _value(each, depth) for each in _references(part)
        ]
    if isinstance(part, type):
        return _class(part, depth)
    if inspect.isroutine(part):
        return getattr(part, "__qualname__", str(part))
    return [[_class(kind, depth) for kind in type(part).__mro__], _values(part, depth)]


def _references(function: Any) -> list[dict[str, Any]]:
    """Return the variables of its surroundings that a function uses: of a function around it, and of its module."""
    if "site-packages" in function.__code__.co_filename:
        return []
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    names = [name for code in _codes(function.__code__) for name in code.co_names]
    return [cells, {name: function.__globals__[name] for name in names if name in function.__globals__}]


def _class(kind: type, depth: int = 0) -> Any:
    """Return the code of a class of the user's own, and the plain values of its attributes; of another its name."""
    if _is_installed(kind):
        return f"{kind.__module__}.{kind.__qualname__}"
    functions = {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}
    plain = {name: each for name, each in vars(kind).items() if isinstance(each, Plain) and not name.startswith("__")}
    used = {name: [_value(each, depth + 1) for each in _references(function)] for name, function in functions.items()}
    code = _code_of(kind) or {name: _digest_code(function.__code__) for name, function in functions.items()}
    return [kind.__qualname__, code, plain, used if depth < _DEEPEST else None]


def _is_installed(part: Any) -> bool:
    module = getattr(part, "__module__", None) or ""
    if module == "builtins" or module.partition(".")[0] in ("torch", "trainer"):
        return True
    try:
        return "site-packages" in (inspect.getsourcefile(part) or "")
    except (OSError, TypeError):
        return False


def _values(part: Any, depth: int = 0) -> dict[str, Any]:
    """Return what an object was made with; of a module without parameters to train its tensors and modules, too:
    weights to train are no arguments."""
    found = _made_with(part, depth)
    if isinstance(part, nn.Module) and not any(each.requires_grad for each in part.parameters()):
        tensors = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
        found |= {name: _value(each, depth) for name, each in {**tensors, **dict(part.named_children())}.items()}
    return found


def _made_with(part: Any, depth: int = 0, with_tensors: bool = True) -> dict[str, Any]:
    """Return the attributes of an object that only its ``__init__`` sets, or whoever made it."""
    kinds = type(part).__mro__
    slots = [name for kind in kinds for name in vars(kind).get("__slots__", ()) if hasattr(part, name)]
    held = {**{name: getattr(part, name) for name in slots}, **getattr(part, "__dict__", {})}
    later = {
        instruction.argval
        for kind in kinds
        for name, function in vars(kind).items()
        if inspect.isfunction(function) and name != "__init__" and not _is_installed(kind)
        for code in _codes(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    }
    left_out = later | (_OF_MODULES | {"forward"} if isinstance(part, nn.Module) else set())
    return {
        name: _value(each, depth)
        for name, each in held.items()
        if name not in left_out and (with_tensors or not isinstance(each, Tensor | np.ndarray))
    }


def _value(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Plain):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return digest_array(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(name): _value(each, depth + 1) for name, each in islice(value.items(), _MOST_VALUES)}
    if isinstance(value, list | tuple):
        return [_value(each, depth + 1) for each in value[:_MOST_VALUES]]
    if isinstance(value, Set):
        return sorted(json.dumps(_value(each, depth + 1), default=str) for each in islice(value, _MOST_VALUES))
    if callable(value) and not isinstance(value, nn.Module):
        return _contents(value, depth + 1)
    if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
        return _OF_A_PROCESS.sub("", repr(value))
    return [type(value).__qualname__, _values(value, depth + 1)]


def _code_of(part: Any) -> str:
    """Return a digest of the source of a class or a function, without comments and layout; without a source, of the
    code of a function, and "" for a class."""
    code = getattr(part, "__code__", None)
    if isinstance(code, CodeType) and code.co_name == "<lambda>":  # whose source is the whole statement around it
        return _digest_code(code)
    try:
        return digest(ast.dump(ast.parse(textwrap.dedent(inspect.getsource(part)))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return _digest_code(code) if isinstance(code, CodeType) else ""


def _codes(code: CodeType) -> list[CodeType]:
    """Return a function's code, and that of the functions inside it."""
    return [code, *(inner for each in code.co_consts if isinstance(each, CodeType) for inner in _codes(each))]


def _digest_code(code: CodeType) -> str:
    constants = [
        each if isinstance(each, Plain) else _value(each) for each in code.co_consts if not isinstance(each, CodeType)
    ]
    inner = [_digest_code(each) for each in code.co_consts if isinstance(each, CodeType)]
    return digest([code.co_code.hex(), constants, inner, code.co_names, code.co_varnames])

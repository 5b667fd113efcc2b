"""What a checkpoint belongs to, and what its best score was measured with, as documents that can be compared.

`describe_structure` and `describe_loss` give what must stay the same: a checkpoint of something else is refused, by the
name of what differs. `digest_measure` gives what scores depend on besides: the code of model and loss, values that they
were made with, the validation samples. Where that has changed, training goes on and the best score begins anew.

Values that an object's own methods set later, such as counters, are its state and not what it was made with. Code of
installed packages and hooks are not looked at, and values only a few levels deep.
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
import sysconfig
import textwrap
from collections.abc import Callable, Mapping, Set
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.data.batches import digest_array
from trainer.model.task import SupervisedTask, measures_of

_OF_A_PROCESS = re.compile(r"0x[0-9a-f]+|\(GPU \d+\)|\bcuda(:\d+)?|\bcpu\b")
"""Parts of a description that are of this process: addresses, and its device."""
_MOST_CHARACTERS = 1 << 18
"""The longest structure that is kept as text; of a longer one the digest is."""
_DEEPEST, _MOST_VALUES = 4, 1000
"""Where what an object holds is no longer looked at: depth, and values of one list."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}
"""Attributes by which torch keeps a module's parts and hooks, and which mode it is in."""
DESCRIBES_ITSELF = "describe_structure"
"""The method of a module of this package whose parts are none of torch's: it returns JSON in their place."""
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
    reader = _Reader()
    if isinstance(loss, functools.partial):
        arguments = dict(zip(map(str, range(len(loss.args))), loss.args, strict=True)) | loss.keywords
        function = getattr(loss.func, "__qualname__", type(loss.func).__qualname__)
        return {"function": function, "arguments": {name: reader.read_value(each) for name, each in arguments.items()}}
    return {"arguments": reader.read_attributes(loss)} if isinstance(loss, nn.Module) and _is_torchs(type(loss)) else {}


def digest_measure(module: nn.Module, task: Any, valid: str, collate: Callable[..., Any] | None) -> dict[str, str]:
    """Return digests of what a validation loss depends on beside data, structure and arguments. ``valid``: the name of
    the validation samples; ``collate``: what makes batches of them, None for the usual way."""
    own = {name: part for name, part in module.named_modules() if not _is_torchs(type(part))}
    kinds = dict.fromkeys(kind for part in own.values() for kind in type(part).__mro__)
    code, values = _Reader(), _Reader()
    patches = {
        name: code.read_part(vars(part)["forward"])
        for name, part in module.named_modules()
        # What computes activations twice puts a partial there, and is ours.
        if "forward" in vars(part) and not isinstance(vars(part)["forward"], functools.partial)
    }
    loss = task.criterion if isinstance(task, SupervisedTask) else task
    return {
        "the model's code": digest([[code.read_class(kind) for kind in kinds], patches]),
        "a value that the model holds": digest(
            {name: values.read_made_with(part, with_tensors=False) for name, part in own.items()}
        ),
        "the loss": digest(_Reader().read_part(loss)),
        "the validation samples": digest([valid, None if collate is None else _Reader().read_part(collate)]),
    }


MONITORED = "the figure that chooses the weights"
"""What describes it is called so among the digests of `Problem.digest_measure`."""


def describe_figure(task: Any, name: str) -> str:
    """Return a digest of the metric or the measure of this name, "" where the task says nothing of it."""
    known = {**getattr(task, "figures", {}), **measures_of(task)} if isinstance(task, SupervisedTask) else {}
    found = next((each for key, each in known.items() if name == key or name.startswith(f"{key}_")), None)
    return "" if found is None else digest(_Reader().read_part(found))


def digest(value: Any) -> str:
    """Return sixteen hex digits over a value of JSON's types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _show(module: nn.Module) -> str:
    name = type(module).__qualname__
    if (describe := getattr(type(module), DESCRIBES_ITSELF, None)) is not None:
        return f"{name} {json.dumps(describe(module))}"
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


class _Reader:
    """Reads code and values, each function, class and object once: where it comes again, its name stands for it."""

    def __init__(self) -> None:
        self._read: dict[int, Any] = {}  # by their ids, and kept: no other object takes an id meanwhile

    def read_class(self, kind: type, depth: int = 0) -> Any:
        """Return the code of a class of the user's own, and the plain values of its attributes; of another its name."""
        if _is_installed(kind):
            return f"{kind.__module__}.{kind.__qualname__}"
        if self._is_read(kind):
            return kind.__qualname__
        functions = {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}
        plain = {
            name: each for name, each in vars(kind).items() if isinstance(each, Plain) and not name.startswith("__")
        }
        code = _code_of(kind) or {name: _digest_code(function.__code__) for name, function in functions.items()}
        return [
            kind.__qualname__,
            code,
            plain,
            {name: self._read_used(each, depth) for name, each in functions.items()},
        ]

    def read_part(self, part: Any, depth: int = 0) -> Any:
        """Return the code of a function or an object, and the values that it holds or refers to."""
        if isinstance(part, functools.partial):
            return [self.read_part(part.func, depth), self.read_value({"args": part.args, **part.keywords}, depth)]
        if inspect.ismethod(part):
            return [self.read_part(part.__func__, depth), self.read_value(part.__self__, depth)]
        if isinstance(part, type):
            return self.read_class(part, depth)
        name = getattr(part, "__qualname__", type(part).__qualname__)
        if inspect.isfunction(part):
            if self._is_read(part):
                return name
            defaults = self.read_value({"defaults": part.__defaults__, "named": part.__kwdefaults__}, depth)
            return [name if _is_installed(part) else _code_of(part), defaults, self._read_used(part, depth)]
        if inspect.isroutine(part) or depth > _DEEPEST or self._is_read(part):
            return name
        return [[self.read_class(kind, depth) for kind in type(part).__mro__], self.read_attributes(part, depth)]

    def read_attributes(self, part: Any, depth: int = 0) -> dict[str, Any]:
        """Return what an object was made with; of a module without parameters to train its tensors and modules, too:
        weights to train are no arguments."""
        found = self.read_made_with(part, depth)
        if isinstance(part, nn.Module) and not any(each.requires_grad for each in part.parameters()):
            tensors = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
            parts = {**tensors, **dict(part.named_children())}
            found |= {name: self.read_value(each, depth) for name, each in parts.items()}
        return found

    def read_made_with(self, part: Any, depth: int = 0, with_tensors: bool = True) -> dict[str, Any]:
        """Return the attributes of an object that only its ``__init__`` sets, or whoever made it."""
        if hasattr(type(part), DESCRIBES_ITSELF):
            return {}
        kinds = type(part).__mro__
        slots = [name for kind in kinds for name in vars(kind).get("__slots__", ()) if hasattr(part, name)]
        held = {**{name: getattr(part, name) for name in slots}, **getattr(part, "__dict__", {})}
        left_out = _set_later(kinds) | (_OF_MODULES | {"forward"} if isinstance(part, nn.Module) else set())
        return {
            name: self.read_value(each, depth)
            for name, each in held.items()
            if name not in left_out and (with_tensors or not isinstance(each, Tensor | np.ndarray))
        }

    def read_value(self, value: Any, depth: int = 0) -> Any:
        """Return a value of JSON's types that stands for a value, or for what an object was made with."""
        if isinstance(value, float) and not math.isfinite(value):
            return repr(value)
        if isinstance(value, Plain):
            return value
        if isinstance(value, Tensor | np.ndarray):
            return digest_array(value)
        if isinstance(value, ModuleType):
            return value.__name__
        if inspect.isroutine(value) or isinstance(value, type | functools.partial):
            return self.read_part(value, depth)
        if depth > _DEEPEST:
            return type(value).__qualname__
        if isinstance(value, Mapping):
            return {str(name): self.read_value(each, depth + 1) for name, each in islice(value.items(), _MOST_VALUES)}
        if isinstance(value, list | tuple):
            return [self.read_value(each, depth + 1) for each in value[:_MOST_VALUES]]
        if isinstance(value, Set):
            values = (self.read_value(each, depth + 1) for each in islice(value, _MOST_VALUES))
            return sorted(json.dumps(each, default=str) for each in values)
        if callable(value) and not isinstance(value, nn.Module):
            return self.read_part(value, depth + 1)
        if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            return _OF_A_PROCESS.sub("", repr(value))
        return [type(value).__qualname__, None if self._is_read(value) else self.read_attributes(value, depth + 1)]

    def _read_used(self, function: Any, depth: int) -> list[Any]:
        used = _references(function)
        return [{name: self.read_value(each, depth) for name, each in variables.items()} for variables in used]

    def _is_read(self, part: Any) -> bool:
        if id(part) in self._read:
            return True
        self._read[id(part)] = part
        return False


def _set_later(kinds: tuple[type, ...]) -> set[str]:
    """Return the attributes that methods of the user's own classes set, other than ``__init__``."""
    own = [kind for kind in kinds if not _is_installed(kind)]
    methods = [
        each for kind in own for name, each in vars(kind).items() if inspect.isfunction(each) and name != "__init__"
    ]
    codes = [code for method in methods for code in _codes(method.__code__)]
    return {each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def _references(function: Any) -> list[dict[str, Any]]:
    """Return the variables of its surroundings that a function uses: of a function around it, and of its module, where
    it is of the user's own."""
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    names = [] if _is_installed(function) else [name for code in _codes(function.__code__) for name in code.co_names]
    return [cells, {name: function.__globals__[name] for name in names if name in function.__globals__}]


def _is_installed(part: type | FunctionType) -> bool:
    module = part.__module__ or ""
    if module == "builtins" or module.partition(".")[0] in ("torch", "trainer"):
        return True
    try:
        file = inspect.getsourcefile(part) or ""
    except (OSError, TypeError):
        return False
    return "site-packages" in file or file.startswith(_STANDARD_LIBRARY)


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
    reader = _Reader()
    constants = [
        each if isinstance(each, Plain) else reader.read_value(each)
        for each in code.co_consts
        if not isinstance(each, CodeType)
    ]
    inner = [_digest_code(each) for each in code.co_consts if isinstance(each, CodeType)]
    return digest([code.co_code.hex(), constants, inner, code.co_names, code.co_varnames])

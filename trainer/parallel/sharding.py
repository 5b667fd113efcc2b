"""`ShardedModel`: a module whose parameters lie in rows on the ranks of a replica, by torch's FSDP2, or as a whole.

When the world changes, so may the rows: then the module is taken out of FSDP2 and put into it again, in place, so that
whoever holds the module keeps it. Which rank holds what is `trainer.parallel.replicas`, the collectives and a step's
gradients are `trainer.parallel.shard_collectives`; where rows come from is `trainer.engine.sharded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.model.blocks import separate_blocks
from trainer.parallel.replicas import row_range

_DICTIONARIES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
"""The attributes of a module that hold its hooks, by a number that no two hooks share, and its parts."""


class _Ranks:
    """What FSDP2 asks of a process group, whose collectives it does not use."""

    def __init__(self, place: int, size: int) -> None:
        self._place, self._size = place, size

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._size


class _ReplicaMesh(DeviceMesh):
    """The ranks of one replica, by their places, without torch's default group."""

    def __init__(self, device_type: str, place: int, size: int) -> None:
        super().__init__(device_type, torch.arange(size), _init_backend=False, _rank=place)
        self._ranks = _Ranks(place, size)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self._ranks


class ShardedModel:
    """A module that is a whole at first. `shard` leaves this rank its rows, `make_whole` undoes it."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], config: DistributedTrainingConfig, device: torch.device
    ) -> None:
        """``blocks``: the parts of the module whose parameters are gathered together, in the order in which they are
        used. Raise `ConfigError` for a model or a device that cannot be trained so."""
        if config.cpu_offload and device.type != "cuda":
            raise ConfigError(
                "training.cpu_offload needs a GPU, from which it moves parameters, gradients and moments to the host: "
                "leave it out on the CPU"
            )
        self.module, self.config, self.device = module, config, device
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        """The whole shape of every parameter, by name; of a shared one, by its first name."""
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.aliases = {
            name: first_names[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if first_names[id(parameter)] != name
        }
        """The further names of shared parameters, with their first one."""
        self.trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if scalars := [name for name, shape in self.shapes.items() if not shape]:
            raise ConfigError(
                f"training.strategy = {config.strategy!r} divides parameters by rows, and {', '.join(scalars)} has "
                "none: make it a tensor of one element, or set training.strategy = 'ddp'"
            )
        kinds = {parameter.dtype for parameter in module.parameters()}
        if len(kinds) > 1:
            raise ConfigError(
                f"training.strategy = {config.strategy!r} needs parameters of one type, and the model has "
                f"{', '.join(sorted(map(str, kinds)))}: turn them into one, or set training.strategy = 'ddp'"
            )
        self.dtype = kinds.pop() if kinds else torch.float32
        """The type of all parameters."""
        self.blocks = separate_blocks(module, blocks)
        self.place, self.size = 0, 1
        self.is_whole = True
        self.held: dict[str, nn.Parameter] = {}
        """This rank's rows as parameters of their own, in the memory of FSDP2's, while the module is divided."""
        self._divided: dict[str, Any] = {}
        """The parameters as FSDP2 keeps them; between a forward and a backward pass the module may have others."""
        self._whole: list[tuple[nn.Module, str, nn.Parameter]] = []
        """The module's own parameters and their places, while FSDP2 has put others there."""
        self._added: list[tuple[nn.Module, set[str]]] = []
        """The parts of the module, and the attributes that FSDP2 has added to each."""
        self._is_used = False
        """Whether FSDP2 has begun a pass, before which it cannot be reset."""
        self._home = torch.device("cpu") if config.cpu_offload else device
        """Where rows lie between passes."""

    @property
    def rows(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter, as they lie in memory."""
        held = dict(self.module.named_parameters()) if self.is_whole else self.held
        return {name: parameter.detach() for name, parameter in held.items()}

    def take_rows(self, name: str, whole: Tensor, place: int, size: int) -> Tensor:
        """Return a copy of the rows of a whole parameter that the rank at this place holds, where rows lie."""
        first, last = row_range(self.shapes[name][0], place, size)
        return whole[first:last].to(self._home, copy=True)

    def shard(self, place: int, size: int, rows: Mapping[str, Tensor]) -> None:
        """Hold these rows from now on, as the rank at this place of a replica."""
        if not self.is_whole:
            self._take_apart()
        mesh = _ReplicaMesh(self.device.type, place, size)
        kind = torch.bfloat16 if self.config.gather_precision == "bf16" else None
        offload = CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy()
        self._whole = [
            (part, name, parameter)
            for part in self.module.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        ]
        known = [(part, set(vars(part))) for part in self.module.modules()]
        for part in [*self.blocks, self.module]:
            own = [parameter for parameter in part.parameters() if not isinstance(parameter, DTensor)]
            for parameter in own:
                if not parameter.untyped_storage().size():  # FSDP2 divides it; what is in it does not matter
                    parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)
            output = torch.float32 if kind and part is self.module else None
            policy = MixedPrecisionPolicy(
                param_dtype=kind, reduce_dtype=torch.float32 if kind else None, output_dtype=output
            )
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
            for parameter in own:
                parameter.data = _without_memory(parameter)
        self._added = [(part, set(vars(part)) - names) for part, names in known]
        for wrapped in divided_parts(self.module):
            wrapped.set_force_sum_reduction_for_comms(True)
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_reduce_scatter_unused_params(True)
        for block, following in zip(self.blocks, self.blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        self._note = self.module.register_forward_pre_hook(self._note_use, prepend=True)
        self._divided = dict(self.module.named_parameters())
        self.place, self.size, self.is_whole = place, size, False
        with torch.no_grad():
            for name, parameter in self._divided.items():
                mine = parameter.to_local()
                mine.copy_(rows[name])
                self.held[name] = nn.Parameter(mine, requires_grad=parameter.requires_grad)

    def make_whole(self, values: Mapping[str, Tensor]) -> None:
        """Be an ordinary module from now on, whose parameters are these."""
        if not self.is_whole:
            self._take_apart()
        with torch.no_grad():
            for name, parameter in list(self.module.named_parameters()):
                # The same parameter where others hold it, such as the layers that share it.
                parameter.data = values[name].to(self.device, copy=True)
        self.place, self.size, self.is_whole = 0, 1, True

    @contextmanager
    def holding_rows(self) -> Iterator[None]:
        """Let the parameters of the module be those of `held` for a while, for what is made of the module."""
        places = [
            (part, name, parameter)
            for part in self.module.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        ]
        first = {id(parameter): name for name, parameter in self._divided.items()}
        try:
            for part, name, parameter in places if self.held else ():
                setattr(part, name, self.held[first[id(parameter)]])
            yield
        finally:
            for part, name, parameter in places:
                setattr(part, name, parameter)

    def collect_gradients(self) -> None:
        """Add the gradients that a pass has left to those of the rows, and leave FSDP2's parameters without."""
        with torch.no_grad():
            for name, parameter in self._divided.items():
                if parameter.grad is not None:
                    found, held = parameter.grad.to_local(), self.held[name]
                    held.grad = found if held.grad is None else held.grad.add_(found)
                    parameter.grad = None

    def clear_gradients(self) -> None:
        """Clear the gradients of the rows, and those that a pass has left."""
        for parameter in [*self._divided.values(), *self.held.values()]:
            parameter.grad = None

    def reset(self) -> None:
        """Be ready for another pass after one that has failed: parameters are rows, and there are no gradients."""
        for parameter in self.module.parameters():  # some of which are gathered, and kept by FSDP2
            parameter.grad = None
        if self._is_used:
            self.module.reset_iter_state()  # type: ignore[operator]
        self.clear_gradients()

    def _note_use(self, *_: Any) -> None:
        self._is_used = True

    def _take_apart(self) -> None:
        """Take the module out of FSDP2, which has no function for that. Its own parameters are there again, without
        memory."""
        self.reset()
        self._note.remove()
        for part, added in self._added:
            kinds = (kind for kind in type(part).__mro__ if not issubclass(kind, FSDPModule))
            part.__class__ = next(kinds)  # type: ignore[assignment]
            for name in added & set(vars(part)):
                delattr(part, name)
            _module_state_mapping.pop(part, None)  # else it cannot be given to FSDP2 again
        for part, name, parameter in self._whole:
            parameter.requires_grad_(getattr(part, name).requires_grad)
            setattr(part, name, parameter)
        for part in self.module.modules():
            hooks = [vars(part)[name] for name in _DICTIONARIES]
            for key in [key for held in hooks for key, value in held.items() if _is_hook_of_fsdp(value)]:
                for held in hooks:
                    held.pop(key, None)
        self.is_whole, self._is_used = True, False
        self._divided, self.held, self._whole, self._added = {}, {}, [], []


def divided_parts(module: nn.Module) -> list[FSDPModule]:
    """Return the parts of a module that FSDP2 divides."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, requires_grad=False)
    empty.untyped_storage().resize_(0)
    return empty


def _is_hook_of_fsdp(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("torch.distributed.fsdp.")

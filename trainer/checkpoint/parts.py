"""The form of a sharded state in a checkpoint: one part for each place in a replica, from which the whole is put
together. Pure.

A part is what `torch.save` wrote of a dictionary: ``place`` and ``size`` (of the replica), ``rows`` (by kind:
``weights``, ``exp_avg``, ``exp_avg_sq``, and ``best`` where there are best weights; each by name of the parameter),
``aliases`` (further names of shared parameters), ``updates`` and ``groups`` (of the optimizer), and ``buffers``,
``best_buffers``, ``order`` (the names of a state dict) and ``progress``, which are the same in each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the moments, as torch calls them."""


def part_name(place: int, size: int) -> str:
    """Return the file of the part at this place."""
    return f"part-{place:04d}-of-{size:04d}.pt"


def assemble(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state that these parts hold together, as an unsharded training saves it. Raise ValueError where parts
    are missing or do not belong together."""
    first = parts[0]
    places = [part["place"] for part in parts]
    if places != list(range(first["size"])) or any(part["progress"] != first["progress"] for part in parts):
        raise ValueError(f"its parts are those of places {places} of {first['size']}, or of different steps")

    def whole(kind: str, name: str) -> Tensor:
        return torch.cat([part["rows"][kind][name] for part in parts])

    def weights(kind: str, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {name: whole(kind, name) for name in first["rows"][kind]}
        values |= {alias: values[name] for alias, name in first["aliases"].items()} | buffers
        return {name: values[name] for name in first["order"]}

    names = list(first["rows"]["weights"])
    optimizer = {
        place: {
            "step": torch.tensor(float(first["updates"])),
            **{kind: whole(kind, name) for kind in MOMENTS},
        }
        for place, name in enumerate(names)
        if name in first["rows"][MOMENTS[0]]
    }
    state = {
        "model": weights("weights", first["buffers"]),
        "step": {"optimizer": {"state": optimizer, "param_groups": first["groups"]}, "scaler": {}},
        "progress": first["progress"],
        "grown": first.get("grown", {}),
    }
    if "best" in first["rows"]:
        state["best"] = weights("best", first["best_buffers"])
    return state

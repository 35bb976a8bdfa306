"""A small state dict with every kind of thing in it, as saved and as loaded."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Any

import torch

from dist_checkpointing import ShardedObject, ShardedTensor


def _values(fill: float | None, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1).reshape(shape) if fill is None else torch.full(shape, fill)


def state(fill: float | None = None) -> dict[str, Any]:
    """Tensors on a grid and cut unevenly, an object, common state.

    Args:
        fill: value of all tensors in a template; None for those that are saved.
    """
    halves = ((0, 30), (30, 100))
    return {
        "grid": [
            ShardedTensor.from_rank_offsets("grid", _values(fill, 2, 40), (0, i, 2))
            for i in range(2)
        ],
        "uneven": [
            ShardedTensor(
                "uneven",
                _values(fill, stop - start),
                torch.float32,
                (stop - start,),
                (100,),
                (start,),
                None,
            )
            for start, stop in halves
        ],
        "object": ShardedObject("object", OrderedDict(a=[1, "x"], b=b"bytes"), (1,), (0,)),
        **_common(),
    }


def _common() -> dict[str, Any]:
    return {
        "iteration": 7,
        "lr": 0.5,
        "args": argparse.Namespace(hidden=64, name="tiny", betas=(0.9, 0.95)),
        "rng": torch.arange(16, dtype=torch.uint8),
        "nested": {"list": [1, 2, [3]], (1, 2): "tuple", "big": 1 << 70},
    }


def loaded() -> dict[str, Any]:
    """What a load of it returns."""
    wrapped = state()
    return {
        "grid": [leaf.data for leaf in wrapped["grid"]],
        "uneven": [leaf.data for leaf in wrapped["uneven"]],
        "object": wrapped["object"].data,
        **_common(),
    }

"""A small state dict with every kind of thing in it, as saved and as loaded."""

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import torch

from dist_checkpointing import save
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from states import cell, every_kind

BACKENDS: Final[dict[str, Any]] = {
    "zarr 1": ("zarr", 1),
    "zarr 2": ("zarr", 2),
    "zarr 2 zstd": Zarr3SaveShardedStrategy(codec="zstd"),
    "tensorstore": ("tensorstore", 1),
    "torch_dist": ("torch_dist", 1),
}


def state(fill: float | None = None) -> dict[str, Any]:
    """Tensors, an object and common state.

    Args:
        fill: value of all tensors in a template; None for those that are saved.
    """
    thing = cell("object", OrderedDict(a=[1, "x"], b=b"bytes"))
    return {**every_kind(fill), "object": thing, **_common()}


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
    found = {
        key: [part.data for part in leaf] if isinstance(leaf, list) else leaf.data
        for key, leaf in state().items()
        if key not in _common()
    }
    return found | _common()


def save_each(parent: Path) -> Path:
    """One good checkpoint of each backend."""
    for name, strategy in BACKENDS.items():
        save(state(), parent / name, strategy)
    return parent

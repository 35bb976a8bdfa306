"""What a checkpoint holds, as rows of a table.

One plain process is enough, and no tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_checkpointing import ShardedTensor, load_common_state_dict, load_sharded_metadata
from dist_checkpointing.serialization import get_default_load_sharded_strategy
from dist_checkpointing.strategies.base import PlannedLoadStrategy


@dataclass(frozen=True, slots=True)
class StoredTensorRow:
    """One global tensor. ``chunks`` says how it is cut on disk."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """All tensors by key, the names of all sharded objects, and the common state."""

    tensors: tuple[StoredTensorRow, ...]
    objects: tuple[str, ...]
    common: Mapping[str, Any]


def read_contents(checkpoint: Path) -> Contents:
    """List what a checkpoint of any backend holds."""
    stored = load_sharded_metadata(str(checkpoint))
    chunks = _stored_chunks(checkpoint)
    tensors = tuple(
        StoredTensorRow(
            key,
            str(leaf.dtype).removeprefix("torch."),
            tuple(leaf.global_shape),
            chunks.get(key, "?"),
            math.prod(leaf.global_shape) * leaf.dtype.itemsize,
        )
        for key, leaf in sorted(stored.items())
        if isinstance(leaf, ShardedTensor)
    )
    objects = (key for key, leaf in stored.items() if not isinstance(leaf, ShardedTensor))
    return Contents(tensors, tuple(sorted(objects)), load_common_state_dict(str(checkpoint)))


def _stored_chunks(checkpoint: Path) -> dict[str, str]:
    """How each tensor is cut on disk; nothing for a third party's backend that does not say."""
    strategy = get_default_load_sharded_strategy(str(checkpoint))
    if not isinstance(strategy, PlannedLoadStrategy):
        return {}
    chunks = {}
    for key, tensor in strategy.make_reader(checkpoint).read_metadata().items():
        if tensor.chunk_shape is None:
            number = 0 if tensor.pieces is None else len(tensor.pieces)
            chunks[key] = f"{number} pieces"
        else:
            axes = zip(tensor.global_shape, tensor.chunk_shape, strict=True)
            number = math.prod(math.ceil(extent / chunk) for extent, chunk in axes)
            chunks[key] = f"{number} of {shape_text(tensor.chunk_shape)}"
    return chunks


def shape_text(shape: tuple[int, ...]) -> str:
    """``3 x 128``, or ``scalar``."""
    return " x ".join(map(str, shape)) if shape else "scalar"

"""The leaves that a rank wants to fill, and the columns of the tensors among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, ValuesView
from functools import cached_property

import numpy as np

from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import Path
from dist_checkpointing.planning.load_plan import TensorColumns
from dist_checkpointing.planning.reads import WantedShards
from dist_checkpointing.planning.shard_table import Int32s


class WantedLeaves(Mapping[Path, ShardedBase]):
    """The sharded leaves of a load by path; their columns are made once."""

    def __init__(
        self, leaves: Mapping[Path, ShardedBase], tensors: TensorColumns | None = None
    ) -> None:
        self.by_path = leaves
        self.rows: Sequence[ShardedBase] = list(leaves.values())
        if tensors is not None:
            self.tensors = tensors

    @classmethod
    def of(cls, leaves: Mapping[Path, ShardedBase]) -> WantedLeaves:
        """Some leaves, which may be such already."""
        return leaves if isinstance(leaves, cls) else cls(leaves)

    def __getitem__(self, path: Path) -> ShardedBase:
        return self.by_path[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.by_path)

    def __len__(self) -> int:
        return len(self.rows)

    def values(self) -> ValuesView[ShardedBase]:
        return self.by_path.values()

    @cached_property
    def sources(self) -> Int32s:
        """Position of each tensor among all leaves."""
        is_tensor = [isinstance(leaf, ShardedTensor) for leaf in self.rows]
        return np.flatnonzero(is_tensor).astype(np.int32)

    @cached_property
    def tensors(self) -> TensorColumns:
        """The tensors among them, as columns."""
        return TensorColumns.of(leaf for leaf in self.rows if isinstance(leaf, ShardedTensor))

    @cached_property
    def shards(self) -> WantedShards:
        """What the tensors are parts of."""
        own = self.tensors
        return WantedShards.of_columns(
            own.keys, own.offsets, own.box_shapes, own.flat_ranges, self.sources
        )

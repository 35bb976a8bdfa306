"""("tensorstore", 1): zarr v3 arrays in an OCDBT database, a few large files a checkpoint.

Any TensorStore client opens a tensor by itself::

    ts.open({"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": "file:///ckpt/1000/",
                                            "path": "decoder.w/"}})
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import ClassVar

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format.index import INDEX_NAME, Index
from dist_checkpointing.format.leftovers import (
    PlannedRemoval,
    end_removal,
    note_removal,
    noted_removal,
)
from dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
)
from dist_checkpointing.strategies.tensorstore.database import drop_all_but, plan_removal
from dist_checkpointing.strategies.tensorstore.reader import TensorStoreReader
from dist_checkpointing.strategies.tensorstore.writer import TensorStoreWriter

__all__ = ["TensorStoreLoadShardedStrategy", "TensorStoreSaveShardedStrategy"]


class TensorStoreSaveShardedStrategy(PlannedSaveStrategy):
    """Saves as ("tensorstore", 1).

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", TensorStoreSaveShardedStrategy())
    """

    writer_type: ClassVar[type[TensorStoreWriter]] = TensorStoreWriter
    writes: ClassVar[tuple[str, int]] = ("tensorstore", 1)
    can_handle_sharded_objects = True


class TensorStoreLoadShardedStrategy(PlannedLoadStrategy):
    """Loads ("tensorstore", 1), and the zarr formats as their own strategies do.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", "tensorstore")
        >>> loaded = load(state, "ckpt", TensorStoreLoadShardedStrategy())
    """

    reader_type: ClassVar[type[TensorStoreReader]] = TensorStoreReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset(
        {("tensorstore", 1), ("zarr", 1), ("zarr", 2)}
    )
    can_handle_sharded_objects = True

    def for_format(self, backend: str, version: int) -> LoadShardedStrategy:
        if backend == "tensorstore":
            return self
        # Not at the top: the package zarr may be missing.
        from dist_checkpointing.strategies import zarr  # noqa: PLC0415

        kind = zarr.ZarrLoadShardedStrategy if version == 1 else zarr.Zarr3LoadShardedStrategy
        strategy = kind(planner=self.planner, comm=self.comm, options=self.options)
        strategy.trusted = self.trusted
        return strategy

    def remove_sharded_tensors(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> None:
        root = Path(checkpoint_dir)
        gone, kept = _parted(root, key_prefix)
        if not gone and not noted_removal(root):
            return
        note_removal(root, dict.fromkeys(gone, ()))
        # Once the index does not name them they are unreachable; what follows frees their space.
        local_folder.write_atomic(root / INDEX_NAME, kept.to_json())
        drop_all_but(root, kept)
        end_removal(root)

    def plan_removal(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> PlannedRemoval:
        root = Path(checkpoint_dir)
        gone, kept = _parted(root, key_prefix)
        is_unfinished = bool(noted_removal(root))
        if not gone and not is_unfinished:
            return PlannedRemoval((), ())
        return replace(plan_removal(root, gone, kept), is_unfinished=is_unfinished)


def _parted(root: Path, key_prefix: str) -> tuple[list[str], Index]:
    """The tensors whose keys begin so, and the index without them."""
    index = TensorStoreReader(root).read_metadata()
    gone = [key for key in index if key.startswith(key_prefix)]
    return gone, index.without(gone)

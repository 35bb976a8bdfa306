"""("torch_dist", 1): the files of torch DCP, as Megatron-Core >= 0.7 writes them.

What is written here is read by ``torch.distributed.checkpoint.load`` and by Megatron-Core, and
what they write is read here, plain DCP checkpoints without ``metadata.json`` included.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME, PlannedRemoval
from dist_checkpointing.strategies.base import PathOrStr, PlannedLoadStrategy, PlannedSaveStrategy
from dist_checkpointing.strategies.torch_dist.metadata import (
    DcpMetadata,
    read_dcp_metadata,
    to_pickle,
)
from dist_checkpointing.strategies.torch_dist.reader import (
    TorchDistCommonLoadStrategy as TorchDistCommonLoadStrategy,
    TorchDistReader,
)
from dist_checkpointing.strategies.torch_dist.writer import TorchDistWriter

_DATA_FILE = re.compile(r".*__\d+_\d+\.distcp")


class TorchDistSaveShardedStrategy(PlannedSaveStrategy):
    """Saves as ("torch_dist", 1).

    The archives in the files get a CRC-32 if ``torch.serialization.set_crc32_options`` says so, as
    those of ``torch.save`` do. No reader of PyTorch looks at it, and it costs more time than
    everything else.

    Args:
        separation_hint: Tensors whose keys begin with this get data files of their own, whose names
            begin with it too, so that ``remove_sharded_tensors`` of that prefix frees their space.
        **options: See PlannedSaveStrategy.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", TorchDistSaveShardedStrategy(separation_hint="optimizer."))
    """

    writer_type: ClassVar[type[TorchDistWriter]] = TorchDistWriter
    writes: ClassVar[tuple[str, int]] = ("torch_dist", 1)
    can_handle_sharded_objects = True

    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        *,
        separation_hint: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backend, version, **options)
        self.writer_options: dict[str, Any] = {"separation_hint": separation_hint}


class TorchDistLoadShardedStrategy(PlannedLoadStrategy):
    """Loads ("torch_dist", 1).

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", "torch_dist")
        >>> loaded = load(state, "ckpt", TorchDistLoadShardedStrategy())
    """

    reader_type: ClassVar[type[TorchDistReader]] = TorchDistReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("torch_dist", 1)})
    can_handle_sharded_objects = True

    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        root = Path(checkpoint_dir)
        _, kept, unused = _parted(root, key_prefix)
        # Once it does not name them they are unreachable; files of nothing else are freed then.
        local_folder.write_atomic(root / DCP_METADATA_NAME, to_pickle(kept))
        location.remove_all(unused, root)

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        metadata, kept, unused = _parted(Path(checkpoint_dir), key_prefix)
        shared, gone = dict[str, int](), set(unused)
        for at, place in metadata.places.items():
            if at not in kept.places and place.file not in gone:
                shared[place.file] = shared.get(place.file, 0) + place.length
        keys = tuple(sorted(set(metadata.tensors) - set(kept.tensors)))
        return PlannedRemoval(keys, tuple(unused), shared, is_unfinished=bool(unused and not keys))


def _parted(root: Path, key_prefix: str) -> tuple[DcpMetadata, DcpMetadata, list[str]]:
    """What is stored, what stays, and the files that hold nothing of that.

    Among these are files that a removal cut off has left.
    """
    metadata = read_dcp_metadata(root)
    kept = metadata.without_tensors(key_prefix)
    in_use = {place.file for place in kept.places.values()}
    left = {path.name for path in root.iterdir() if _DATA_FILE.fullmatch(path.name)}
    unused = left.union(place.file for place in metadata.places.values()) - in_use
    return metadata, kept, sorted(unused)

"""("torch_dist", 1): the files of torch DCP, as Megatron-Core >= 0.7 writes them.

What is written here is read by ``torch.distributed.checkpoint.load`` and by Megatron-Core, and
what they write is read here, plain DCP checkpoints without ``metadata.json`` included.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from dist_checkpointing import store
from dist_checkpointing.commit import DCP_METADATA_NAME
from dist_checkpointing.strategies.base import PlannedLoadStrategy, PlannedSaveStrategy
from dist_checkpointing.strategies.torch_dist.common import TorchDistCommonLoadStrategy
from dist_checkpointing.strategies.torch_dist.metadata import read_dcp_metadata
from dist_checkpointing.strategies.torch_dist.metadata_pickle import to_pickle
from dist_checkpointing.strategies.torch_dist.reader import TorchDistReader
from dist_checkpointing.strategies.torch_dist.writer import TorchDistWriter

__all__ = [
    "TorchDistCommonLoadStrategy",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
]


class TorchDistSaveShardedStrategy(PlannedSaveStrategy):
    """Saves as ("torch_dist", 1).

    The archives in the files get a CRC-32 if ``torch.serialization.set_crc32_options`` says so, as
    those of ``torch.save`` do. No reader of PyTorch looks at it, and it costs more time than
    everything else.
    """

    writer_type = TorchDistWriter
    writes = ("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


class TorchDistLoadShardedStrategy(PlannedLoadStrategy):
    """Loads ("torch_dist", 1)."""

    reader_type = TorchDistReader
    reads = frozenset({("torch_dist", 1)})

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def remove_sharded_tensors(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> None:
        root = Path(checkpoint_dir)
        metadata = read_dcp_metadata(root)
        kept = metadata.without_tensors(key_prefix)
        # Once it does not name them they are unreachable; files of nothing else are freed then.
        store.write_atomic(root / DCP_METADATA_NAME, to_pickle(kept))
        in_use = {place.file for place in kept.places.values()}
        for file in {place.file for place in metadata.places.values()} - in_use:
            store.remove(root / file, root)

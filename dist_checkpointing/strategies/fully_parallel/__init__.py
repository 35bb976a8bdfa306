"""Wrappers of save and load strategies with which ranks share the work on replicas.

On save the ranks of a group write about the same number of bytes each, since any replica of a shard
may be written. On load every byte that several ranks of the group want is read by one of them, and
passed on. Files and loaded values are the same as without a wrapper.
"""

from __future__ import annotations

from dist_checkpointing.planning import distribute_shards_to_ranks
from dist_checkpointing.strategies.fully_parallel.load import FullyParallelLoadStrategyWrapper
from dist_checkpointing.strategies.fully_parallel.save import FullyParallelSaveStrategyWrapper

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "distribute_shards_to_ranks",
]

"""Replicas share the work: wrappers round any save or load strategy.

::

    save(state, path, FullyParallelSaveStrategyWrapper(strategy, data_parallel_group))
    load(template, path, FullyParallelLoadStrategyWrapper(strategy, data_parallel_group))

On save every replica of a shard is as good as the main one, so the ranks of the group write about
the same number of bytes each. On load every byte that several ranks of the group want is read by
one of them, and passed on. What is on disk is the same, and so is what is loaded.
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

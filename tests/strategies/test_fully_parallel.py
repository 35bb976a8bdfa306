"""The wrappers hold to everything that is asked of a strategy."""

from dist_checkpointing.strategies import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    LoadShardedStrategy,
    SaveShardedStrategy,
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from dist_checkpointing.testing import Failures, StorageProtocol
from few_worlds import FewWorlds


class TestFullyParallel(FewWorlds, Failures, StorageProtocol):
    backend = ("tensorstore", 1)

    def save_strategy(self) -> SaveShardedStrategy:
        return FullyParallelSaveStrategyWrapper(TensorStoreSaveShardedStrategy()).resolved()

    def load_strategy(self) -> LoadShardedStrategy:
        wrapper = FullyParallelLoadStrategyWrapper(
            TensorStoreLoadShardedStrategy(), min_shared_bytes=0
        )
        return wrapper.for_format(*self.backend)

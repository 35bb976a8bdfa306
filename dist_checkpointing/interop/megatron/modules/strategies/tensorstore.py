"""The strategy that loads zarr through TensorStore."""

from dist_checkpointing.strategies import tensorstore as ours

__all__ = ["TensorStoreLoadShardedStrategy", "register_default_tensorstore_strategies"]


class TensorStoreLoadShardedStrategy(ours.TensorStoreLoadShardedStrategy):
    """Loads into the given tensors, on whatever device they are."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        del load_directly_on_device
        super().__init__()


def register_default_tensorstore_strategies() -> None:
    """Do nothing: the registry finds them."""

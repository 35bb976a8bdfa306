"""The strategies of the common state."""

from dist_checkpointing.format.commit import COMMON_STATE_FNAME
from dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy

__all__ = [
    "COMMON_STATE_FNAME",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "register_default_common_strategies",
]


def register_default_common_strategies() -> None:
    """Do nothing: the registry finds them."""

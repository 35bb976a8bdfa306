"""A training of torch as one object that ``save`` and ``load`` take."""

from dist_checkpointing.interop.torch_state.state import TorchState

__all__ = ["TorchState"]

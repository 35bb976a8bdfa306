"""Objects that ``save`` and ``load`` take in place of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping.base import CommonStateDict, ShardedStateDict, StateDict


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a checkpoint holds, or what a recipe makes of it, before a tensor of it is read.

    Attributes:
        tensors: Global shape and dtype of every stored tensor, by key.
        common: Common state of the checkpoint.
        sources: Keys of the stored tensors that a recipe makes each tensor of; empty without one.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    common: CommonStateDict
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@runtime_checkable
class ShardedStateful(Protocol):
    """An object that says what of it is saved, and takes back what is loaded.

    ``save``, ``load`` and the manager take one in place of a state dict; ``interop.TorchState`` is
    one. Both methods are collective.
    """

    def sharded_state_dict(self, comm: Comm) -> ShardedStateDict:
        """What ``save`` writes."""

    def template_for(
        self, stored: StoredState, comm: Comm
    ) -> tuple[ShardedStateDict, Callable[[StateDict], None]]:
        """The template that ``load`` fills, and what puts the loaded state dict into the object."""


def as_state_dict(state: ShardedStateDict | ShardedStateful, comm: Comm) -> ShardedStateDict:
    """The state dict to save; collective if ``state`` is an object."""
    return state.sharded_state_dict(comm) if isinstance(state, ShardedStateful) else state

"""What a checkpoint must give back, found without the library that is being shown.

The global tensors are put together by hand, with one plain collective each, and hashed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tensor_parallel import Cut, Ranks
from training_state import MOMENTS, TrainingState


def global_digests(state: TrainingState) -> dict[str, str]:
    """SHA-256 of every global tensor of the training state, and of the position in the data.

    Raises:
        ValueError: if ranks that must hold the same values do not.
    """
    groups = {moment: state.moments(moment) for moment in MOMENTS}
    groups["weight"] = {name: weight.detach() for name, weight in state.model.named_parameters()}
    digests = {
        f"{group} of {name}": _digest(_whole(tensor, state.model.cuts[name], state.ranks))
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }
    random = _whole(state.data_random.get_state(), Cut(None), state.ranks)
    return digests | {"position in the data": _digest(random)}


def _whole(own: Tensor, cut: Cut, ranks: Ranks) -> Tensor:
    held = [torch.empty_like(own) for _ in range(ranks.size)]
    if ranks.size > 1:
        dist.all_gather(held, own.contiguous())
    else:
        held = [own]
    if cut.axis is None:
        if not all(torch.equal(held[0], other) for other in held):
            raise ValueError("the replicas of a tensor differ")
        return held[0]
    if not cut.fused:
        return torch.cat(held, cut.axis)
    parts_of_ranks = [tensor.chunk(len(cut.fused)) for tensor in held]
    return torch.cat([torch.cat(parts, cut.axis) for parts in zip(*parts_of_ranks, strict=True)])


def _digest(tensor: Tensor) -> str:
    values: Any = tensor.contiguous().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()

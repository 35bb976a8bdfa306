"""The plan of a second save, when nothing but values has changed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.mapping.nesting import DictKey, Path
from dist_checkpointing.planning import DefaultSavePlanner
from dist_checkpointing.planning.layout import RowBlockLayout
from dist_checkpointing.planning.plan_save import PlanCache, plan_save

_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class CachedSave:
    """What planning costs when the last plan still holds.

    Attributes:
        tensors: in the state.
        first_seconds: to make the plan.
        seconds: to find out that it holds, median.
        exchanged_bytes: that a rank then sends to plan.
    """

    tensors: int
    first_seconds: float
    seconds: float
    exchanged_bytes: int


class _Counting(SingleProcess):
    """Counts what a rank would send."""

    def __init__(self) -> None:
        self.sent = 0

    def all_same(self, number: int | None) -> bool:
        self.sent += 16  # two 64-bit integers in one all-reduce
        return super().all_same(number)

    def agree(self, step: str, error: Exception | None) -> None:
        self.sent += 4  # one 32-bit integer in one all-reduce
        super().agree(step, error)


def measure_cached(tensors: int) -> CachedSave:
    """Plan the same state again and again with one PlanCache."""
    state: dict[Path, ShardedBase] = {
        (DictKey(i),): ShardedTensor.from_rank_offsets(f"layers.{i}.weight", torch.ones(1024))
        for i in range(tensors)
    }
    cache, seconds, comm = PlanCache(), [], _Counting()
    for _ in range(_ROUNDS + 1):
        comm = _Counting()
        begin = time.perf_counter()
        plan_save(state, DefaultSavePlanner(), RowBlockLayout(), comm, cache=cache)
        seconds.append(time.perf_counter() - begin)
    return CachedSave(tensors, seconds[0], median(seconds[1:]), comm.sent)

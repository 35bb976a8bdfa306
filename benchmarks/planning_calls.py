"""Planning as one rank of many does it, without the others: all that knows how planning is called.

Every rank's message is made in this process, and rank 0 plans with all of them, as each rank of a
real job does. Nothing is written. Seconds are those of the processor: planning waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import DictKey, Path
from dist_checkpointing.planning import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.save_plan import (
    PlanCache,
    RankFacts,
    SavePlanning,
    exchanged_parts,
)
from dist_checkpointing.planning.table_exchange import packed_message

T = TypeVar("T")

Leaves = dict[Path, ShardedBase]


def as_leaves(tensors: Iterable[ShardedTensor]) -> Leaves:
    """What planning takes, for tensors in their order."""
    return {(DictKey(number),): tensor for number, tensor in enumerate(tensors)}


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank sends to plan a save.

    Attributes:
        exchanged: What all ranks get of it.
        late: Tables by digest, of which only the lowest rank that holds one sends it.
    """

    exchanged: bytes
    late: Mapping[bytes, bytes]

    def __len__(self) -> int:
        """Bytes that the rank would send if it held all of its tables alone."""
        return len(self.exchanged) + sum(map(len, self.late.values()))


def message_of(leaves: Leaves, ranks: int) -> Message:
    """What one of so many ranks sends to plan a save."""
    planner = DefaultSavePlanner()
    planner.configure_planner(leaves, is_coordinator=False, rank=0, layout=RowBlockLayout())
    table = planner.build_local_plan().table
    parts, _ = exchanged_parts(table)
    return Message(*packed_message(parts, RankFacts(("", "")), ranks))


class _OneOfMany(SingleProcess):
    """Rank 0, for which the messages of the other ranks come from memory."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.world_size = len(messages)
        self.arrived = 0.0
        self._messages = messages
        self._late: dict[int, list[bytes]] = {}

    def exchange_bytes(
        self, step: str, produce: Callable[[], bytes], number: Callable[[], int | None]
    ) -> list[bytes]:
        del step, number
        produce()
        seen: set[bytes] = set()
        for rank, message in enumerate(self._messages):
            if late := [digest for digest in message.late if digest not in seen]:
                self._late[rank] = late
                seen.update(late)
        self.arrived = time.process_time()
        return [message.exchanged for message in self._messages]

    def all_gather(self, value: T) -> list[T]:
        del value
        streams: list[Any] = [self._stream(rank) for rank in range(self.world_size)]
        return streams

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        tensor.numpy()[:] = np.frombuffer(self._stream(source), np.uint8)

    def _stream(self, rank: int) -> bytes:
        late = self._messages[rank].late
        return b"".join(late[digest] for digest in self._late.get(rank, ()))


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned save.

    Attributes:
        index: What the checkpoint will hold.
        exchange_seconds: To make tables of what has arrived.
        seconds: In all.
    """

    index: Index
    exchange_seconds: float
    seconds: float

    def read_index(self) -> tuple[int, float]:
        """Bytes of the index file, and the seconds that a load takes to read them."""
        data = self.index.to_json()
        begin = time.process_time()
        Index.from_json(data)
        return len(data), time.process_time() - begin


def plan_of_rank0(leaves: Leaves, messages: Sequence[Message]) -> Planned:
    """Plan a save with the messages of all ranks, of which the first is made again."""
    comm = _OneOfMany(messages) if len(messages) > 1 else SingleProcess()
    begin = time.process_time()
    planning = SavePlanning(leaves, DefaultSavePlanner(), RowBlockLayout(), comm)
    exchanged = planning.exchange(comm)
    arrived = time.process_time()
    _, index, _ = planning.plan_from_tables(exchanged)
    done = time.process_time()
    received = comm.arrived if isinstance(comm, _OneOfMany) else begin
    return Planned(index, arrived - received, done - begin)


def load_plan(wanted: Leaves, stored: Index) -> tuple[LoadPlan, float]:
    """What one rank reads, and the seconds to find that out."""
    index = replace(stored)  # knows nothing from an earlier round
    planner = DefaultLoadPlanner()
    begin = time.process_time()
    planner.configure_planner(wanted, index, is_coordinator=True, rank=0)
    plan = planner.build_local_plan()
    return plan, time.process_time() - begin


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


class CachedPlan:
    """Plans the same state again and again with one ``PlanCache``."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._cache = PlanCache()

    def plan(self) -> tuple[float, int]:
        """Seconds, and bytes that a rank sends."""
        comm = _Counting()
        begin = time.process_time()
        SavePlanning(
            self._leaves, DefaultSavePlanner(), RowBlockLayout(), comm, cache=self._cache
        ).agree(comm)
        return time.process_time() - begin, comm.sent

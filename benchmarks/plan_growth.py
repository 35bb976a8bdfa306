"""Plans for a model on any number of simulated ranks, ours and torch DCP's."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as DCPSavePlanner

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.mapping.nesting import DictKey
from dist_checkpointing.planning import DefaultLoadPlanner, DefaultSavePlanner
from dist_checkpointing.planning.layout import RowBlockLayout
from dist_checkpointing.planning.packing import pack
from dist_checkpointing.planning.plan_save import AgreedPlan, plan_save

T = TypeVar("T")

TENSOR_PARALLEL = 8
PIPELINE_STAGES = 8
LOAD_TENSOR_PARALLEL = 4
_ROWS, _COLUMNS = 512, 4096
_REPEATED_BELOW_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Growth:
    """What planning cost with so many ranks.

    Attributes:
        ranks: that save together.
        tensors: that each of them holds.
        exchanged_bytes: what all ranks send, together.
        exchange_seconds: to make objects of what has arrived, on one rank.
        plan_seconds: to check it and decide who writes what.
        index_bytes: of what every later load reads first.
        load_plan_seconds: for one rank to decide what it reads, with another tensor parallelism.
    """

    ranks: int
    tensors: int
    exchanged_bytes: int
    exchange_seconds: float
    plan_seconds: float
    index_bytes: int
    load_plan_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its part of a tensor, its stage, and which copy of both it is."""

    tensor: int
    stage: int
    copy: int

    @classmethod
    def of(cls, rank: int, tensor_parallel: int = TENSOR_PARALLEL) -> Place:
        rest, tensor = divmod(rank, tensor_parallel)
        copy, stage = divmod(rest, PIPELINE_STAGES)
        return cls(tensor, stage, copy)


def model_part(
    place: Place, tensors: int, tensor_parallel: int = TENSOR_PARALLEL
) -> dict[Any, ShardedTensor]:
    """The leaves of a rank: of ten tensors seven are cut by rows, three are on every rank."""
    leaves: dict[Any, ShardedTensor] = {}
    for number in range(tensors):
        key = f"decoder.layers.{place.stage * tensors + number // 10}.module{number % 10}.weight"
        if number % 10 < 7:
            rows = _ROWS // tensor_parallel
            leaf = ShardedTensor(
                key,
                None,
                torch.bfloat16,
                (rows, _COLUMNS),
                (_ROWS, _COLUMNS),
                (rows * place.tensor, 0),
                (tensor_parallel, 1),
                replica_id=(0, 0, place.copy),
            )
        else:
            replica = (0, place.tensor, place.copy)
            shape = (_COLUMNS,)
            leaf = ShardedTensor(key, None, torch.float32, shape, shape, (0,), (1,), replica)
        leaves[(DictKey(key),)] = leaf
    return leaves


class _OneOfMany(SingleProcess):
    """Rank 0, for whom the other ranks speak from memory."""

    def __init__(self, brought: Sequence[bytes]) -> None:
        self.world_size = len(brought)
        self.seconds = 0.0
        self._brought = brought

    def exchange(self, step: str, produce: Callable[[], T]) -> list[T]:
        del step
        produce()
        begin = time.perf_counter()
        values = [pickle.loads(value) for value in self._brought]  # noqa: S301 - our own
        self.seconds = time.perf_counter() - begin
        return values


def measure_ours(ranks: int, tensors: int) -> Growth:
    """Plan a save by ``plan_save`` and a load by DefaultLoadPlanner."""

    @cache
    def brought(tensor: int, stage: int, is_first: bool) -> bytes:
        leaves = model_part(Place(tensor, stage, 0 if is_first else 1), tensors)
        planner = DefaultSavePlanner()
        planner.configure_planner(leaves, is_coordinator=False, rank=0, layout=RowBlockLayout())
        table = planner.build_local_plan().table
        return pickle.dumps((None, pack(table), pack(table.take(slice(0, 0)))))

    places = [Place.of(rank) for rank in range(ranks)]
    everything = [brought(place.tensor, place.stage, place.copy == 0) for place in places]
    best: tuple[float, float] | None = None
    agreed: AgreedPlan | None = None
    for _ in range(3):
        comm = _OneOfMany(everything)
        begin = time.perf_counter()
        agreed = plan_save(
            model_part(places[0], tensors), DefaultSavePlanner(), RowBlockLayout(), comm
        )
        seconds = time.perf_counter() - begin
        best = min(best or (seconds, comm.seconds), (seconds, comm.seconds))
        if seconds > _REPEATED_BELOW_SECONDS:
            break
    assert agreed is not None
    assert best is not None
    return Growth(
        ranks,
        tensors,
        sum(map(len, everything)),
        best[1],
        best[0] - best[1],
        len(agreed.index.to_json()),
        min(_load_plan_seconds(agreed.index, tensors) for _ in range(3)),
    )


def _load_plan_seconds(stored: Index, tensors: int) -> float:
    wanted = model_part(Place(1, 2, 0), tensors, LOAD_TENSOR_PARALLEL)
    index = replace(stored)  # knows nothing from an earlier round
    planner = DefaultLoadPlanner()
    begin = time.perf_counter()
    planner.configure_planner(wanted, index, is_coordinator=True, rank=0)
    planner.build_local_plan()
    return time.perf_counter() - begin


def measure_dcp(ranks: int, tensors: int) -> Growth:
    """Deduplicate, plan and validate with torch DCP's own default planner."""

    @cache
    def brought(tensor: int, stage: int) -> bytes:
        leaves = model_part(Place(tensor, stage, 0), tensors)
        return pickle.dumps(dcp.SavePlan([_dcp_item(leaf) for leaf in leaves.values()]))

    places = [Place.of(rank) for rank in range(ranks)]
    everything = [brought(place.tensor, place.stage) for place in places]
    planner = DCPSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    begin = time.perf_counter()
    plans = [pickle.loads(plan) for plan in everything]  # noqa: S301 - our own
    arrived = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    done = time.perf_counter()
    return Growth(
        ranks,
        tensors,
        sum(map(len, everything)),
        arrived - begin,
        done - arrived,
        len(pickle.dumps(metadata)),
    )


def _dcp_item(leaf: ShardedTensor) -> dcp.WriteItem:
    offset, shape = torch.Size(leaf.global_offset), torch.Size(leaf.local_shape)
    return dcp.WriteItem(
        index=dcp_metadata.MetadataIndex(leaf.key, offset),
        type=dcp.WriteItemType.SHARD,
        tensor_data=dcp.TensorWriteData(
            chunk=dcp_metadata.ChunkStorageMetadata(offset, shape),
            properties=dcp_metadata.TensorProperties(dtype=leaf.dtype),
            size=torch.Size(leaf.global_shape),
        ),
    )

"""What planning costs as ranks, shards and pieces grow."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata, planner as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dist_checkpointing.mapping import ShardedTensor
from planning_calls import (
    CachedPlan,
    Message,
    Planned,
    as_leaves,
    load_plan,
    message_of,
    plan_of_rank0,
)
from probes import available_mib, watched
from runner import SkippedError, Stage, Way
from world import World

_TENSOR_PARALLEL = 8
_PIPELINE_STAGES = 8
_LOAD_TENSOR_PARALLEL = 4
_ROWS, _COLUMNS = 512, 4096
_MOST_SECONDS = 40.0
_MOST_OF_MEMORY = 0.7

Model = Callable[[int], list[ShardedTensor]]
"""Rank -> its shards."""


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that save together, and what one of them loads with another cut.

    Attributes:
        ranks: Number of ranks.
        shards: That each of them holds.
        kind_of: Rank -> a number that ranks with the same message share.
        shards_of: The shards of the ranks of a kind.
        wanted: What the loading rank asks for.
    """

    ranks: int
    shards: int
    kind_of: Callable[[int], int]
    shards_of: Model
    wanted: Callable[[], list[ShardedTensor]]


def _model_part(tensors: int, tensor: int, stage: int, copy: int, cut: int) -> list[ShardedTensor]:
    """Of ten tensors seven are cut by rows over ``cut`` ranks, three are on every rank."""
    shards = []
    for number in range(tensors):
        key = f"decoder.layers.{stage * tensors + number // 10}.module{number % 10}.weight"
        if number % 10 < 7:
            rows = _ROWS // cut
            cell = ((_ROWS, _COLUMNS), (rows * tensor, 0), (cut, 1), (0, 0, copy))
            shards.append(ShardedTensor(key, None, torch.bfloat16, (rows, _COLUMNS), *cell))
        else:
            whole = ((_COLUMNS,), (0,), (1,), (0, tensor, copy))
            shards.append(ShardedTensor(key, None, torch.float32, (_COLUMNS,), *whole))
    return shards


def model_job(ranks: int, tensors: int) -> Job:
    """A model cut by 8 tensor parallel ranks and 8 stages; the rest of the ranks are copies."""
    kinds = _TENSOR_PARALLEL * _PIPELINE_STAGES

    def shards_of(kind: int) -> list[ShardedTensor]:
        copy, place = divmod(kind, kinds)
        stage, tensor = divmod(place, _TENSOR_PARALLEL)
        return _model_part(tensors, tensor, stage, copy, _TENSOR_PARALLEL)

    # All copies but the first send the same.
    return Job(
        ranks,
        tensors,
        lambda rank: rank if rank < kinds else kinds + rank % kinds,
        shards_of,
        lambda: _model_part(tensors, 1, 0, 0, _LOAD_TENSOR_PARALLEL),
    )


def _flat_part(key: str, shape: tuple[int, int], start: int, stop: int) -> ShardedTensor:
    return ShardedTensor(
        key,
        None,
        torch.float32,
        shape,
        shape,
        (0, 0),
        (1, 1),
        flattened_range=slice(start, stop),
    )


def flattened_job(ranks: int, parameters: int) -> Job:
    """A distributed optimizer: each rank holds one run of elements of every parameter."""
    shape = (500, 1000)

    def part(rank: int, count: int) -> list[ShardedTensor]:
        size = shape[0] * shape[1]
        ends = (rank * size // count, (rank + 1) * size // count)
        return [_flat_part(f"optimizer.exp_avg.{n}", shape, *ends) for n in range(parameters)]

    other = max(1, ranks * 3 // 4)
    return Job(
        ranks, parameters, lambda rank: rank, lambda rank: part(rank, ranks), lambda: part(1, other)
    )


def pieces_job(pieces: int) -> Job:
    """One tensor in flattened pieces, all on one rank; wanted is what lies in five of them."""
    shape, length = (pieces, 64), 64
    middle = pieces // 2 * length
    return Job(
        1,
        pieces,
        lambda rank: rank,
        lambda _: [_flat_part("flat", shape, n * length, (n + 1) * length) for n in range(pieces)],
        lambda: [_flat_part("flat", shape, middle + 1, middle + 4 * length + 1)],
    )


@dataclass(slots=True)
class Ladder:
    """What the smaller jobs took, so that one that is too large is not begun.

    Attributes:
        messages: (number of ranks, of shards, kind of rank) -> message.
        steps: (number of shards of all ranks, peak MiB, seconds) of the jobs that ran.
    """

    messages: dict[tuple[int, int, int], Message] = field(default_factory=dict)
    steps: list[tuple[int, float, float]] = field(default_factory=list)

    def require_room(self, job: Job) -> None:
        if not self.steps:
            return
        before, mib, seconds = self.steps[-1]
        times = job.ranks * job.shards / before
        room = _MOST_OF_MEMORY * available_mib()
        if mib * times > room:
            raise SkippedError(f"needs about {mib * times:,.0f} MiB, and there are {room:,.0f}")
        if seconds * times > _MOST_SECONDS:
            raise SkippedError(f"needs about {seconds * times:.0f} s")


class PlanWay(Way):
    """Ours: exchange, checks and plan of a save on rank 0, and the plan of a load.

    Args:
        job: What the ranks hold.
        ladder: Of the jobs of the case.
        world: The one rank.
    """

    family = "ours"

    def __init__(self, job: Job, ladder: Ladder, world: World) -> None:
        self.name = f"ours, {job.ranks:,} x {job.shards:,}"
        self._job = job
        self._ladder = ladder
        self._world = world
        self._messages: list[Message] = []

    def warm_up(self) -> Mapping[str, float]:
        job, values = self._job, dict[str, float]()
        self._ladder.require_room(job)

        def first() -> None:
            for rank in range(job.ranks):
                kind = (job.ranks, job.shards, job.kind_of(rank))
                if kind not in self._ladder.messages:
                    shards = as_leaves(job.shards_of(kind[2]))
                    message = message_of(shards, job.ranks)
                    self._ladder.messages[kind] = message
                self._messages.append(self._ladder.messages[kind])
            leaves = as_leaves(job.shards_of(0))
            with watched() as watch:
                planned = plan_of_rank0(leaves, self._messages)
            self._ladder.steps.append((job.ranks * job.shards, watch.peak_mib, planned.seconds))
            values["peak MiB"], values["held MiB"] = watch.peak_mib, watch.kept_mib()
            values["save plan s"] = planned.seconds
            values["exchange s"] = planned.exchange_seconds
            values["sent / shard bytes"] = sum(map(len, self._messages)) / job.ranks / job.shards
            values["index bytes"], values["read index s"] = planned.read_index()
            plan, seconds = load_plan(as_leaves(job.wanted()), planned.index)
            values["load plan s"] = seconds
            values["items read"] = len(plan.items)

        self._world.timed(first)
        return values

    def round(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        leaves, wanted = as_leaves(self._job.shards_of(0)), as_leaves(self._job.wanted())
        best: list[Planned] = []

        def save() -> float:
            kept: list[Planned] = []
            self._world.timed(lambda: kept.append(plan_of_rank0(leaves, self._messages)))
            best[:] = [min(best + kept, key=lambda planned: planned.seconds)]
            return kept[0].seconds

        values["save plan s"] = self._world.fastest(save, 3)
        values["exchange s"] = best[0].exchange_seconds
        index = best[0].index
        values["read index s"] = min(best[0].read_index()[1] for _ in range(3))
        values["load plan s"] = min(load_plan(wanted, index)[1] for _ in range(3))
        return values


class DcpPlanWay(Way):
    """Torch DCP: deduplicate, plan and validate with its own default planner.

    Args:
        job: What the ranks hold.
        world: The one rank.
    """

    family = "dcp"

    def __init__(self, job: Job, world: World) -> None:
        self.name = f"torch DCP, {job.ranks:,} x {job.shards:,}"
        self.point = job.ranks
        self._job = job
        self._world = world

    def round(self) -> Mapping[str, float]:
        job, values = self._job, dict[str, float]()

        @cache
        def message(kind: int) -> bytes:
            items = [_dcp_item(shard) for shard in job.shards_of(kind)]
            return pickle.dumps(dcp.SavePlan(items))

        def plan() -> None:
            messages = [message(job.kind_of(rank)) for rank in range(job.ranks)]
            planner = DefaultSavePlanner(flatten_state_dict=False)
            planner.set_up_planner({}, is_coordinator=True)
            begin = time.process_time()
            plans = [pickle.loads(plan) for plan in messages]  # noqa: S301 - our own
            arrived = time.process_time()
            _, metadata = planner.create_global_plan(plans)
            values["save plan s"] = time.process_time() - begin
            values["exchange s"] = arrived - begin
            values["sent / shard bytes"] = sum(map(len, messages)) / job.ranks / job.shards
            values["index bytes"] = len(pickle.dumps(metadata))

        self._world.timed(plan)
        return values


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


@dataclass(frozen=True, slots=True)
class PlanCase:
    """Opens the ways of a case; see ``Case.open``.

    Attributes:
        make: (first, second of a size) -> the job.
        sizes: For our ways, from small to large.
        dcp_sizes: For those of torch DCP.
        tiny: Sizes of a tiny run.
    """

    make: Callable[..., Job]
    sizes: Sequence[tuple[int, ...]]
    dcp_sizes: Sequence[tuple[int, ...]] = ()
    tiny: tuple[int, ...] = (128, 10)

    def __call__(self, stage: Stage) -> list[Way]:
        is_tiny, ladder = stage.settings.tiny, Ladder()
        sizes = [self.tiny] if is_tiny else self.sizes
        peers = [self.tiny] if is_tiny and self.dcp_sizes else self.dcp_sizes
        ways: list[Way] = [PlanWay(self.make(*size), ladder, stage.world) for size in sizes]
        for way, size in zip(ways, sizes, strict=True):
            # One law for one number of shards a rank.
            way.point = size[0] if size[1:] == sizes[0][1:] else None
        return ways + [DcpPlanWay(self.make(*size), stage.world) for size in peers]


class CachedWay(Way):
    """The plan of a save when nothing but values has changed since the last one."""

    name = "ours"
    family = "ours"

    def __init__(self, tensors: int, world: World) -> None:
        made = (
            ShardedTensor.from_rank_offsets(f"layers.{n}.weight", torch.ones(256))
            for n in range(tensors)
        )
        self._plan = CachedPlan(as_leaves(made)).plan
        self._world = world

    def warm_up(self) -> Mapping[str, float]:
        return {"first plan ms": 1000 * self._plan()[0]}

    def round(self) -> Mapping[str, float]:
        calls = [self._plan() for _ in range(3)]
        return {"plan ms": 1000 * min(seconds for seconds, _ in calls), "sent bytes": calls[0][1]}


def open_cached(stage: Stage) -> list[Way]:
    """5,000 tensors on one rank."""
    return [CachedWay(50 if stage.settings.tiny else 5000, stage.world)]

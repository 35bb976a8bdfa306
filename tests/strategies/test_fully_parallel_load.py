"""What ranks of a group want alike is read once; what each gets is what it would have read."""

import copy
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import Box, Index, read_index
from dist_checkpointing.format.geometry import boxes_of_part
from dist_checkpointing.mapping import flatten, unflatten
from dist_checkpointing.planning import DefaultLoadPlanner, ReadItem
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import (
    FullyParallelLoadStrategyWrapper,
    LoadShardedStrategy,
    TensorStoreLoadShardedStrategy,
    Zarr3LoadShardedStrategy,
    Zarr3SaveShardedStrategy,
    fully_parallel as passing,
)
from dist_checkpointing.strategies.unplanned_strategies import ForeignReader
from dist_checkpointing.testing import assert_same_bits, observed, poisoned, random_bits, run_ranks
from simulated_groups import TinyChunks, each_rank, everybody_fails
from states import shard, wholes
from tiers import examples

Algorithm = Literal["broadcast", "gather_object", "gather_rounds"]

sharing_reads = partial(FullyParallelLoadStrategyWrapper, min_shared_bytes=0)
ALGORITHMS: tuple[Algorithm, ...] = ("broadcast", "gather_object", "gather_rounds")


class Counting:
    """Copies of a strategy, one a rank, and the bytes and chunks that each was told to read."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.num_bytes: dict[int, int] = {}
        self.chunks: dict[int, set[Any]] = {}

    def on(self, rank: int) -> Any:
        def observe(name: str, values: Sequence[Any]) -> None:
            if name == "read_data":
                plan, planner = values
                wanted = (planner.acquire_tensor(item) for item in plan.items)
                self.num_bytes[rank] = sum(tensor.nbytes for tensor in wanted)
                self.chunks[rank] = {item.storage_index for item in plan.items}

        return observed(copy.copy(self._strategy), observe)

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())


class Plain(LoadShardedStrategy):
    """A third party's strategy: it knows the whole tensors, and counts what it is asked for."""

    def __init__(self, full: dict[str, torch.Tensor], *, in_place: bool = True) -> None:
        self.full = full
        self.in_place = in_place
        self.num_bytes = 0

    def check_backend_compatibility(self, loaded_backend: str) -> None: ...

    def check_version_compatibility(self, loaded_version: int) -> None: ...

    can_handle_sharded_objects = True

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, dc.ShardedTensor]:
        del checkpoint_dir
        return {k: shard(k, t) for k, t in self.full.items()}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        rng = dc.ShardedObject("rng", None, (1,), (0,))
        return {**self.load_tensors_metadata(checkpoint_dir), rng.unique_key: rng}

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> dict[str, Any]:
        del checkpoint_dir
        leaves, skeleton = flatten(sharded_state_dict)
        values: dict[Any, Any] = {}
        for path, leaf in leaves.items():
            if isinstance(leaf, dc.ShardedObject):
                values[path] = leaf.unique_key
                continue
            value = expected(self.full[leaf.key], leaf)
            self.num_bytes += value.nbytes
            if self.in_place and leaf.data is not None:
                leaf.data.detach().copy_(value)
                value = leaf.data
            values[path] = value
        result: dict[str, Any] = unflatten(skeleton, values)
        return result


def expected(full: torch.Tensor, leaf: dc.ShardedTensor) -> torch.Tensor:
    box = full[leaf.box.slices()].reshape(leaf.local_shape)
    flat = leaf.flattened_range
    part = box if flat is None else box.reshape(-1)[flat]
    return part.clone(memory_format=torch.contiguous_format)


# --- anything that anybody may want -------------------------------------------------------------

SHAPE = (6, 4, 5)
DTYPE_OF = {"a": torch.int16, "b": torch.bool, "c": torch.complex64, "d": torch.bfloat16}
FULL = {key: random_bits(SHAPE, dtype, i) for i, (key, dtype) in enumerate(DTYPE_OF.items())}


Wish = tuple[dc.ShardedTensor, list[tuple[int, str]]]
"""A part without data, and the ranks that want it, each in memory of some kind."""


def in_memory(part: dc.ShardedTensor, memory: str) -> dc.ShardedTensor:
    leaf = part.without_data()
    if memory != "none":
        given = poisoned(expected(FULL[leaf.key], leaf))
        if memory == "strided" and given.ndim:
            wide = given.new_empty((*given.shape[:-1], 2 * given.shape[-1] + 1))
            wide[..., 1::2] = given
            given = wide[..., 1::2]
        if memory == "parameter" and given.is_floating_point():
            given.requires_grad_()
        if memory == "view" and leaf.key in "ac":  # of which the same bits come back
            given = given.conj() if given.is_complex() else torch._neg_view(given)
        leaf.data = given
    return leaf


@dataclass(frozen=True)
class World:
    groups: list[tuple[int, ...]]
    wishes: list[Wish]

    def leaves(self, rank: int) -> list[dc.ShardedTensor]:
        return [
            in_memory(part, memory)
            for part, who in self.wishes
            for own, memory in who
            if own == rank
        ]

    def unique_bytes(self, index: Index) -> int:
        """What must be read if a group in which anything is shared reads each part once."""
        return sum(self._bytes_of(group, index) for group in self.groups)

    def _bytes_of(self, group: tuple[int, ...], index: Index) -> int:
        wanted = [
            ((wish.key, part), rank)
            for wish, who in self.wishes
            for rank, _ in who
            if rank in group
            for part in stored_parts(index, wish)
        ]
        parts = [part for part, _ in wanted]
        if len(set(parts)) < len(set(wanted)):  # two ranks want the same
            parts = list(set(parts))
        return sum(box.num_elements * DTYPE_OF[key].itemsize for key, box in parts)


def stored_parts(index: Index, wish: dc.ShardedTensor) -> list[Box]:
    """The parts of stored chunks that fill a wish."""
    grid = index[wish.key].grid
    return [
        inside
        for box in boxes_of_part(wish.box, wish.flat_range)
        for chunk, _ in grid.intersecting(box)
        if (inside := grid.box(chunk).intersect(box)) is not None
    ]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_ranks = draw(st.integers(2, 5))
    order = draw(st.permutations(range(num_ranks)))
    edges = [0, *sorted(draw(st.sets(st.integers(1, num_ranks - 1), max_size=2))), num_ranks]
    groups = [tuple(order[a:b]) for a, b in itertools.pairwise(edges)]
    memories = st.sampled_from(["contiguous", "strided", "none", "parameter", "view"])
    who = st.lists(st.tuples(st.integers(0, num_ranks - 1), memories), min_size=1, max_size=6)
    wishes: list[Wish] = []
    for _ in range(draw(st.integers(1, 6))):
        key = draw(st.sampled_from(sorted(DTYPE_OF)))
        prepend = draw(st.integers(0, 1))
        extents = [1] * prepend + [draw(st.integers(1, e)) for e in SHAPE[prepend:]]
        offset = [draw(st.integers(0, e - n)) for e, n in zip(SHAPE, extents, strict=True)]
        flat = None
        if draw(st.booleans()):
            start = draw(st.integers(0, math.prod(extents) - 1))
            flat = slice(start, draw(st.integers(start + 1, math.prod(extents))))
        place: Any = (extents[prepend:], SHAPE, offset, None, 3, prepend, False, flat)
        wishes.append((dc.ShardedTensor(key, None, DTYPE_OF[key], *place), draw(who)))
    return World(groups, wishes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    dc.save(wholes(FULL), folder, TinyChunks())
    return folder


@examples(35)
@given(worlds(), st.sampled_from([1, 60, 10**6]))
def test_every_wish_is_filled_and_read_once(saved: Path, world: World, buffer_bytes: int) -> None:
    options = StorageOptions(buffer_bytes=buffer_bytes, threads=1)
    counting = Counting(Zarr3LoadShardedStrategy(options=options))

    def one(comm: Comm, group: Comm) -> None:
        strategy = sharing_reads(counting.on(comm.rank), group, False, ALGORITHMS[comm.rank % 3])
        wanted = world.leaves(comm.rank)
        loaded: Any = dc.load({"leaves": wanted}, saved, strategy, comm=comm)
        check(wanted, loaded.get("leaves", []), in_place=True)

    each_rank(world.groups, one)
    index = read_index(saved)
    assert index is not None
    assert counting.total == world.unique_bytes(index)


def check(
    wanted: Sequence[dc.ShardedTensor], got: Sequence[torch.Tensor], *, in_place: bool
) -> None:
    for leaf, value in zip(wanted, got, strict=True):
        assert_same_bits(value, expected(FULL[leaf.key], leaf), leaf.key)
        if in_place and leaf.data is not None:
            assert value is leaf.data


@examples(35)
@given(worlds(), st.booleans())
def test_a_third_party_reads_once(world: World, in_place: bool) -> None:
    def one(comm: Comm, group: Comm) -> int:
        base = Plain(FULL, in_place=in_place)
        strategy = sharing_reads(base, group)
        wanted = world.leaves(comm.rank)
        before = [repr(leaf) for leaf in wanted]
        cell = dc.ShardedObject("rng", None, (1,), (0,))
        # A direct call: memory made here must not appear in the caller's leaves.
        loaded = strategy.load({"deep": ({"leaves": wanted}, cell)}, "unused")
        assert [repr(leaf) for leaf in wanted] == before
        check(wanted, loaded["deep"][0]["leaves"], in_place=in_place and group.world_size == 1)
        assert loaded["deep"][1] == "rng/shard_0_1"
        return base.num_bytes

    index = ForeignReader(Plain(FULL), "unused").read_metadata()
    assert sum(each_rank(world.groups, one)) == world.unique_bytes(index)


# --- who reads ----------------------------------------------------------------------------------


def replicas(comm: Comm, full: dict[str, torch.Tensor]) -> dict[str, dc.ShardedTensor]:
    return {key: shard(key, poisoned(data), replica_id=comm.rank) for key, data in full.items()}


def load_copies(
    folder: Path, full: dict[str, torch.Tensor], comm: Comm, strategy: Any, **options: Any
) -> dict[str, Any]:
    """All of each tensor, in place."""
    wanted: Any = replicas(comm, full)
    result: dict[str, Any] = dc.load(wanted, folder, strategy, comm=comm, **options)
    for key, leaf in wanted.items():
        assert result[key] is leaf.data
        assert_same_bits(result[key], full[key], key)
    return result


def test_four_replicas_read_a_quarter_each(tmp_path: Path) -> None:
    full = {f"w{i}": random_bits((32, 16), torch.bfloat16, i) for i in range(12)}
    dc.save(wholes(full), tmp_path)
    counting = Counting(TensorStoreLoadShardedStrategy())

    def one(comm: Comm) -> int:
        done: list[int] = []
        load_copies(
            tmp_path,
            full,
            comm,
            sharing_reads(counting.on(comm.rank)),
            progress=lambda p: done.append(p.bytes_done) if p.phase == "reading" else None,
        )
        return max(done)

    progress = run_ranks(4, one)
    unique = sum(data.nbytes for data in full.values())
    assert set(counting.num_bytes.values()) == {unique // 4}
    assert progress == [unique] * 4


def test_one_large_tensor_is_read_by_all(tmp_path: Path) -> None:
    """Along chunks, so that no chunk is read by two."""
    full = {"w": random_bits((48, 5), torch.int16)}
    dc.save(wholes(full), tmp_path, TinyChunks(codec="zstd"))
    counting = Counting(Zarr3LoadShardedStrategy())
    run_ranks(
        4, lambda comm: load_copies(tmp_path, full, comm, sharing_reads(counting.on(comm.rank)))
    )
    assert counting.total == full["w"].nbytes
    assert max(counting.num_bytes.values()) <= 2 * full["w"].nbytes // 4
    for a, b in itertools.combinations(counting.chunks.values(), 2):
        assert not a & b
    assert len(counting.chunks) == 4


@pytest.mark.parametrize("is_little", [False, True])
def test_little_is_read_by_each(tmp_path: Path, *, is_little: bool) -> None:
    full = {"w": random_bits((32, 16), torch.bfloat16)}
    dc.save(wholes(full), tmp_path, "zarr")
    counting = Counting(Zarr3LoadShardedStrategy())
    num_bytes = full["w"].nbytes

    def one(comm: Comm) -> None:
        base = counting.on(comm.rank)
        wrapper = FullyParallelLoadStrategyWrapper(base, min_shared_bytes=num_bytes + is_little)
        load_copies(tmp_path, full, comm, wrapper)

    run_ranks(3, one)
    assert counting.total == (3 if is_little else 1) * num_bytes


def test_ranks_may_want_other_dtypes_and_shapes(tmp_path: Path) -> None:
    """Only what is the same in memory is shared."""
    dc.save({"w": shard("w", torch.arange(6.0))}, tmp_path, "zarr")

    def one(comm: Comm) -> Any:
        dtype = torch.float64 if comm.rank % 2 else torch.float32
        leaf = shard("w", torch.full((8,), 7.0, dtype=dtype), allow_shape_mismatch=True)
        strategy = sharing_reads(Zarr3LoadShardedStrategy())
        result: Any = dc.load({"w": leaf}, tmp_path, strategy, comm=comm, cast="widen")
        return result["w"]

    for rank, tensor in enumerate(run_ranks(4, one)):
        assert tensor.dtype == (torch.float64 if rank % 2 else torch.float32)
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


# --- caches never lie ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "changed_rank"), [("add", 0), ("drop", 2), ("retype", 0), ("reshard", 2)]
)
def test_a_change_on_one_rank_is_seen_by_all(
    tmp_path: Path, change: str, changed_rank: int
) -> None:
    full = {f"w{i}": torch.arange(64.0).reshape(16, 4) + i for i in range(4)}
    dc.save(wholes(full), tmp_path, "zarr")

    def one(comm: Comm) -> tuple[bool, bool]:
        strategy = sharing_reads(Zarr3LoadShardedStrategy(), None, True)

        def load_all(change: str | None) -> Any:
            wanted: Any = replicas(comm, full)
            del wanted["w3"]
            if change == "add":
                wanted["w3"] = replicas(comm, full)["w3"]
            if change == "drop":
                del wanted["w1"]
            if change == "retype":
                wanted["w1"] = shard("w1", torch.zeros(16, 4).double())
            if change == "reshard":
                wanted["w1"] = shard("w1", torch.zeros(8, 4), (0, 1, 2))
            dc.load(wanted, tmp_path, strategy, comm=comm, cast="any")
            for key, leaf in wanted.items():
                want = expected(full[key], leaf)
                assert torch.equal(leaf.data, want.to(leaf.dtype)), key
            return strategy.cached_distribution

        first, again = load_all(None), load_all(None)
        changed = load_all(change if comm.rank == changed_rank else None)
        return first is again, changed is again

    assert run_ranks(3, one) == [(True, False)] * 3


def test_another_chunk_grid_is_another_sharing(tmp_path: Path) -> None:
    full = {"w": torch.arange(64.0).reshape(16, 4)}
    for name, kind in (("a", Zarr3SaveShardedStrategy), ("b", TinyChunks)):
        dc.save(wholes(full), tmp_path / name, kind())

    def one(comm: Comm) -> bool:
        strategy = sharing_reads(Zarr3LoadShardedStrategy(), None, True)
        seen = []
        for name in "ab":
            load_copies(tmp_path / name, full, comm, strategy)
            seen.append(strategy.cached_distribution)
        return seen[0] is seen[1]

    assert run_ranks(2, one) == [False, False]


# --- failures -----------------------------------------------------------------------------------


TWO_GROUPS = ((0, 1), (2, 3))


@pytest.mark.parametrize("where", ["reading", "packing", "unpacking"])
def test_one_failing_rank_fails_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    full = {f"w{i}": random_bits((8, 4), torch.float32, i) for i in range(6)}
    dc.save(wholes(full), tmp_path, "zarr")
    bad = 2

    class Broken(DefaultLoadPlanner):
        def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
            raise OSError(5, f"broken disk below {item.dest_index.fqn}")

    own = threading.local()
    copy = passing._copy

    def broken(*args: Any, packs: bool) -> None:
        if own.is_bad and ("packing" if packs else "unpacking") == where:
            raise OSError(5, "broken memory")
        copy(*args, packs=packs)

    monkeypatch.setattr(passing, "_copy", broken)

    def one(comm: Comm, group: Comm) -> None:
        planner = Broken() if where == "reading" and comm.rank == bad else None
        own.is_bad = comm.rank == bad
        base = Zarr3LoadShardedStrategy(planner=planner)
        strategy = sharing_reads(base, group)
        dc.load(replicas(comm, full), tmp_path, strategy, comm=comm)

    error = everybody_fails(TWO_GROUPS, one)[0]
    assert isinstance(error, dc.RankFailedError)
    assert error.ranks == (bad,)
    assert ("broken disk" if where == "reading" else "broken memory") in str(error)


def test_a_third_party_that_returns_something_else_is_found_out() -> None:
    class Wrong(Plain):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> dict[str, Any]:
            del checkpoint_dir
            return {key: torch.ones(2).double() for key in sharded_state_dict}

    def one(comm: Comm, group: Comm) -> None:
        del group
        wanted = {"w": shard("w", torch.ones(2), replica_id=comm.rank)}
        sharing_reads(Wrong({}), comm).load(wanted, "unused")

    error = everybody_fails(TWO_GROUPS, one)[0]
    assert isinstance(error, dc.StateMismatchError)
    assert [f.key for f in error.findings] == ["w"]


def test_an_unknown_way_of_passing_on() -> None:
    with pytest.raises(ValueError, match="exchange_algo must be one of 'broadcast'"):
        FullyParallelLoadStrategyWrapper(Plain({}), exchange_algo="pigeon")  # type: ignore[arg-type]


def test_what_is_said_of_the_checkpoint_is_what_the_strategy_says(tmp_path: Path) -> None:
    wrapper = FullyParallelLoadStrategyWrapper(Plain(FULL))
    assert wrapper.load_tensors_metadata(tmp_path).keys() == FULL.keys()
    assert wrapper.load_sharded_metadata(tmp_path).keys() == {*FULL, "rng/shard_0_1"}
    dc.save({"w": shard("w", torch.ones(4))}, tmp_path, "zarr")
    planned = FullyParallelLoadStrategyWrapper(Zarr3LoadShardedStrategy())
    for one in (planned, planned.for_format("zarr", 2)):
        assert one.load_sharded_metadata(tmp_path).keys() == {"w"}
        given = torch.zeros(4)
        assert one.load({"w": shard("w", given)}, tmp_path)["w"] is given
        assert torch.equal(given, torch.ones(4))
    planned.for_format("zarr", 2).remove_sharded_tensors(tmp_path, "w")
    assert not planned.load_tensors_metadata(tmp_path)


def test_another_number_of_ranks_is_another_sharing(tmp_path: Path) -> None:
    """The same wrappers load with all ranks, and then with some of them."""
    full = {f"w{i}": random_bits((8, 4), torch.float32, i) for i in range(4)}
    dc.save(wholes(full), tmp_path, "zarr")
    wrappers = [sharing_reads(Zarr3LoadShardedStrategy(), None, True) for _ in range(4)]
    for count in (4, 2):
        run_ranks(count, lambda comm: load_copies(tmp_path, full, comm, wrappers[comm.rank]))


def test_what_else_a_rank_wants_does_not_hide_what_it_shares(tmp_path: Path) -> None:
    full = {"w": random_bits((8, 4), torch.float32), "deep": random_bits((2,) * 6, torch.int8)}
    dc.save(wholes(full), tmp_path, "zarr")
    counting = Counting(Zarr3LoadShardedStrategy())

    def one(comm: Comm) -> None:
        wanted = {k: t for k, t in full.items() if k == "w" or comm.rank == 1}
        load_copies(tmp_path, wanted, comm, sharing_reads(counting.on(comm.rank)))

    run_ranks(3, one)
    assert counting.total == sum(data.nbytes for data in full.values())


def test_a_planner_that_converts_gets_what_is_stored(tmp_path: Path) -> None:
    """It has memory of its own for what is read, which holds nothing before and nothing later."""
    full = {f"w{i}": torch.arange(8, dtype=torch.int16) + 100 * i for i in range(4)}
    dc.save(wholes(full), tmp_path, "zarr")

    class Scaling(DefaultLoadPlanner):
        def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
            return torch.zeros(item.lengths, dtype=torch.int16)

        def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
            super().acquire_tensor(item).copy_(tensor * 0.5)

    def one(comm: Comm) -> None:
        state: Any = {key: shard(key, torch.zeros(8), replica_id=comm.rank) for key in full}
        base = Zarr3LoadShardedStrategy(planner=Scaling() if comm.rank < 2 else None)
        dc.load(state, tmp_path, sharing_reads(base), comm=comm, cast="any")
        for key, leaf in state.items():
            assert torch.equal(leaf.data, full[key] * (0.5 if comm.rank < 2 else 1)), key

    run_ranks(4, one)

"""Replicas share out what is written: exactly once, by a holder, and nobody's leaves change."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from dist_checkpointing import (
    CheckpointingException,
    InvalidShardingError,
    RankFailedError,
    ShardedObject,
    ShardedTensor,
    load_plain_tensors,
    save,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import flatten, is_main_replica
from dist_checkpointing.planning import BalancedSavePlanner, DefaultSavePlanner, WriteItem
from dist_checkpointing.strategies import (
    AsyncRequest,
    AsyncSaveShardedStrategy,
    FullyParallelSaveStrategyWrapper,
    SaveShardedStrategy,
    TensorStoreSaveShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrSaveShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from simulated_groups import TinyChunks, each_rank, everybody_fails
from tiers import examples


@dataclass(frozen=True)
class Part:
    """A part of a tensor, who holds it, and whose copy is the main replica."""

    key: str
    offset: int
    rows: int
    flat: tuple[int, int] | None
    holders: tuple[int, ...]
    main: int


@dataclass(frozen=True)
class World:
    """Ranks in groups, and what they hold."""

    groups: tuple[tuple[int, ...], ...]
    rows: Mapping[str, int]
    parts: tuple[Part, ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups if rank in group)

    def writers(self, part: Part) -> set[int]:
        """Who may write it."""
        return set(part.holders) & set(self.group_of(part.main))

    def full(self, key: str) -> torch.Tensor:
        first = 1000 * (1 + sorted(self.rows).index(key))
        return torch.arange(first, first + 3 * self.rows[key]).reshape(-1, 3)

    def leaves(self, rank: int) -> list[ShardedTensor]:
        return [self.leaf(part, rank) for part in self.parts if rank in part.holders]

    def leaf(self, part: Part, rank: int) -> ShardedTensor:
        data = self.full(part.key)[part.offset : part.offset + part.rows].clone()
        flat = None
        if part.flat is not None:
            flat = slice(*part.flat)
            data = data.reshape(-1)[flat].clone()
        replica_id: Any = 0 if rank == part.main else (0, 1 + part.holders.index(rank))
        return ShardedTensor(
            part.key,
            data,
            data.dtype,
            (part.rows, 3),
            (self.rows[part.key], 3),
            (part.offset, 0),
            None,
            replica_id,
            flattened_range=flat,
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_ranks = draw(st.integers(1, 6))
    order = draw(st.permutations(range(num_ranks)))
    cuts = sorted(draw(st.sets(st.integers(1, num_ranks - 1)))) if num_ranks > 1 else []
    edges = [0, *cuts, num_ranks]
    groups = tuple(tuple(order[a:b]) for a, b in itertools.pairwise(edges))
    some_ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted)
    rows, parts = {}, []
    for key in "abcd"[: draw(st.integers(1, 4))]:
        count, height = draw(st.integers(1, 4)), draw(st.integers(1, 6))
        rows[key] = count * height
        for position in range(count):
            elements = 3 * height
            flat_cuts = sorted(draw(st.sets(st.integers(1, elements - 1), max_size=2)))
            flat_edges = [0, *flat_cuts, elements]
            ranges: list[tuple[int, int] | None] = [None]
            if flat_cuts:
                ranges = list(itertools.pairwise(flat_edges))
            for flat in ranges:
                holders = draw(some_ranks)
                main = draw(st.sampled_from(holders))
                parts.append(Part(key, position * height, height, flat, tuple(holders), main))
    return World(groups, rows, tuple(parts))


@examples(60)
@given(worlds(), st.sampled_from([TinyChunks, Zarr3SaveShardedStrategy]))
def test_a_balanced_plan_writes_everything_once(world: World, kind: type[Any]) -> None:
    """Whatever is replicated, and whoever is in no group."""

    def plan(comm: Comm, group: Comm) -> Any:
        strategy: Any = FullyParallelSaveStrategyWrapper(kind(), group).resolved()
        leaves, _ = flatten({"leaves": world.leaves(comm.rank)})
        planning = strategy.planning(leaves, strategy.make_writer(Path("unused")), comm)
        plan, _ = planning.agree(comm)
        return [(item, planning.planner.get_data(item)) for item in plan.items]

    written = {key: torch.zeros(rows * 3, dtype=torch.int64) for key, rows in world.rows.items()}
    times = {key: torch.zeros(rows * 3, dtype=torch.int64) for key, rows in world.rows.items()}
    for rank, items in enumerate(each_rank(world.groups, plan)):
        for item, data in items:
            where = place(world, item)
            written[item.index.fqn][where] = data.reshape(-1)
            times[item.index.fqn][where] += 1
            assert rank in allowed(world, item)
    for key in world.rows:
        assert (times[key] == 1).all()
        assert torch.equal(written[key].reshape(-1, 3), world.full(key))


def place(world: World, item: WriteItem) -> torch.Tensor:
    """Positions of an item's elements in the flattened tensor."""
    part = item.tensor_data
    assert part is not None
    positions = torch.arange(3 * world.rows[item.index.fqn]).reshape(-1, 3)
    own = positions[part.chunk.slices()].reshape(-1)
    return own if part.flat_range is None else own[slice(*part.flat_range)]


def allowed(world: World, item: WriteItem) -> set[int]:
    """The ranks that may write an item: those of the part that it lies in."""
    data = item.tensor_data
    assert data is not None
    for part in world.parts:
        first, last = data.chunk.offset[0], data.chunk.stop[0]
        inside = part.key == item.index.fqn and part.offset <= first
        inside = inside and last <= part.offset + part.rows
        if inside and data.flat_range is not None and part.flat is not None:
            inside = part.flat[0] <= data.flat_range[0] and data.flat_range[1] <= part.flat[1]
        if inside:
            return world.writers(part)
    raise AssertionError(item)


class Recorder(SaveShardedStrategy):
    """A third party's strategy that writes nowhere."""

    def __init__(self) -> None:
        super().__init__("recorder", 1)
        self.given: list[Any] = []

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        del checkpoint_dir
        self.given.append(sharded_state_dict)


@examples(60)
@given(worlds())
def test_a_third_party_writes_everything_once(world: World) -> None:
    def one(comm: Comm, group: Comm) -> list[ShardedTensor]:
        base = Recorder()
        state: dict[str, Any] = {
            "deep": [world.leaves(comm.rank)],
            "rng": ShardedObject("rng", 5, (1,), (0,), 3),
        }
        before = copy.deepcopy(state)
        FullyParallelSaveStrategyWrapper(base, group).save(state, "unused")
        assert repr(state) == repr(before)
        (seen,) = base.given
        assert seen["rng"].replica_id == 3
        for own, marked in zip(state["deep"][0], seen["deep"][0], strict=True):
            assert marked.data is own.data
            assert replace(marked, replica_id=own.replica_id) == own
        return [leaf for leaf in seen["deep"][0] if is_main_replica(leaf.replica_id)]

    written = [
        (rank, leaf) for rank, leaves in enumerate(each_rank(world.groups, one)) for leaf in leaves
    ]
    for part in world.parts:
        model = world.leaf(part, part.main)
        writers = [
            rank
            for rank, leaf in written
            if (leaf.key, leaf.box, leaf.flat_range) == (model.key, model.box, model.flat_range)
        ]
        assert len(writers) == 1
        assert writers[0] in world.writers(part)
    assert len(written) == len(world.parts)


@pytest.mark.parametrize(
    "kind",
    [Zarr3SaveShardedStrategy, ZarrSaveShardedStrategy, TensorStoreSaveShardedStrategy],
)
def test_a_checkpoint_by_four_replicas(tmp_path: Path, kind: type[Any]) -> None:
    full = {f"w{i}": torch.arange(1000.0 * (i + 1)).reshape(-1, 10) for i in range(8)}

    def one(comm: Comm) -> int:
        state = {
            key: ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=comm.rank)
            for key, data in full.items()
        }
        done: list[int] = []
        strategy = FullyParallelSaveStrategyWrapper(kind())
        save(
            state,
            tmp_path / "c",
            strategy,
            comm=comm,
            progress=lambda p: done.append(p.bytes_done) if p.phase == "writing" else None,
        )
        assert [leaf.replica_id for leaf in state.values()] == [comm.rank] * 8
        return max(done)

    written = run_ranks(4, one)
    assert sum(written) == sum(data.nbytes for data in full.values())
    assert max(written) <= 1.05 * sum(written) / 4
    saved = load_plain_tensors(tmp_path / "c")
    assert saved.keys() == full.keys()
    assert all(torch.equal(saved[key], full[key]) for key in full)


class Renaming(DefaultSavePlanner):
    """A user's planner."""

    def build_local_plan(self) -> Any:
        plan = super().build_local_plan()
        items = [replace(i, index=replace(i.index, fqn=f"new.{i.index.fqn}")) for i in plan.items]
        return plan.with_items(items)


def test_a_strategy_with_a_planner_of_its_own(tmp_path: Path) -> None:
    full = {f"w{i}": torch.arange(50.0) + i for i in range(6)}

    def one(comm: Comm) -> int:
        state = {
            key: ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=comm.rank)
            for key, data in full.items()
        }
        strategy: Any = FullyParallelSaveStrategyWrapper(
            Zarr3SaveShardedStrategy(planner=Renaming())
        )
        leaves, _ = flatten(state)
        writer = strategy.resolved().make_writer(tmp_path)
        plan, _ = strategy.resolved().planning(leaves, writer, comm).agree(comm)
        save(state, tmp_path / "c", strategy, comm=comm)
        assert [leaf.replica_id for leaf in state.values()] == [comm.rank] * 6
        return len(plan.items)

    assert run_ranks(3, one) == [2, 2, 2]
    saved = load_plain_tensors(tmp_path / "c")
    assert saved.keys() == {f"new.{key}" for key in full}
    assert all(torch.equal(saved[f"new.{key}"], full[key]) for key in full)


def test_a_balanced_planner_shares_out_within_the_groups(tmp_path: Path) -> None:
    def one(comm: Comm, group: Comm) -> list[str]:
        base = Zarr3SaveShardedStrategy(planner=BalancedSavePlanner())
        strategy: Any = FullyParallelSaveStrategyWrapper(base, group).resolved()
        # The main replicas are on ranks 2 and 3; all four ranks hold everything.
        state = {
            f"w{main}": ShardedTensor.from_rank_offsets(
                f"w{main}", torch.ones(4), replica_id=abs(comm.rank - main)
            )
            for main in (2, 3)
        }
        leaves, _ = flatten(state)
        plan, _ = strategy.planning(leaves, strategy.make_writer(tmp_path), comm).agree(comm)
        return [item.index.fqn for item in plan.items]

    assert each_rank([(0, 2), (1, 3)], one) == [["w2"], ["w3"], [], []]


# --- caches never lie ---------------------------------------------------------------------------


def shard(key: str, rows: int = 4, dtype: torch.dtype = torch.float32, rank: int = 0) -> Any:
    data = torch.ones(rows, 2, dtype=dtype)
    return ShardedTensor.from_rank_offsets(key, data, replica_id=rank)


def add(leaves: dict[str, Any], rank: int) -> None:
    leaves["new"] = shard("new", rank=0)
    del rank


def drop(leaves: dict[str, Any], rank: int) -> None:
    del rank
    del leaves["b"]


def retype(leaves: dict[str, Any], rank: int) -> None:
    leaves["own"] = shard("own", dtype=torch.float64, rank=rank)


def reshard(leaves: dict[str, Any], rank: int) -> None:
    leaves["a"].axis_fragmentations = None
    leaves["a"].global_shape = (4, 2)
    leaves["a"].local_shape, leaves["a"].data = (2, 2), leaves["a"].data[:2]
    leaves["a2"] = replace(leaves["a"], global_offset=(2, 0))
    del rank


@pytest.mark.parametrize(
    ("change", "changed_rank"), [(add, 0), (drop, 1), (retype, 2), (reshard, 0), (reshard, 2)]
)
def test_a_change_on_one_rank_is_seen_by_all(
    change: Callable[[dict[str, Any], int], None], changed_rank: int
) -> None:
    """With a kept distribution every save is as one without."""
    bases = {keeps: [Recorder() for _ in range(3)] for keeps in (True, False)}

    def one(comm: Comm) -> tuple[bool, bool, bool]:
        wrappers = {
            keeps: FullyParallelSaveStrategyWrapper(bases[keeps][comm.rank], comm, keeps)
            for keeps in bases
        }

        def save_twice(leaves: dict[str, Any]) -> Any:
            for wrapper in wrappers.values():
                wrapper.save(leaves, "unused")
            return wrappers[True].cached_distribution

        leaves = {key: shard(key, rank=comm.rank) for key in "abcd"}
        if comm.rank == changed_rank:
            leaves["own"] = shard("own")
        first = save_twice(leaves)
        again = save_twice({key: copy.copy(leaf) for key, leaf in leaves.items()})
        if comm.rank == changed_rank:
            leaves = {key: copy.copy(leaf) for key, leaf in leaves.items()}
            change(leaves, comm.rank)
        changed = save_twice(leaves)
        back = save_twice(leaves)
        return first is again, changed is again, changed is back

    assert run_ranks(3, one) == [(True, False, True)] * 3
    for kept, computed in zip(bases[True], bases[False], strict=True):
        assert len(kept.given) == 4
        for own, expected in zip(kept.given, computed.given, strict=True):
            ids = {key: leaf.replica_id for key, leaf in expected.items()}
            assert {key: leaf.replica_id for key, leaf in own.items()} == ids


def test_ranks_that_remember_different_saves_share_out_anew() -> None:
    """One rank was not there when the others last agreed: what it keeps is older."""
    wrappers: list[Any] = [None] * 3

    def first(comm: Comm) -> None:
        wrappers[comm.rank] = FullyParallelSaveStrategyWrapper(Recorder(), None, True)
        marked(comm, "ab")

    def marked(comm: Comm, keys: str) -> dict[str, int]:
        leaves = {key: shard(key, 4 + ord(key), rank=comm.rank) for key in keys}
        flat, _ = flatten(leaves)
        ids = wrappers[comm.rank]._marked(flat, comm)
        return {leaf.key: leaf.replica_id for leaf in ids.values()}

    run_ranks(3, first)
    cache = wrappers[2]._group.cache
    older = vars(cache).copy()
    run_ranks(3, lambda comm: marked(comm, "ab" if comm.rank == 2 else "abc"))
    vars(cache).update(older)
    found = run_ranks(3, lambda comm: marked(comm, "ab" if comm.rank == 2 else "abc"))
    for key in "abc":
        assert sum(ids.get(key, 1) == 0 for ids in found) == 1


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("third_party", [True, False])
def test_a_replica_without_data_is_named(tmp_path: Path, third_party: bool) -> None:
    base: Any = Recorder() if third_party else Zarr3SaveShardedStrategy()

    def one(comm: Comm, group: Comm) -> None:
        leaf = shard("w", rank=comm.rank)
        if comm.rank == 1:
            leaf.data = None
        strategy = FullyParallelSaveStrategyWrapper(base, group)
        save({"w": leaf}, tmp_path / "c", strategy, comm=comm)

    error = everybody_fails([range(3)], one)[0]
    assert isinstance(error, InvalidShardingError)
    assert {(f.key, f.ranks) for f in error.findings} == {("w", (1,))}
    assert not (tmp_path / "c").exists() or third_party


@pytest.mark.parametrize("third_party", [True, False])
def test_one_failing_rank_fails_all_groups(tmp_path: Path, third_party: bool) -> None:
    """Two groups: what goes wrong in one is everybody's error."""

    class FullDisk(Recorder):
        def save(self, *_: Any) -> None:
            raise OSError(28, "no space left on device")

    class BadPlanner(DefaultSavePlanner):
        def get_data(self, item: WriteItem) -> Any:
            raise OSError(28, f"no space left on device for {item.index.fqn}")

    def one(comm: Comm, group: Comm) -> None:
        base: Any
        if third_party:
            base = FullDisk() if comm.rank == 3 else Recorder()
        else:
            base = Zarr3SaveShardedStrategy(planner=BadPlanner() if comm.rank == 3 else None)
            base.planner = base.planner or DefaultSavePlanner()
        strategy = FullyParallelSaveStrategyWrapper(base, group)
        replica = comm.rank % 2
        state = {
            f"w{i}": ShardedTensor.from_rank_offsets(
                f"w{i}", torch.ones(4), (0, comm.rank // 2, 2), replica_id=replica
            )
            for i in range(4)
        }
        save(state, tmp_path / "c", strategy, comm=comm)

    error = everybody_fails([(0, 1), (2, 3)], one)[0]
    assert isinstance(error, RankFailedError)
    assert error.ranks == (3,)
    assert "no space left" in str(error)
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize("kind", [Zarr3SaveShardedStrategy, Recorder])
def test_two_main_replicas_are_still_refused(tmp_path: Path, kind: type[Any]) -> None:
    def one(comm: Comm, group: Comm) -> None:
        strategy = FullyParallelSaveStrategyWrapper(kind(), group)
        save({"w": shard("w", rank=0)}, tmp_path / "c", strategy, comm=comm)

    error = everybody_fails([range(2)], one)[0]
    assert isinstance(error, InvalidShardingError)
    assert "2 shards hold this part" in str(error)


def test_async_needs_an_async_strategy(tmp_path: Path) -> None:
    state = {"w": shard("w")}
    strategy = FullyParallelSaveStrategyWrapper(Recorder())
    with pytest.raises(CheckpointingException, match="Cannot apply async_save to non-async"):
        strategy.async_save(state, tmp_path)
    with pytest.raises(CheckpointingException, match="Cannot apply async_save to non-async"):
        save(state, tmp_path / "c", strategy, async_sharded_save=True)


def test_async_is_passed_on() -> None:
    class Later(AsyncSaveShardedStrategy):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
            return AsyncRequest(None, (sharded_state_dict, checkpoint_dir), [])

    def one(comm: Comm) -> list[int]:
        wrapper = FullyParallelSaveStrategyWrapper(Later("later", 7), comm)
        assert (wrapper.backend, wrapper.version) == ("later", 7)
        request = wrapper.async_save({k: shard(k, rank=comm.rank) for k in "abcd"}, "folder")
        state, folder = request.async_fn_args
        assert folder == "folder"
        return [leaf.replica_id for leaf in state.values()]

    assert run_ranks(2, one) == [[0, 1, 0, 1], [1, 0, 1, 0]]

"""Replicas share out what is written: exactly once, by a holder, and nobody's leaves change."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from cut_tensors import cut_tensors
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import flatten, is_main_replica
from dist_checkpointing.planning import BalancedSavePlanner, DefaultSavePlanner
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
from simulated_groups import each_rank, everybody_fails
from states import assert_holds, between
from tiers import examples

Parts = list[tuple[dc.ShardedTensor, list[int], int]]
"""Parts of tensors, who holds each, and whose copy is the main replica."""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], Parts]:
    """Ranks in groups, and what they hold."""
    num_ranks = draw(st.integers(1, 6))
    order = draw(st.permutations(range(num_ranks)))
    cuts = sorted(draw(st.sets(st.integers(1, num_ranks - 1)))) if num_ranks > 1 else []
    groups = [tuple(order[a:b]) for a, b in itertools.pairwise([0, *cuts, num_ranks])]
    some_ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted)
    parts: Parts = []
    for key in "abcd"[: draw(st.integers(1, 4))]:
        for part in draw(cut_tensors(key)):
            start, stop = part.flat_range or (0, part.box.num_elements)
            if start < stop:
                part.init_data("meta")
                holders = draw(some_ranks)
                parts.append((part, holders, draw(st.sampled_from(holders))))
    return groups, parts


def leaves_of(parts: Parts, rank: int) -> list[dc.ShardedTensor]:
    return [
        replace(part, replica_id=0 if rank == main else (0, 1 + holders.index(rank)))
        for part, holders, main in parts
        if rank in holders
    ]


class Recorder(SaveShardedStrategy):
    """A third party's strategy that writes nowhere."""

    def __init__(self) -> None:
        super().__init__("recorder", 1)
        self.given: list[Any] = []

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        del checkpoint_dir
        self.given.append(sharded_state_dict)


@examples(40)
@given(worlds())
def test_a_third_party_writes_everything_once(
    world: tuple[list[tuple[int, ...]], Parts],
) -> None:
    groups, parts = world

    def one(comm: Comm, group: Comm) -> list[dc.ShardedTensor]:
        base = Recorder()
        state: dict[str, Any] = {
            "deep": [leaves_of(parts, comm.rank)],
            "rng": dc.ShardedObject("rng", 5, (1,), (0,), 3),
        }
        before = repr(state)
        FullyParallelSaveStrategyWrapper(base, group).save(state, "unused")
        assert repr(state) == before
        (seen,) = base.given
        assert seen["rng"].replica_id == 3
        for own, marked in zip(state["deep"][0], seen["deep"][0], strict=True):
            assert marked.data is own.data
            assert replace(marked, replica_id=own.replica_id) == own
        return [leaf for leaf in seen["deep"][0] if is_main_replica(leaf.replica_id)]

    writers: dict[Any, int] = {}
    for rank, leaves in enumerate(each_rank(groups, one)):
        for leaf in leaves:
            assert writers.setdefault((leaf.key, leaf.box, leaf.flat_range), rank) == rank
    assert len(writers) == len(parts)
    for part, holders, main in parts:
        writer = writers[part.key, part.box, part.flat_range]
        assert writer in holders
        assert any({writer, main} <= {*group} for group in groups)


@pytest.mark.parametrize("kind", [ZarrSaveShardedStrategy, TensorStoreSaveShardedStrategy])
def test_a_checkpoint_by_four_replicas(tmp_path: Path, kind: type[Any]) -> None:
    full = {f"w{i}": torch.arange(1000.0 * (i + 1)).reshape(-1, 10) for i in range(8)}

    def one(comm: Comm) -> int:
        state = copies(full, comm)
        written = Written()
        strategy = FullyParallelSaveStrategyWrapper(kind())
        dc.save(state, tmp_path / "c", strategy, comm=comm, progress=written)
        assert [leaf.replica_id for leaf in state.values()] == [comm.rank] * 8
        return written.num_bytes

    written = run_ranks(4, one)
    assert sum(written) == sum(data.nbytes for data in full.values())
    assert max(written) <= 1.05 * sum(written) / 4
    assert_holds(tmp_path / "c", full)


class Written:
    """Told of the progress of a save: how much this rank has written."""

    num_bytes = 0

    def __call__(self, progress: Any) -> None:
        if progress.phase == "writing":
            self.num_bytes = progress.bytes_done


def copies(full: dict[str, torch.Tensor], comm: Comm) -> dict[str, dc.ShardedTensor]:
    """The whole of each tensor, the main replica on rank 0."""
    return {
        key: dc.ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=comm.rank)
        for key, data in full.items()
    }


class Renaming(DefaultSavePlanner):
    """A user's planner."""

    def build_local_plan(self) -> Any:
        plan = super().build_local_plan()
        items = [replace(i, index=replace(i.index, fqn=f"new.{i.index.fqn}")) for i in plan.items]
        return plan.with_items(items)


def test_a_strategy_with_a_planner_of_its_own(tmp_path: Path) -> None:
    full = {f"w{i}": torch.arange(50.0) + i for i in range(6)}

    def one(comm: Comm) -> int:
        written = Written()
        base = Zarr3SaveShardedStrategy(planner=Renaming())
        strategy = FullyParallelSaveStrategyWrapper(base)
        dc.save(copies(full, comm), tmp_path / "c", strategy, comm=comm, progress=written)
        return written.num_bytes

    assert run_ranks(3, one) == [2 * 50 * 4] * 3
    assert_holds(tmp_path / "c", {f"new.{key}": data for key, data in full.items()})


@pytest.mark.parametrize("planner", [BalancedSavePlanner, lambda: None])
def test_a_balanced_planner_shares_out_within_the_groups(tmp_path: Path, planner: Any) -> None:
    def one(comm: Comm, group: Comm) -> list[str]:
        base = Zarr3SaveShardedStrategy(planner=planner())
        strategy: Any = FullyParallelSaveStrategyWrapper(base, group).resolved()
        # The main replicas are on ranks 2 and 3; all four ranks hold everything.
        state = {
            f"w{main}": dc.ShardedTensor.from_rank_offsets(
                f"w{main}", torch.ones(4), replica_id=abs(comm.rank - main)
            )
            for main in (2, 3)
        }
        leaves, _ = flatten(state)
        plan, _ = strategy.planning(leaves, strategy.make_writer(tmp_path), comm).agree(comm)
        return [item.index.fqn for item in plan.items]

    assert each_rank([(0, 1), (2, 3)], one) == [[], [], ["w2"], ["w3"]]


# --- caches never lie ---------------------------------------------------------------------------


def shard(key: str, rows: int = 4, dtype: torch.dtype = torch.float32, rank: int = 0) -> Any:
    data = torch.ones(rows, 2, dtype=dtype)
    return dc.ShardedTensor.from_rank_offsets(key, data, replica_id=rank)


@pytest.mark.parametrize(
    ("change", "changed_rank"),
    [("add", 0), ("drop", 1), ("retype", 2), ("reshard", 0), ("reshard", 2)],
)
def test_a_change_on_one_rank_is_seen_by_all(change: str, changed_rank: int) -> None:
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
            if change == "add":
                leaves["new"] = shard("new")
            elif change == "drop":
                del leaves["b"]
            elif change == "retype":
                leaves["own"] = shard("own", dtype=torch.float64, rank=comm.rank)
            else:
                for key, offset in (("a", 0), ("a2", 2)):
                    half = between("a", torch.ones(4, 2), offset, offset + 2)
                    leaves[key] = replace(half, replica_id=leaves["a"].replica_id)
        changed = save_twice(leaves)
        back = save_twice(leaves)
        return first is again, changed is again, changed is back

    assert run_ranks(3, one) == [(True, False, True)] * 3
    for kept, computed in zip(bases[True], bases[False], strict=True):
        assert len(kept.given) == 4
        for own, expected in zip(kept.given, computed.given, strict=True):
            ids = {key: leaf.replica_id for key, leaf in expected.items()}
            assert {key: leaf.replica_id for key, leaf in own.items()} == ids


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("third_party", [True, False])
def test_a_replica_without_data_is_named(tmp_path: Path, third_party: bool) -> None:
    base: Any = Recorder() if third_party else Zarr3SaveShardedStrategy()

    def one(comm: Comm, group: Comm) -> None:
        leaf = shard("w", rank=comm.rank)
        if comm.rank == 1:
            leaf.data = None
        strategy = FullyParallelSaveStrategyWrapper(base, group)
        dc.save({"w": leaf}, tmp_path / "c", strategy, comm=comm)

    error = everybody_fails([range(3)], one)[0]
    assert isinstance(error, dc.InvalidShardingError)
    assert {(f.key, f.ranks) for f in error.findings} == {("w", (1,))}
    assert not (tmp_path / "c").exists() or third_party


def test_one_failing_rank_fails_all_groups(tmp_path: Path) -> None:
    """Two groups of a third party's strategy: what goes wrong in one is everybody's error."""

    class FullDisk(Recorder):
        def save(self, *_: Any) -> None:
            raise OSError(28, "no space left on device")

    def one(comm: Comm, group: Comm) -> None:
        base = FullDisk() if comm.rank == 3 else Recorder()
        part: Any = (0, comm.rank // 2, 2)
        leaves = [
            dc.ShardedTensor.from_rank_offsets(
                f"w{i}", torch.ones(4), part, replica_id=comm.rank % 2
            )
            for i in range(4)
        ]
        strategy = FullyParallelSaveStrategyWrapper(base, group)
        dc.save({"leaves": leaves}, tmp_path / "c", strategy, comm=comm)

    error = everybody_fails([(0, 1), (2, 3)], one)[0]
    assert isinstance(error, dc.RankFailedError)
    assert error.ranks == (3,)
    assert "no space left" in str(error)
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize("kind", [Zarr3SaveShardedStrategy, Recorder])
def test_two_main_replicas_are_still_refused(tmp_path: Path, kind: type[Any]) -> None:
    def one(comm: Comm, group: Comm) -> None:
        strategy = FullyParallelSaveStrategyWrapper(kind(), group)
        dc.save({"w": shard("w", rank=0)}, tmp_path / "c", strategy, comm=comm)

    error = everybody_fails([range(2)], one)[0]
    assert isinstance(error, dc.InvalidShardingError)
    assert "2 shards hold this part" in str(error)


def test_async_needs_an_async_strategy(tmp_path: Path) -> None:
    state = {"w": shard("w")}
    strategy = FullyParallelSaveStrategyWrapper(Recorder())
    uses: list[Callable[[], object]] = [
        lambda: strategy.async_save(state, tmp_path),
        lambda: dc.save(state, tmp_path / "c", strategy, async_sharded_save=True),
    ]
    for use in uses:
        with pytest.raises(dc.CheckpointingException, match="Cannot apply async_save to non-async"):
            use()


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

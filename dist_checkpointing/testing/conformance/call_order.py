"""The storage protocol: the order of its calls, and their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import location
from dist_checkpointing.format import Index
from dist_checkpointing.format.leftovers import CONFIG_FNAME
from dist_checkpointing.planning import LoadPlan, SavePlan
from dist_checkpointing.serialization import check_is_distributed_checkpoint, load, save
from dist_checkpointing.strategies import (
    AsyncSaveShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
)
from dist_checkpointing.testing.conformance.backend_hooks import (
    WORLD_SIZES,
    BackendHooks,
    Observe,
    observed,
)
from dist_checkpointing.testing.conformance.sample_shards import (
    assert_loaded,
    blank,
    every_cut,
    one_for_each_cut,
)
from dist_checkpointing.testing.simulated_ranks import run_ranks

_FULL = one_for_each_cut(torch.int32)


def _state(world_size: int, rank: int) -> dict[str, Any]:
    return every_cut(_FULL, world_size, rank)


class _Log:
    """The calls on all ranks, in the order in which they were made."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, Sequence[Any]]] = []

    def observer(self, rank: int) -> Observe:
        return lambda name, values: self.events.append((rank, name, values))

    def calls(self, rank: int) -> list[str]:
        return [n for r, n, _ in self.events if r == rank and not n.endswith(".done")]

    def when(self, name: str) -> list[int]:
        return [i for i, (_, n, _) in enumerate(self.events) if n == name]

    def values(self, name: str) -> list[Any]:
        return [values[0] for _, n, values in self.events if n == name and values]

    def check_planning(self, plan_type: type, world_size: int, then: str) -> None:
        """Rank 0 changes the plans of all ranks, once they are there and before they are used."""
        assert max(self.when("prepare_local_plan.done")) < self.when("prepare_global_plan")[0]
        assert self.when("prepare_global_plan.done")[0] < min(self.when(then))
        for name in ("prepare_global_plan", "prepare_global_plan.done"):
            for plans in self.values(name):
                assert len(plans) == world_size
                assert all(isinstance(plan, plan_type) for plan in plans)


class StorageProtocol(BackendHooks):
    """Tests for backends with a StorageWriter and a StorageReader; others skip them."""

    def planned_saver(self) -> PlannedSaveStrategy:
        """The save strategy, if it has a StorageWriter."""
        if isinstance(strategy := self.saver(), PlannedSaveStrategy):
            return strategy
        pytest.skip(f"{strategy} has no StorageWriter")

    def planned_loader(self) -> PlannedLoadStrategy:
        """The load strategy, if it has a StorageReader."""
        if isinstance(strategy := self.loader(), PlannedLoadStrategy):
            return strategy
        pytest.skip(f"{strategy} has no StorageReader")

    def _save_and_log(self, world_size: int, folder: Path) -> _Log:
        log = _Log()
        self.planned_saver()

        def one(comm: Comm) -> None:
            tell = log.observer(comm.rank)

            def observe(name: str, values: Sequence[Any]) -> None:
                tell(name, values)
                assert not location.is_there(folder / CONFIG_FNAME), "committed too early"

            strategy = observed(self.planned_saver(), observe)
            save(_state(world_size, comm.rank), folder, strategy, comm=comm)

        run_ranks(world_size, one)
        assert check_is_distributed_checkpoint(folder)
        return log

    @WORLD_SIZES
    def test_order_of_writer_calls(self, tmp_path: Path, world_size: int) -> None:
        """Each rank in order, rank 0 alone for all, ``finish`` last, and then the commit."""
        log = self._save_and_log(world_size, tmp_path / "c")
        everywhere = ["set_up_storage_writer", "prepare_local_plan", "write_data"]
        for rank in range(1, world_size):
            assert log.calls(rank) == everywhere
        assert log.calls(0) == [*everywhere[:2], "prepare_global_plan", everywhere[2], "finish"]
        log.check_planning(SavePlan, world_size, "write_data")
        assert max(log.when("write_data.done")) < log.when("finish")[0]

    @WORLD_SIZES
    def test_a_result_for_every_item(self, tmp_path: Path, world_size: int) -> None:
        """``write_data`` returns the number of stored bytes of each item of its plan, in order."""
        log = self._save_and_log(world_size, tmp_path / "c")
        written = {rank: values for rank, name, values in log.events if name == "write_data.done"}
        for rank, name, values in log.events:
            if name == "write_data":
                items = values[0].items
                results = [*written[rank][0].result()][: len(items)]
                assert [result.index for result in results] == [item.index for item in items]
                assert all(result.size_in_bytes > 0 for result in results)

    @WORLD_SIZES
    def test_order_of_reader_calls(self, tmp_path: Path, world_size: int) -> None:
        """Rank 0 reads the metadata; then each rank in order."""
        folder, log = tmp_path / "c", _Log()
        self.planned_loader()
        self.save_on(2, folder, lambda rank: _state(2, rank))

        def one(comm: Comm) -> Any:
            strategy = observed(self.planned_loader(), log.observer(comm.rank))
            return load(blank(_state(world_size, comm.rank)), folder, strategy, comm=comm)

        loaded = run_ranks(world_size, one)
        everywhere = ["set_up_storage_reader", "prepare_local_plan", "read_data"]
        for rank in range(1, world_size):
            assert log.calls(rank) == everywhere
        expected = ["read_metadata", *everywhere[:2], "prepare_global_plan", everywhere[2]]
        assert log.calls(0) == expected
        assert log.when("read_metadata.done")[0] < min(log.when("set_up_storage_reader"))
        log.check_planning(LoadPlan, world_size, "read_data")
        (index,) = log.values("read_metadata.done")
        assert isinstance(index, Index)
        assert set(index) == set(_FULL)
        for rank, result in enumerate(loaded):
            assert_loaded(result, _state(world_size, rank), f"rank {rank}")

    def test_created_names_cover_every_file(self, tmp_path: Path) -> None:
        """A save names all its files before it begins, so that they can be deleted if it fails."""
        strategy, folder = self.planned_saver(), tmp_path / "c"
        plan, _ = self._save_and_log(2, folder).values("write_data")
        announced = {*strategy.make_writer(folder).created_names(plan.index, world_size=2)}
        announced |= {CONFIG_FNAME, "common.pt", ".dckpt"}
        for path in folder.rglob("*"):
            if path.is_file():
                name = path.relative_to(folder)
                above = {name.as_posix(), *(parent.as_posix() for parent in name.parents)}
                assert above & announced, f"{name} was not announced"

    @pytest.mark.parametrize("is_empty", [False, True])
    def test_a_direct_save_makes_the_folder(self, tmp_path: Path, is_empty: bool) -> None:
        """The folder is also made if there is only metadata to write."""
        folder = tmp_path / "not" / "yet"
        state = {} if is_empty else _state(1, 0)
        self.planned_saver().save(state, folder)
        found = self.planned_loader().load_tensors_metadata(folder)
        assert found.keys() == state.keys()

    def test_async_commits_at_the_end(self, tmp_path: Path) -> None:
        """An asynchronous save is a checkpoint after it is finalized on all ranks, not before."""
        if not isinstance(self.saver(), AsyncSaveShardedStrategy):
            pytest.skip(f"{self.saver()} cannot save asynchronously")
        folder = tmp_path / "c"

        def one(comm: Comm) -> None:
            state = _state(2, comm.rank)
            request = save(state, folder, self.saver(), async_sharded_save=True, comm=comm)
            assert request is not None
            args = list(request.async_fn_args)
            if request.preload_fn is not None:
                args[1] = request.preload_fn()
            if request.async_fn is not None:
                request.async_fn(*args, **request.async_fn_kwargs)
            comm.all_gather(None)
            assert not location.is_there(folder / CONFIG_FNAME), "committed too early"
            comm.all_gather(None)
            for finalize in request.finalize_fns:
                finalize()

        run_ranks(2, one)
        self.check_on(1, folder, lambda _: _state(1, 0))

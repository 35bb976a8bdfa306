"""How saves and loads go: the order of calls into a backend, and failures that all ranks notice."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidShardingError,
    RankFailedError,
    StateMismatchError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.format import Index
from dist_checkpointing.format.leftovers import CONFIG_FNAME
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning import LoadPlan, SavePlan
from dist_checkpointing.serialization import (
    check_is_distributed_checkpoint,
    load,
    load_tensors_metadata,
    save,
)
from dist_checkpointing.strategies import (
    AsyncSaveShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
)
from dist_checkpointing.testing.conformance.backend_hooks import (
    WORLD_SIZES,
    BackendHooks,
    Observe,
    failures_on,
    observed,
)
from dist_checkpointing.testing.conformance.sample_shards import (
    CUTS,
    assert_loaded,
    assert_same_bits,
    blank,
    every_cut,
    one_for_each_cut,
    random_bits,
    replicated,
    rows_of,
    uneven_shard,
    whole,
)
from dist_checkpointing.testing.simulated_ranks import run_ranks

_OF_EACH_CUT = one_for_each_cut(torch.int32)


def _state(world_size: int, rank: int) -> dict[str, Any]:
    return every_cut(_OF_EACH_CUT, world_size, rank)


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
        assert set(index) == set(_OF_EACH_CUT)
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
        assert self.planned_loader().load_tensors_metadata(folder).keys() == state.keys()

    def test_async_commits_at_the_end(self, tmp_path: Path) -> None:
        """An asynchronous save is a checkpoint after it is finalized on all ranks, not before."""
        if not isinstance(self.saver(), AsyncSaveShardedStrategy):
            pytest.skip(f"{self.saver()} cannot save asynchronously")
        folder = tmp_path / "c"

        def one(comm: Comm) -> None:
            state = _state(2, comm.rank)
            request = save(state, folder, self.saver(), async_sharded_save=True, comm=comm)
            assert request is not None
            request.execute()
            comm.all_gather(None)
            assert not location.is_there(folder / CONFIG_FNAME), "committed too early"
            comm.all_gather(None)
            for finalize in request.finalize_fns:
                finalize()

        run_ranks(2, one)
        self.check_on(1, folder, lambda _: _state(1, 0))


_FULL = random_bits((64, 64), torch.int32, 1)
_W = {"w": _FULL}


class Failures(BackendHooks):
    """Damaged checkpoints, templates that do not fit, ranks that fail."""

    @pytest.mark.parametrize("how", ["damage", "shorten"])
    @pytest.mark.parametrize("cut", ["by_rows", "unevenly", "flattened"])
    @WORLD_SIZES
    def test_missing_data_is_an_error(
        self, tmp_path: Path, world_size: int, cut: str, how: str
    ) -> None:
        """Lost data raises on all ranks; it is never read as zeros or as old memory."""
        folder, full = tmp_path / "c", random_bits((8, 4, 1024), torch.int32)
        self.save_on(2, folder, lambda rank: {"w": CUTS[cut]("w", full, 2)[rank]})
        getattr(self, how)(folder, "w")

        def read(comm: Comm) -> None:
            # A rank that does not touch the damaged part must raise too.
            load(blank(whole({"w": full})), folder, self.load_strategy(), comm=comm)

        errors = failures_on(world_size, read)
        assert isinstance(errors[0], CorruptCheckpointError | RankFailedError)

    @WORLD_SIZES
    def test_template_that_does_not_fit(self, tmp_path: Path, world_size: int) -> None:
        """A missing key, another shape, another dtype: all named before anything is read."""
        folder = tmp_path / "c"
        self.save_on(2, folder, lambda rank: rows_of(dict.fromkeys("abcd", _FULL), 2, rank))
        given = torch.full((64, 64), 7, dtype=torch.int32)

        def read(comm: Comm) -> None:
            tensors = {
                "a": given,
                "absent": torch.empty(3),
                "b": torch.empty(64, 65, dtype=torch.int32),
                "c": torch.empty(64, 64),
            }
            wanted = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}
            load(wanted, folder, self.load_strategy(), comm=comm)

        error = failures_on(world_size, read)[0]
        assert isinstance(error, StateMismatchError)
        assert {finding.key for finding in error.findings} == {"absent", "b", "c"}
        assert (given == 7).all()

    @WORLD_SIZES
    def test_shards_that_are_not_whole(self, tmp_path: Path, world_size: int) -> None:
        """A gap or an overlap is refused on all ranks, before the folder is touched."""
        for name, extent in (("gap", 63), ("overlap", 64)):

            def write(comm: Comm, extent: int = extent) -> None:
                state = {"w": [uneven_shard("w", _FULL, (0, 0), (extent, 64))]}
                if extent == 64:
                    state["w"].append(uneven_shard("w", _FULL, (63, 0), (1, 64)))
                if comm.rank:
                    state = {}
                save(state, tmp_path / "c", self.save_strategy(), comm=comm)

            error = failures_on(world_size, write)[0]
            assert isinstance(error, InvalidShardingError), name
            assert {finding.key for finding in error.findings} == {"w"}
        assert not check_is_distributed_checkpoint(tmp_path / "c")

    @WORLD_SIZES
    def test_one_failing_rank_fails_all(self, tmp_path: Path, world_size: int) -> None:
        """An I/O error on one rank is raised on all ranks, and nothing is committed."""
        folder, bad = tmp_path / "c", world_size - 1

        def write(comm: Comm) -> None:
            strategy = _full_disk(self.saver(), fails=comm.rank == bad)
            save(rows_of(_W, world_size, comm.rank), folder, strategy, comm=comm)

        error = failures_on(world_size, write)[0]
        assert isinstance(error, RankFailedError)
        assert error.ranks == (bad,)
        assert "no space left on device" in str(error)
        assert not check_is_distributed_checkpoint(folder)
        with pytest.raises(CheckpointNotFoundError):
            load_tensors_metadata(folder, self.load_strategy())
        if isinstance(self.saver(), PlannedSaveStrategy):
            left = {p.relative_to(folder).parts[0] for p in folder.rglob("*") if p.is_file()}
            assert left <= {".dckpt"}, "a failed save must delete its files"
        # The folder is free for the next attempt.
        self.save_on(2, folder, lambda rank: rows_of(_W, 2, rank))
        assert_same_bits(self.load_whole(folder)["w"], _FULL, "second try")

    @WORLD_SIZES
    def test_a_checkpoint_is_not_overwritten(self, tmp_path: Path, world_size: int) -> None:
        """A second save into the same folder is refused, and the first one stays whole."""
        folder = tmp_path / "c"
        self.save_on(2, folder, lambda rank: rows_of(_W, 2, rank))

        def write(comm: Comm) -> None:
            state = rows_of({"other": _FULL}, world_size, comm.rank)
            save(state, folder, self.save_strategy(), comm=comm)

        assert isinstance(failures_on(world_size, write)[0], CheckpointExistsError)
        result = self.load_whole(folder)
        assert result.keys() == {"w"}
        assert_same_bits(result["w"], _FULL, "the first checkpoint")

    @WORLD_SIZES
    def test_overwriting_replaces_everything(self, tmp_path: Path, world_size: int) -> None:
        """With ``overwrite=True`` nothing of the old checkpoint shows in the new one."""
        if not isinstance(self.saver(), PlannedSaveStrategy):
            pytest.skip(f"{self.saver()} does not name its files before a save")
        folder, other = tmp_path / "c", random_bits((8, 4, 6), torch.int32, 2)
        for keys, full in (("ab", _FULL), ("bc", other)):

            def state_of(rank: int, keys: str = keys, full: torch.Tensor = full) -> dict[str, Any]:
                return rows_of(dict.fromkeys(keys, full), world_size, rank)

            self.save_on(world_size, folder, state_of, overwrite=True)
        result = self.load_whole(folder)
        assert result.keys() == {"b", "c"}
        assert_loaded(result, whole(dict.fromkeys("bc", other)), "overwritten")

    def test_unknown_backend_or_version(self, tmp_path: Path) -> None:
        """The load strategy refuses formats and versions that it does not know."""
        folder, strategy = tmp_path / "c", self.loader()
        self.save_on(1, folder, lambda _: {"w": replicated("w", _FULL, 1)[0]})
        strategy.check_backend_compatibility(self.backend[0])
        strategy.check_version_compatibility(self.backend[1])
        with pytest.raises(CheckpointingException):
            strategy.check_backend_compatibility("no such backend")
        with pytest.raises(CheckpointingException):
            strategy.check_version_compatibility(10**6)
        config = json.loads((folder / CONFIG_FNAME).read_text())
        assert (config["sharded_backend"], config["sharded_backend_version"]) == self.backend
        (folder / CONFIG_FNAME).write_text(json.dumps(config | {"sharded_backend_version": 10**6}))
        for selection in (None, strategy):
            with pytest.raises(CheckpointingException, match="version"):
                load({}, folder, selection)


def _full_disk(strategy: Any, *, fails: bool) -> Any:
    """The strategy with a disk that is full after something has been written."""
    full, failing = OSError(28, "no space left on device"), copy.copy(strategy)

    def observe(name: str, _: Sequence[Any]) -> None:
        if fails and name == "write_data.done":
            raise full

    def save_and_fail(*args: Any) -> None:
        strategy.save(*args)
        if fails:
            raise full

    failing.save = save_and_fail
    return observed(strategy, observe) if isinstance(strategy, PlannedSaveStrategy) else failing

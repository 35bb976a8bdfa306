"""Every failure is noticed on all ranks, and never damages an existing checkpoint."""

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
from dist_checkpointing.format.leftovers import CONFIG_FNAME
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.serialization import (
    check_is_distributed_checkpoint,
    load,
    load_tensors_metadata,
    save,
)
from dist_checkpointing.strategies import PlannedSaveStrategy, SaveShardedStrategy
from dist_checkpointing.testing.conformance.backend_hooks import (
    WORLD_SIZES,
    BackendHooks,
    failures_on,
    observed,
)
from dist_checkpointing.testing.conformance.sample_shards import (
    CUTS,
    assert_loaded,
    assert_same_bits,
    blank,
    random_bits,
    replicated,
    rows_of,
    uneven_shard,
    whole,
)

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


def _full_disk(strategy: SaveShardedStrategy, *, fails: bool) -> SaveShardedStrategy:
    """The strategy with a disk that is full after something has been written."""

    def write() -> None:
        if fails:
            raise OSError(28, "no space left on device")

    if isinstance(strategy, PlannedSaveStrategy):

        def observe(name: str, _: Sequence[Any]) -> None:
            if name == "write_data.done":
                write()

        return observed(strategy, observe)
    failing, save_all = copy.copy(strategy), strategy.save

    def save_and_fail(*args: Any) -> None:
        save_all(*args)
        write()

    failing.save = save_and_fail  # type: ignore[method-assign, assignment]
    return failing

"""Chunks of which ranks want different cuts are read once, by one of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from dist_checkpointing import RankFailedError, ShardedTensor, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage import ReadMode, StorageOptions
from dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper, cuts
from dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_checkpointing.strategies.zarr import Zarr3LoadShardedStrategy
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.testing.conformance.shards import assert_same_bits, random_bits
from simulated_groups import TinyChunks, everybody_fails

RANKS = 4
FULL = {
    "w": random_bits((256, 512), torch.float32),
    "narrow": random_bits((1024, 16), torch.bfloat16),
    "deep": random_bits((16, 8, 4, 32), torch.int16),
}
NUM_BYTES = sum(data.nbytes for data in FULL.values())


class Counter:
    """Bytes that are read from files."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> int:
        with self._lock:
            self.num_bytes += num_bytes
        return num_bytes


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: counter.add(preadv(*a)))
    return counter


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints with each tensor in 16 blocks of rows."""
    root = tmp_path_factory.mktemp("saved")
    for name, strategy in (
        ("tensorstore", "tensorstore"),
        ("zarr", "zarr"),
        ("encoded", TinyChunks(codec="zstd")),
    ):
        save_rows(root / name, strategy)
    return root


def save_rows(folder: Path, strategy: Any) -> None:
    def one(comm: Comm) -> None:
        blocks = {
            key: ShardedTensor.from_rank_offsets(
                key, data.chunk(16)[comm.rank].clone(), (0, comm.rank, 16)
            )
            for key, data in FULL.items()
        }
        save(blocks, folder, strategy, comm=comm)

    run_ranks(16, one)


def strips(comm: Comm) -> dict[str, Any]:
    """A strip of every tensor along its last axis."""
    return {
        key: ShardedTensor.from_rank_offsets(
            key,
            torch.zeros_like(data.chunk(RANKS, -1)[comm.rank]),
            (data.ndim - 1, comm.rank, RANKS),
        )
        for key, data in FULL.items()
    }


def check(wanted: dict[str, Any], rank: int) -> None:
    for key, leaf in wanted.items():
        strip = FULL[key].chunk(RANKS, -1)[rank].to(leaf.dtype)
        assert_same_bits(leaf.data, strip.contiguous(), key)


PREAD = StorageOptions(read_mode=ReadMode.PREAD)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [("tensorstore", TensorStoreLoadShardedStrategy), ("zarr", Zarr3LoadShardedStrategy)],
)
def test_strips_of_row_blocks_read_each_byte_once(
    saved: Path, saver: str, loader: Any, counter: Counter
) -> None:

    def bytes_read(how: Literal["apart", "together"]) -> int:
        def one(comm: Comm) -> None:
            done: list[int] = []
            wanted: Any = strips(comm)
            strategy = FullyParallelLoadStrategyWrapper(
                loader(options=PREAD), min_shared_bytes=0, cuts=how
            )
            load(
                wanted,
                saved / saver,
                strategy,
                comm=comm,
                progress=lambda p: done.append(p.bytes_done) if p.phase == "reading" else None,
            )
            check(wanted, comm.rank)
            assert how == "apart" or max(done) == NUM_BYTES // RANKS

        counter.num_bytes = 0
        run_ranks(RANKS, one)
        return counter.num_bytes

    together = bytes_read("together")
    assert NUM_BYTES <= together <= 1.1 * NUM_BYTES
    assert bytes_read("apart") > together


def test_replicas_of_strips_read_each_byte_once(saved: Path, counter: Counter) -> None:
    """Two data parallel ranks for each strip, and a memory that holds little of a chunk.

    Some ranks want another dtype than is stored.
    """
    options = StorageOptions(read_mode=ReadMode.PREAD, buffer_bytes=2**15, threads=1)

    def one(comm: Comm) -> None:
        strategy = FullyParallelLoadStrategyWrapper(
            TensorStoreLoadShardedStrategy(options=options),
            do_cache_distribution=True,
            min_shared_bytes=0,
            cuts="together",
        )
        part = comm.rank % RANKS
        for _ in range(2):
            wanted: Any = {}
            for key, data in FULL.items():
                is_wide = key == "narrow" and comm.rank % 3 == 0
                wanted[key] = ShardedTensor.from_rank_offsets(
                    key,
                    torch.zeros_like(
                        data.chunk(RANKS, -1)[part], dtype=torch.float32 if is_wide else None
                    ),
                    (data.ndim - 1, part, RANKS),
                    replica_id=comm.rank // RANKS,
                )
            load(wanted, saved / "tensorstore", strategy, comm=comm, cast="widen")
            check(wanted, part)

    counter.num_bytes = 0
    run_ranks(2 * RANKS, one)
    assert 2 * NUM_BYTES <= counter.num_bytes <= 2.2 * NUM_BYTES


def test_encoded_chunks_are_decoded_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved / "encoded"
    read: list[str] = []
    read_bytes = Path.read_bytes

    def noted(self: Path) -> bytes:
        if self.parent != folder and self.name not in ("zarr.json", "index.json"):
            read.append(str(self.relative_to(folder)))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", noted)

    def one(comm: Comm) -> None:
        wanted: Any = {"w": strips(comm)["w"]}
        options = StorageOptions(buffer_bytes=1, threads=1)
        strategy = FullyParallelLoadStrategyWrapper(
            Zarr3LoadShardedStrategy(options=options), min_shared_bytes=0, cuts="together"
        )
        load(wanted, folder, strategy, comm=comm)
        check(wanted, comm.rank)

    run_ranks(RANKS, one)
    chunks = [name for name in read if name.startswith("w/")]
    assert len(chunks) == len(set(chunks)) > RANKS


def test_wants_that_are_runs_are_read_apart() -> None:
    """Rows of a chunk cost no more than they are."""
    rows = [(0, 8), (8, 8)]

    def packed(offset: int, length: int) -> bytes:
        row = cuts._row(2)
        table = np.zeros(1, dtype=row)
        table["itemsize"] = 4
        table["offsets"], table["lengths"], table["shapes"] = (offset, 0), (length, 4), (16, 4)
        return cuts._HEAD.pack(2, 2**20, 0, True) + table.tobytes()

    assert cuts.share_cuts([packed(*row) for row in rows], 0) is None


def test_little_is_read_by_each(saved: Path, counter: Counter) -> None:
    def one(comm: Comm) -> Any:
        wanted: Any = strips(comm)
        strategy = FullyParallelLoadStrategyWrapper(
            Zarr3LoadShardedStrategy(options=PREAD), None, True, cuts="together"
        )
        load(wanted, saved / "zarr", strategy, comm=comm)
        check(wanted, comm.rank)

    run_ranks(RANKS, one)
    assert counter.num_bytes > 1.1 * NUM_BYTES


@pytest.mark.parametrize("where", ["read_blocks", "_pack"])
def test_one_failing_rank_fails_all_groups(
    saved: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    own = threading.local()
    original = getattr(cuts, where)

    def broken(*args: Any) -> Any:
        if own.rank == 2:
            raise OSError(5, "broken disk")
        return original(*args)

    monkeypatch.setattr(cuts, where, broken)

    def one(comm: Comm, group: Comm) -> None:
        own.rank = comm.rank
        strategy = FullyParallelLoadStrategyWrapper(
            Zarr3LoadShardedStrategy(), group, min_shared_bytes=0, cuts="together"
        )
        load(strips(comm), saved / "zarr", strategy, comm=comm)

    error = everybody_fails(((0, 1), (2, 3)), one)[0]
    assert isinstance(error, RankFailedError)
    assert error.ranks == (2,)
    assert "broken disk" in str(error)


def test_an_unknown_way_to_read_cuts() -> None:
    with pytest.raises(ValueError, match="cuts must be 'apart' or 'together'"):
        FullyParallelLoadStrategyWrapper(
            Zarr3LoadShardedStrategy(),
            cuts="both",  # type: ignore[arg-type]
        )

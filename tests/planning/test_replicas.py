"""Copies of one part are found among all ranks, and a bit that differs is found in them."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.planning import replica_check
from dist_checkpointing.planning.replica_check import SAMPLES, Copies, copies_of
from dist_checkpointing.planning.shard_table import describe
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.strategies import (
    FullyParallelSaveStrategyWrapper,
    TensorStoreSaveShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from states import BACKEND, save_on, shard

RANKS, PARTS = 16, 4
FULL = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(7)).to(torch.uint8)


def place(comm: Comm) -> tuple[int, int]:
    """Which part a rank holds, and as which replica: 4 parts, 4 replicas of each."""
    return comm.rank % PARTS, comm.rank // PARTS


def grid(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    return shard("w", full.chunk(PARTS)[part].clone(), (0, part, PARTS), replica_id=replica)


def columns(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    # As a view of other memory: its own is not contiguous.
    own = full.clone().chunk(PARTS, 1)[part]
    return shard("w", own, (1, part, PARTS), replica_id=(0, replica))


def uneven(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    bounds = [0, 1, 4, 6, 8]
    own = full[bounds[part] : bounds[part + 1]].clone()
    return dc.ShardedTensor.from_offset("w", own, full.shape, (bounds[part], 0), replica_id=replica)


def flattened(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    size = full.numel()
    bounds = [0, size // 3, size // 2, size - 5, size]
    begin, end = bounds[part], bounds[part + 1]
    return dc.ShardedTensor.from_rank_offsets_flat(
        "w",
        full.reshape(-1)[begin:end].clone(),
        tuple(full.shape),
        flattened_range=slice(begin, end),
        replica_id=replica,
    )


def layered(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    own = full[2 * part].clone()
    return shard("w", own, (0, part, PARTS), prepend_axis_num=1, replica_id=replica)


def scalar(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    return shard("w", full.reshape(-1)[0].clone(), replica_id=comm.rank)


KINDS: list[Callable[[torch.Tensor, Comm], dc.ShardedTensor]] = [
    grid,
    columns,
    uneven,
    flattened,
    layered,
    scalar,
]


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    return FULL.bool() if dtype is torch.bool else FULL.view(dtype)


def save_checked(state: Callable[[Comm], dict[str, Any]], folder: Path) -> None:
    save_on(RANKS, state, folder, replicas=dc.ReplicaCheck.ALL)


def flip(values: torch.Tensor, bit: int) -> None:
    """Flip a bit of the last element, in its memory."""
    steps = zip(values.shape, values.stride(), strict=True)
    last = values.storage_offset() + sum((extent - 1) * step for extent, step in steps)
    memory = torch.tensor([], dtype=torch.uint8).set_(values.untyped_storage())
    memory[last * values.itemsize + bit // 8] ^= 1 << (bit % 8)


def with_one_flip(
    kind: Callable[[torch.Tensor, Comm], dc.ShardedTensor], dtype: torch.dtype, rank: int, bit: int
) -> Callable[[Comm], dict[str, Any]]:
    def state(comm: Comm) -> dict[str, Any]:
        own = kind(of_dtype(dtype), comm)
        if comm.rank == rank:
            assert own.data is not None
            flip(own.data, bit)
        other = shard("other", torch.arange(6.0), replica_id=comm.rank)
        cell = dc.ShardedObject("rng", comm.rank, (RANKS,), (comm.rank,))
        return {"w": own, "other": other, "rng": cell, "step": 3}

    return state


@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_flipped_bit_is_found_and_nothing_written(tmp_path: Path, kind: Any, row: Any) -> None:
    bit = 0 if row.name == "bool" else 8 * row.itemsize - 1
    state = with_one_flip(kind, row.torch, 6, bit)
    with pytest.raises(dc.InvalidShardingError, match="replicas hold different values") as caught:
        save_checked(state, tmp_path / "c")
    (finding,) = caught.value.findings
    agreeing = [2, 10, 14] if kind is not scalar else [r for r in range(RANKS) if r != 6]
    assert finding.key == "w"
    assert finding.ranks == (6,)
    assert finding.expected == f"as on ranks {', '.join(map(str, agreeing))}"
    assert finding.found == "other values on rank 6"
    rank_6: Any = SimpleNamespace(rank=6)
    part = kind(of_dtype(row.torch), rank_6)
    flat = "" if part.flat_range is None else ", {}:{}".format(*part.flat_range)
    assert finding.problem == f"the copies of {part.box}{flat} are not the same"
    assert finding.remedy is not None
    assert not (tmp_path / "c").exists()


@BACKEND
def test_equal_replicas_are_saved(tmp_path: Path, backend: tuple[str, int]) -> None:
    state = with_one_flip(grid, torch.float32, -1, 0)

    def run(comm: Comm) -> None:
        for check in dc.ReplicaCheck:
            dc.save(state(comm), tmp_path / check.value, backend, comm=comm, replicas=check)

    run_ranks(RANKS, run)
    whole = dc.load({"w": shard("w", torch.zeros(8, 16))}, tmp_path / "all")
    assert torch.equal(whole["w"].view(torch.uint8), FULL)


def test_the_lowest_rank_may_be_the_wrong_one(tmp_path: Path) -> None:
    state = with_one_flip(grid, torch.float32, 2, 31)
    with pytest.raises(dc.InvalidShardingError) as caught:
        save_checked(state, tmp_path / "c")
    (finding,) = caught.value.findings
    assert finding.found == "other values on rank 2"
    assert finding.expected == "as on ranks 6, 10, 14"
    assert "(4, 0) .. (6, 16)" in finding.problem


def test_several_parts_and_ranks_at_once(tmp_path: Path) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        full = torch.zeros(8, 16)
        own, norm = grid(full, comm), shard("norm", torch.zeros(3), replica_id=comm.rank)
        assert own.data is not None
        assert norm.data is not None
        if comm.rank in (1, 9):
            own.data[0, 0] += comm.rank
        if comm.rank >= 8:
            norm.data += 1
        return {"w": own, "norm": norm}

    with pytest.raises(dc.InvalidShardingError) as caught:
        save_checked(state, tmp_path / "c")
    norm, weight = sorted(caught.value.findings, key=lambda finding: finding.key or "")
    assert norm.expected == "as on ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert norm.ranks == tuple(range(8, 16))
    assert weight.expected == "as on ranks 5, 13"
    assert weight.found == "other values on rank 1; other values on rank 9"


def test_warned_of_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = with_one_flip(grid, torch.float32, 6, 31)

    def run(comm: Comm) -> None:
        options: Any = {"replicas": dc.ReplicaCheck.ALL, "on_replica_mismatch": "warn"}
        with dc.CheckpointManager(tmp_path / "run", comm=comm, **options) as manager:
            manager.save(1, state(comm))
            manager.async_save(2, state(comm))

    with caplog.at_level(logging.WARNING):
        run_ranks(RANKS, run)
    assert caplog.text.count("other values on rank 6") == 2
    assert (tmp_path / "run" / "step-00000002" / "metadata.json").exists()


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_one_rank_may_hold_both_replicas(tmp_path: Path, num_ranks: int, wrong: int | None) -> None:
    def run(comm: Comm) -> None:
        leaves = [shard("w", torch.zeros(4), replica_id=(comm.rank, n)) for n in range(2)]
        dc.save({"leaves": leaves}, tmp_path / "same", comm=comm, replicas=dc.ReplicaCheck.ALL)
        if comm.rank == num_ranks - 1 and wrong is not None:
            data = leaves[wrong].data
            assert data is not None
            flip(data, 3)
        # The second save knows the copies.
        dc.save({"leaves": leaves}, tmp_path / "c", comm=comm, replicas=dc.ReplicaCheck.ALL)

    if wrong is None:
        run_ranks(num_ranks, run)
        return
    with pytest.raises(dc.InvalidShardingError, match="replicas hold different values") as caught:
        run_ranks(num_ranks, run)
    (finding,) = caught.value.findings
    assert finding.key == "w"
    assert finding.ranks == (num_ranks - 1,)
    assert finding.expected == (None if num_ranks == 1 else "as on ranks 0, 1")
    assert finding.found == f"copies that differ on rank {num_ranks - 1}"
    assert "(0,) .. (4,)" in finding.problem
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", [grid, columns, uneven, flattened, layered])
@pytest.mark.parametrize("num_ranks", [1, 5])
def test_copies_that_are_cut_differently_are_compared(
    tmp_path: Path, kind: Callable[[torch.Tensor, Comm], dc.ShardedTensor], num_ranks: int
) -> None:
    """One rank holds and writes the whole; the parts are other replicas, there or elsewhere."""

    def state(wrong: int | None) -> Callable[[Comm], dict[str, Any]]:
        def of_rank(comm: Comm) -> dict[str, Any]:
            own: dict[str, Any] = {}
            full = FULL.view(torch.float32)
            for part in range(PARTS):
                if num_ranks == 1 or part == comm.rank - 1:
                    other: Any = SimpleNamespace(rank=part + PARTS)
                    own[f"{part}"] = kind(full, other)
                    if part == wrong:
                        flip(own[f"{part}"].data, 9)
            if comm.rank == 0:
                own["whole"] = shard("w", full[::2].clone() if kind is layered else full)
            return own

        return of_rank

    save_on(num_ranks, state(None), tmp_path / "same", replicas=dc.ReplicaCheck.ALL)
    with pytest.raises(dc.InvalidShardingError, match="cut differently") as caught:
        save_on(num_ranks, state(2), tmp_path / "c", replicas=dc.ReplicaCheck.ALL)
    assert not (tmp_path / "c").exists()
    (finding,) = caught.value.findings
    assert (finding.key, finding.ranks) == ("w", (0,) if num_ranks == 1 else (3,))


@pytest.mark.parametrize("capture", ["copy", "background"])
def test_asynchronous_saves_raise_before_they_return(tmp_path: Path, capture: Any) -> None:
    state = with_one_flip(grid, torch.float32, 6, 31)

    def run(comm: Comm) -> None:
        dc.async_save(
            state(comm), tmp_path / "c", comm=comm, replicas=dc.ReplicaCheck.ALL, capture=capture
        )

    with pytest.raises(dc.InvalidShardingError, match="other values on rank 6"):
        run_ranks(RANKS, run)
    assert not (tmp_path / "c").exists()


def test_with_a_plan_cache_and_parallel_saves(tmp_path: Path) -> None:
    """The second save plans nothing, and compares the values of now."""
    full = FULL.view(torch.float32)

    def run(comm: Comm) -> None:
        cache, own = dc.PlanCache(), grid(full, comm)
        assert own.data is not None
        strategy = FullyParallelSaveStrategyWrapper(TensorStoreSaveShardedStrategy())
        for step in range(3):
            if step == 2 and comm.rank == 15:
                flip(own.data, 3)
            dc.save(
                {"w": own},
                tmp_path / str(step),
                strategy,
                comm=comm,
                plan_cache=cache,
                replicas=dc.ReplicaCheck.ALL,
            )

    with pytest.raises(dc.InvalidShardingError, match="other values on rank 15"):
        run_ranks(RANKS, run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("size", [700_000, 40])
def test_samples_look_at_everything_in_turn(tmp_path: Path, size: int) -> None:
    """Each of two elements is found by one of sixteen saves, and by no other."""
    keys = [f"w{number}" for number in range(4 if size > 1000 else 33)]

    def run(comm: Comm) -> list[int]:
        values = {key: torch.zeros(size) for key in keys}
        own = {key: shard(key, value, replica_id=comm.rank) for key, value in values.items()}
        if comm.rank == 1:
            values[keys[0]][size // 8] = values[keys[1]][size * 5 // 8] = 1
        found = []
        for number in range(2 * SAMPLES):
            try:
                dc.save(
                    own, tmp_path / "c", comm=comm, overwrite=True, replicas=dc.ReplicaCheck.SAMPLE
                )
            except dc.InvalidShardingError:
                found.append(number)
        return found

    found = run_ranks(2, run)[0]
    assert len(found) == 4
    assert [number + SAMPLES for number in found[:2]] == found[2:]


def test_what_one_rank_holds_is_not_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[int] = []
    digest_of_values = replica_check.digest_of_values

    def noted(values: torch.Tensor) -> bytes:
        digested.append(len(values))
        return digest_of_values(values)

    monkeypatch.setattr(replica_check, "digest_of_values", noted)

    def state(comm: Comm) -> dict[str, Any]:
        own = shard("own", torch.ones(3), (0, comm.rank, RANKS))
        return {"own": own, "all": shard("all", torch.ones(5), replica_id=comm.rank)}

    save_checked(state, tmp_path / "c")
    assert digested == [5] * RANKS


def test_what_has_no_main_replica_is_refused_as_ever(tmp_path: Path) -> None:
    def run(comm: Comm) -> None:
        own = shard("w", torch.ones(4, 4), (0, comm.rank, 2), replica_id=1)
        dc.save({"w": own}, tmp_path / "c", comm=comm, replicas=dc.ReplicaCheck.ALL)

    with pytest.raises(dc.InvalidShardingError) as caught:
        run_ranks(2, run)
    assert "replicas hold different" not in str(caught.value)


def test_who_holds_copies_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Comm) -> list[list[str]]:
        steps: list[list[str]] = []
        exchange = comm.exchange_bytes

        def noted(step: str, *others: Any) -> Any:
            steps[-1].append(step)
            return exchange(step, *others)

        monkeypatch.setattr(comm, "exchange_bytes", noted)
        own = grid(FULL.view(torch.float32), comm)
        for number in range(3):
            steps.append([])
            if number == 2 and comm.rank == 15:
                assert own.data is not None
                flip(own.data, 3)
            try:
                dc.save({"w": own}, tmp_path / f"{number}", comm=comm, replicas=dc.ReplicaCheck.ALL)
            except dc.InvalidShardingError:
                assert number == 2
        return steps

    for first, second, third in run_ranks(RANKS, run):
        assert "describing the shards" in first
        assert "describing the shards" not in second
        assert third == ["planning the save", "comparing replicas"]


def test_replicas_without_data_take_no_part(tmp_path: Path) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        own = grid(FULL.view(torch.float32), comm)
        return {"w": own if comm.rank < 8 else own.without_data()}

    save_checked(state, tmp_path / "c")


def test_copies_by_comparison() -> None:
    """Parts, holders and owners are those that comparing every two shards finds."""
    kinds = [grid, uneven, flattened]

    def look(comm: Comm) -> tuple[list[dc.ShardedTensor], Copies]:
        rng = np.random.default_rng(comm.rank)
        leaves = []
        for number in range(6):
            leaf = kinds[int(rng.integers(3))](FULL, comm)
            leaf.key = f"k{number % 4}"
            leaves.append(leaf)
        exchanged = exchange_tables(
            comm, "test", lambda: ({"tensors": describe(leaves, comm.rank)}, None)
        )
        return leaves, copies_of(exchanged.catalog("tensors"), comm.rank)

    of_ranks = run_ranks(RANKS, look)

    def identity(leaf: dc.ShardedTensor) -> Any:
        return leaf.key, leaf.box, leaf.flat_range

    held: dict[Any, set[int]] = {}
    for rank, (leaves, _) in enumerate(of_ranks):
        for leaf in leaves:
            held.setdefault(identity(leaf), set()).add(rank)
    for leaves, copies in of_ranks:
        assert len(copies.parts) == len(held)
        for leaf, part in zip(leaves, copies.local.tolist(), strict=True):
            parts = copies.parts
            assert identity(leaf) == (parts.key(part), parts.box(part), parts.flat_range(part))
            assert set(copies.holders(part).tolist()) == held[identity(leaf)]
            assert int(parts.ranks[part]) == min(held[identity(leaf)])
            assert copies.has_copies[part] >= (len(held[identity(leaf)]) > 1)

"""Copies of one part are found among all ranks, and a bit that differs is found in them."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.planning.replica_check import SAMPLES
from dist_checkpointing.strategies import (
    FullyParallelSaveStrategyWrapper,
    TensorStoreSaveShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from states import between, cell, flat, save_on, shard

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
    return replace(between("w", full, *[0, 1, 4, 6, 8][part : part + 2]), replica_id=replica)


def flattened(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    size = full.numel()
    bounds = [0, size // 3, size // 2, size - 5, size]
    return replace(flat("w", full, *bounds[part : part + 2]), replica_id=replica)


def layered(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    part, replica = place(comm)
    own = full[2 * part].clone()
    return shard("w", own, (0, part, PARTS), prepend_axis_num=1, replica_id=replica)


def scalar(full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    return shard("w", full.reshape(-1)[0].clone(), replica_id=comm.rank)


Kind = Callable[[torch.Tensor, Comm], dc.ShardedTensor]
KINDS: list[Kind] = [grid, columns, uneven, flattened, layered, scalar]


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    return FULL.bool() if dtype is torch.bool else FULL.view(dtype)


State = Callable[[Comm], dict[str, Any]]


def save_checked(state: State, folder: Path) -> None:
    save_on(RANKS, state, folder, replicas=dc.ReplicaCheck.ALL)


def flip(leaf: dc.ShardedTensor, bit: int) -> None:
    """Flip a bit of the last element, in its memory."""
    values = leaf.data
    assert values is not None
    steps = zip(values.shape, values.stride(), strict=True)
    last = values.storage_offset() + sum((extent - 1) * step for extent, step in steps)
    memory = torch.tensor([], dtype=torch.uint8).set_(values.untyped_storage())
    memory[last * values.itemsize + bit // 8] ^= 1 << (bit % 8)


def with_one_flip(kind: Kind, dtype: torch.dtype, rank: int, bit: int) -> State:
    def state(comm: Comm) -> dict[str, Any]:
        own = kind(of_dtype(dtype), comm)
        if comm.rank == rank:
            flip(own, bit)
        other = shard("other", torch.arange(6.0), replica_id=comm.rank)
        return {"w": own, "other": other, "rng": cell("rng", comm.rank, comm), "step": 3}

    return state


FLOAT32 = next(row for row in DTYPES if row.torch is torch.float32)


@pytest.mark.parametrize(
    ("kind", "row", "rank"),
    [
        *((kind, row, 6) for kind, row in zip(cycle(KINDS), DTYPES, strict=False)),
        (grid, FLOAT32, 2),
    ],
    ids=lambda part: getattr(part, "__name__", getattr(part, "name", part)),
)
def test_one_flipped_bit_is_found_and_nothing_written(
    tmp_path: Path, kind: Any, row: Any, rank: int
) -> None:
    bit = 0 if row.name == "bool" else 8 * row.itemsize - 1
    state = with_one_flip(kind, row.torch, rank, bit)
    with pytest.raises(dc.InvalidShardingError, match="replicas hold different values") as caught:
        save_checked(state, tmp_path / "c")
    (finding,) = caught.value.findings
    alike = range(RANKS) if kind is scalar else range(rank % PARTS, RANKS, PARTS)
    agreeing = ", ".join(str(r) for r in alike if r != rank)
    assert (finding.key, finding.ranks) == ("w", (rank,))
    assert finding.expected == f"as on ranks {agreeing}"
    assert finding.found == f"other values on rank {rank}"
    of_rank: Any = SimpleNamespace(rank=rank)
    part = kind(of_dtype(row.torch), of_rank)
    flat = "" if part.flat_range is None else ", {}:{}".format(*part.flat_range)
    assert finding.problem == f"the copies of {part.box}{flat} are not the same"
    assert finding.remedy is not None
    assert not (tmp_path / "c").exists()


def test_several_parts_and_ranks_at_once(tmp_path: Path) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        own = grid(torch.zeros(8, 16), comm)
        if comm.rank in (1, 9):
            flip(own, comm.rank)
        norm = torch.full((3,), comm.rank // 8)
        return {"w": own, "norm": shard("norm", norm, replica_id=comm.rank)}

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
            flip(leaves[wrong], 3)
        # The second save knows the copies.
        dc.save({"leaves": leaves}, tmp_path / "c", comm=comm, replicas=dc.ReplicaCheck.ALL)

    if wrong is None:
        run_ranks(num_ranks, run)
        return
    with pytest.raises(dc.InvalidShardingError, match="replicas hold different values") as caught:
        run_ranks(num_ranks, run)
    (finding,) = caught.value.findings
    assert (finding.key, finding.ranks) == ("w", (num_ranks - 1,))
    assert finding.expected == (None if num_ranks == 1 else "as on ranks 0, 1")
    assert finding.found == f"copies that differ on rank {num_ranks - 1}"
    assert "(0,) .. (4,)" in finding.problem
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [(columns, 1), (grid, 5), (flattened, 5), (layered, 5)]
)
def test_copies_that_are_cut_differently_are_compared(
    tmp_path: Path, kind: Kind, num_ranks: int
) -> None:
    """One rank holds and writes the whole; the parts are other replicas, there or elsewhere."""

    def state(wrong: int | None) -> State:
        def of_rank(comm: Comm) -> dict[str, Any]:
            own: dict[str, Any] = {}
            full = FULL.view(torch.float32)
            for part in range(PARTS):
                if num_ranks == 1 or part == comm.rank - 1:
                    other: Any = SimpleNamespace(rank=part + PARTS)
                    own[f"{part}"] = kind(full, other)
                    if part == wrong:
                        flip(own[f"{part}"], 9)
            if comm.rank == 0:
                own["whole"] = shard("w", full[::2].clone() if kind is layered else full)
            return own

        return of_rank

    save_on(num_ranks, state(None), tmp_path / "same", replicas=dc.ReplicaCheck.ALL)
    with pytest.raises(dc.InvalidShardingError, match="sharded differently") as caught:
        save_on(num_ranks, state(2), tmp_path / "c", replicas=dc.ReplicaCheck.ALL)
    assert not (tmp_path / "c").exists()
    (finding,) = caught.value.findings
    assert (finding.key, finding.ranks) == ("w", (0,) if num_ranks == 1 else (3,))


@pytest.mark.parametrize("capture", ["copy", "background"])
def test_asynchronous_saves_raise_before_they_return(tmp_path: Path, capture: Any) -> None:
    state = with_one_flip(grid, torch.float32, 6, 31)
    options: Any = {"replicas": dc.ReplicaCheck.ALL, "capture": capture}
    with pytest.raises(dc.InvalidShardingError, match="other values on rank 6"):
        run_ranks(RANKS, lambda c: dc.async_save(state(c), tmp_path / "c", comm=c, **options))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("size", [700_000, 40])
def test_samples_look_at_everything_in_turn(tmp_path: Path, size: int) -> None:
    """Each of two elements is found by one of sixteen saves, and by no other."""
    rounds, count = (2, 4) if size > 1000 else (1, 33)
    keys = [f"w{number}" for number in range(count)]
    options: Any = {"overwrite": True, "replicas": dc.ReplicaCheck.SAMPLE}

    def run(comm: Comm) -> list[int]:
        values = {key: torch.zeros(size) for key in keys}
        own = {key: shard(key, value, replica_id=comm.rank) for key, value in values.items()}
        if comm.rank == 1:
            values[keys[0]][size // 8] = values[keys[1]][size * 5 // 8] = 1
        found = []
        for number in range(rounds * SAMPLES):
            try:
                dc.save(own, tmp_path / "c", comm=comm, **options)
            except dc.InvalidShardingError:
                found.append(number)
        return found

    found = run_ranks(2, run)[0]
    assert len(found) == 2 * rounds
    assert [number % SAMPLES for number in found] == found[:2] * rounds


def test_what_has_no_main_replica_is_refused_as_ever(tmp_path: Path) -> None:
    def run(comm: Comm) -> None:
        own = shard("w", torch.ones(4, 4), (0, comm.rank, 2), replica_id=1)
        dc.save({"w": own}, tmp_path / "c", comm=comm, replicas=dc.ReplicaCheck.ALL)

    with pytest.raises(dc.InvalidShardingError) as caught:
        run_ranks(2, run)
    assert "replicas hold different" not in str(caught.value)


@pytest.mark.parametrize("plans_once", [False, True])
def test_the_values_of_now_are_compared_although_it_is_known_who_holds_copies(
    tmp_path: Path, plans_once: bool
) -> None:
    """Also with a plan cache, and where replicas share the work."""

    def run(comm: Comm) -> None:
        options: Any = {"comm": comm, "replicas": dc.ReplicaCheck.ALL}
        if plans_once:
            own_strategy = FullyParallelSaveStrategyWrapper(TensorStoreSaveShardedStrategy())
            options |= {"plan_cache": dc.PlanCache(), "sharded_strategy": own_strategy}
        own = grid(FULL.view(torch.float32), comm)
        for number in range(3):
            if number == 2 and comm.rank == 15:
                flip(own, 3)
            differs = pytest.raises(dc.InvalidShardingError, match="other values on rank 15")
            with differs if number == 2 else nullcontext():
                dc.save({"w": own}, tmp_path / f"{number}", **options)

    run_ranks(RANKS, run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_replicas_without_data_take_no_part(tmp_path: Path) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        own = grid(FULL.view(torch.float32), comm)
        return {"w": own if comm.rank < 8 else own.without_data()}

    save_checked(state, tmp_path / "c")

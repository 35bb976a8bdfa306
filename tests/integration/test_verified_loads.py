"""load(verify=True): each stored byte is read once, and no flipped bit gets through."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_checkpointing as dc
from damage import flip, place_of
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping.tensor_memory import memory_of, sharing_memory
from dist_checkpointing.planning import DefaultLoadPlanner
from dist_checkpointing.strategies import (
    FullyParallelLoadStrategyWrapper,
    Zarr3LoadShardedStrategy,
    chunk_reads,
)
from dist_checkpointing.testing import run_ranks
from samples import BACKENDS
from simulated_groups import the_one_error
from states import flat, rows, save_on, shard

COUNT = 4
SHAPE = (8 * COUNT, 96)


class Reads:
    """Bytes of files that have been read or mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        for name in ("preadv", "pread"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))
        monkeypatch.setattr(Path, "read_bytes", self._counting(Path.read_bytes))
        mapped = chunk_reads._copy_mapped

        def copy_mapped(descriptor: int, start: int, window: Any, target: Any, **how: Any) -> None:
            self.num_bytes += window.box.num_elements * target.itemsize
            mapped(descriptor, start, window, target, **how)

        monkeypatch.setattr(chunk_reads, "_copy_mapped", copy_mapped)

    def _counting(self, own: Any) -> Any:
        def read(*arguments: Any) -> Any:
            got = own(*arguments)
            self.num_bytes += got if isinstance(got, int) else len(got)
            return got

        return read


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def flat_part(key: str, full: torch.Tensor, comm: Comm) -> dc.ShardedTensor:
    """The elements of this rank where each has as many of the flattening."""
    start, stop = (full.numel() * (comm.rank + more) // comm.world_size for more in (0, 1))
    return flat(key, full, start, stop)


@pytest.mark.parametrize("part", [rows, flat_part])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_wanted_as_it_is_stored_is_read_once(
    tmp_path: Path, backend: str, reads: Reads, part: Callable[..., dc.ShardedTensor]
) -> None:
    # Random values: compression cannot hide a second read.
    full = {f"b.{i}": torch.randn(2, 300) for i in range(50)} | {"w": torch.randn(512, 2048)}

    def own(comm: Comm) -> dict[str, Any]:
        return {key: part(key, tensor, comm) for key, tensor in full.items()}

    def one(comm: Comm) -> None:
        template = {key: part(key, torch.zeros_like(t), comm) for key, t in full.items()}
        loaded = dc.load(template, tmp_path, comm=comm, verify=True)
        assert all(torch.equal(loaded[key], leaf.data) for key, leaf in own(comm).items())

    save_on(2, own, tmp_path, BACKENDS[backend]())
    reads.num_bytes = 0
    run_ranks(2, one)
    assert reads.num_bytes <= 1.05 * sum(tensor.nbytes for tensor in full.values())


def block(number: int) -> torch.Tensor:
    """The rows of one rank, with bytes that no other part has."""
    return torch.full((SHAPE[0] // COUNT, SHAPE[1]), float(number + 1))


def saved(folder: Path, backend: str) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        part = (0, comm.rank, COUNT)
        return {"w": shard("w", block(comm.rank), part), "b": shard("b", -block(comm.rank), part)}

    save_on(COUNT, state, folder, BACKENDS[backend]())


def chunk(folder: Path, backend: str, number: int) -> tuple[Path, int]:
    """The file with a block of ``w``, and a byte of the block in it."""
    if backend == "zarr-2-zstd":
        path = folder / "w" / f"c.{number}.0"
        return path, path.stat().st_size // 2
    path, start = place_of(folder, block(number))
    return path, start + 1000 * number + 5


Template = Callable[[Comm], dc.ShardedTensor]


def pieces(comm: Comm) -> dc.ShardedTensor:
    count = torch.Size(SHAPE).numel()
    cut = count // comm.world_size - 7
    bounds = [cut * rank for rank in range(comm.world_size)] + [count]
    return flat("w", torch.zeros(SHAPE), bounds[comm.rank], bounds[comm.rank + 1])


def own_rows(comm: Comm) -> dc.ShardedTensor:
    return rows("w", torch.zeros(SHAPE), comm)


TEMPLATES: dict[str, tuple[Template, int]] = {
    "rows": (own_rows, 1),
    "rows of two": (own_rows, 2),
    "rows of many": (own_rows, 8),
    "columns": (lambda comm: rows("w", torch.zeros(SHAPE), comm, axis=1), 2),
    "strided": (lambda _: shard("w", torch.zeros(SHAPE[::-1]).T), 1),
    "pieces": (pieces, 3),
    "converted": (lambda comm: rows("w", torch.zeros(SHAPE, dtype=torch.float64), comm), 2),
    "allocated": (lambda comm: own_rows(comm).without_data(), 2),
}
CASES = [(name, "rows of two") for name in BACKENDS]
CASES += [
    ([*BACKENDS][(number + more) % 5], kind)
    for more in (0, 3)
    for number, kind in enumerate(kind for kind in TEMPLATES if kind != "rows of two")
]


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_a_flipped_bit_of_any_chunk_is_found_by_all_ranks_alike(
    tmp_path: Path, backend: str, kind: str
) -> None:
    template, world_size = TEMPLATES[kind]
    saved(tmp_path, backend)

    def whole(comm: Comm) -> Any:
        return dc.load({"w": template(comm)}, tmp_path, comm=comm, cast="any", verify=True)

    expected = torch.cat([block(number) for number in range(COUNT)])
    assert sum(loaded["w"].sum() for loaded in run_ranks(world_size, whole)) == expected.sum()
    for number in range(COUNT):
        place = chunk(tmp_path, backend, number)
        flip(*place)
        error = the_one_error(world_size, whole, dc.CorruptCheckpointError)
        assert {finding.key for finding in error.findings} == {"w"}
        # What is not asked for is not verified.
        dc.load({"b": shard("b", torch.zeros(SHAPE))}, tmp_path, verify=True)
        flip(*place)


def test_a_range_of_what_is_stored_in_columns_is_verified(tmp_path: Path) -> None:
    full = torch.arange(24.0).reshape(4, 6)
    columns = [shard("w", part, (1, i, 2)) for i, part in enumerate(full.chunk(2, 1))]
    dc.save({"w": columns}, tmp_path, "zarr")
    loaded = dc.load({"w": flat("w", torch.zeros(4, 6), 5, 20)}, tmp_path, verify=True)
    assert torch.equal(loaded["w"], full.reshape(-1)[5:20])
    flip(*place_of(tmp_path, full[2:3, 3:]))
    with pytest.raises(dc.CorruptCheckpointError, match="checksum differs"):
        dc.load({"w": flat("w", torch.zeros(4, 6), 5, 20)}, tmp_path, verify=True)


def test_every_finding_of_every_rank_is_said(tmp_path: Path) -> None:
    """Also where one rank cannot read a chunk, and another one has read a damaged one."""
    saved(tmp_path, "zarr-2")
    (tmp_path / "w" / "c.0.0").unlink()
    flip(*chunk(tmp_path, "zarr-2", 2))
    flip(*chunk(tmp_path, "zarr-2", 3))

    def one(comm: Comm) -> list[tuple[str, tuple[int, ...], str]]:
        wanted = own_rows(comm)
        with pytest.raises(dc.CorruptCheckpointError, match="not what was saved") as raised:
            dc.load({"w": wanted}, tmp_path, comm=comm, verify=True)
        # What rank 0 wanted could not even be opened.
        notes = ["These tensors may be partly filled: w"] if comm.rank else []
        assert getattr(raised.value, "__notes__", []) == notes
        return [(f.problem[:16], f.ranks, Path(str(f.path)).name) for f in raised.value.findings]

    expected = [
        ("a chunk is missi", (0,), "c.0.0"),
        ("checksum differs", (2,), "c.2.0"),
        ("checksum differs", (3,), "c.3.0"),
    ]
    assert run_ranks(COUNT, one) == [expected] * COUNT


def test_what_another_rank_has_read_is_verified_too(tmp_path: Path) -> None:
    saved(tmp_path, "zarr-2")

    def whole(comm: Comm) -> Any:
        strategy = FullyParallelLoadStrategyWrapper(Zarr3LoadShardedStrategy())
        wanted = {"w": shard("w", torch.zeros(SHAPE), replica_id=comm.rank)}
        return dc.load(wanted, tmp_path, strategy, comm=comm, verify=True)

    def fails(comm: Comm) -> None:
        with pytest.raises(dc.CorruptCheckpointError, match="checksum differs"):
            whole(comm)

    assert all(loaded["w"][-1, -1] == COUNT for loaded in run_ranks(2, whole))
    flip(*chunk(tmp_path, "zarr-2", 1))
    run_ranks(2, fails)


class Negating(DefaultLoadPlanner):
    """Puts other values into memory than those that are stored."""

    def apply_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        self.acquire_tensor(item).copy_(-tensor)


def test_a_planner_of_a_user_may_change_values(tmp_path: Path) -> None:
    saved(tmp_path, "zarr-2-zstd")
    strategy = Zarr3LoadShardedStrategy(planner=Negating())
    wanted = {"w": shard("w", torch.zeros(SHAPE, dtype=torch.float64))}
    loaded: Any = dc.load(wanted, tmp_path, strategy, cast="any", verify=True)
    assert loaded["w"][-1, -1] == -COUNT
    flip(*chunk(tmp_path, "zarr-2-zstd", 1))
    with pytest.raises(dc.CorruptCheckpointError):
        dc.load(wanted, tmp_path, strategy, cast="any", verify=True)


@pytest.mark.parametrize("verify", [False, True])
def test_memory_that_two_leaves_share_is_no_damage(tmp_path: Path, verify: bool) -> None:
    saved(tmp_path / "large", "tensorstore")
    dc.save(
        {key: shard(key, torch.full((64,), n * 1.0)) for n, key in enumerate("wbx")},
        tmp_path / "small",
    )
    for name, shape in (("large", SHAPE), ("small", (64,))):
        memory = torch.zeros(shape)
        wanted = {key: shard(key, memory) for key in "wb"}
        with pytest.raises(dc.StateMismatchError, match="Give each leaf separate memory") as raised:
            dc.load(wanted, tmp_path / name, verify=verify)
        assert {finding.key for finding in raised.value.findings} <= {"w", "b"}
    memory = torch.zeros(SHAPE)
    for key in ("w", "b"):
        wanted = {"v": shard(key, memory), "w": shard(key, memory)}
        loaded = dc.load(wanted, tmp_path / "large", verify=verify)
        assert (loaded["v"] is memory, loaded["w"] is memory) == (True, True)
        assert abs(memory[-1, -1]) == COUNT


def test_tied_weights_that_were_saved_as_two(tmp_path: Path) -> None:
    values = torch.tensor([1.0, math.nan])
    dc.save({key: shard(key, values) for key in ("embed", "head")}, tmp_path)
    tied = torch.zeros(2)
    dc.load({key: shard(key, tied) for key in ("embed", "head")}, tmp_path)
    assert tied[0] == 1


def test_views_that_share_no_element_are_filled(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(4, 6)
    state = {"even": values[:, ::2], "odd": values[:, 1::2], "none": values[:0]}
    dc.save({"plain": values[:, 0].clone()} | {k: shard(k, v) for k, v in state.items()}, tmp_path)
    memory, other = torch.zeros(4, 6), torch.zeros(4, 2)
    views = {"even": memory[:, ::2], "odd": memory[:, 1::2], "none": memory[:0]}
    template = {key: shard(key, view) for key, view in views.items()}
    copies = [shard("even", memory[:, ::2]), shard("even", torch.zeros(4, 3))]
    columns = [*views.values()]
    spans = np.array([*map(memory_of, columns)])
    assert sharing_memory(columns, *spans.T) == []
    loaded = dc.load({**template, "copies": copies, "plain": other[:, 0]}, tmp_path)
    assert torch.equal(memory, values)
    assert torch.equal(loaded["copies"][1], values[:, ::2])
    assert all(loaded[key] is view for key, view in views.items())
    assert other.T.tolist() == [[0, 6, 12, 18], [0] * 4]
    with pytest.raises(dc.StateMismatchError, match="share memory") as raised:
        dc.load({"plain": memory[:, 1], "odd": template["odd"]}, tmp_path)
    assert [finding.key for finding in raised.value.findings] == ["odd"]

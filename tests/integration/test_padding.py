"""What of a shard lies outside its global tensor, or is not stored, is zero however it is read."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import Checkpoint, ShardedTensor, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage import ReadMode, StorageOptions
from dist_checkpointing.strategies import (
    FullyParallelLoadStrategyWrapper,
    PlannedLoadStrategy,
    StrategyAction,
)
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.testing import run_ranks
from samples import BACKENDS
from states import between

FULL = torch.arange(1.0, 36.0).reshape(5, 7)


CUTS = {"whole": [0, 5], "chunks": [0, 1, 2, 3, 4, 5], "pieces": [0, 2, 5]}
PAIRS = [*((name, "pieces") for name in BACKENDS), ("zarr-2", "whole"), ("zarr-1", "chunks")]
PAIRS += [("tensorstore", "chunks"), ("torch_dist", "whole")]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend, how = request.param
    path = tmp_path_factory.mktemp("saved") / "c"
    parts = {str(a): between("w", FULL, a, b) for a, b in itertools.pairwise(CUTS[how])}
    save(parts, path, BACKENDS[backend]())
    return path


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Memory that is not written shows: torch fills it with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def memory(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """None, or NaN in memory that is contiguous, strided, or has its axes in another order."""
    nan = float("nan")
    if kind == "none":
        return None
    if kind == "strided":
        return torch.full((*shape[:-1], 2 * shape[-1]), nan, dtype=dtype)[..., ::2]
    made = torch.full(shape if kind == "given" else shape[::-1], nan, dtype=dtype)
    return made if kind == "given" else made.permute(*reversed(range(len(shape))))


def check(leaf: ShardedTensor, loaded: torch.Tensor) -> None:
    padded = torch.zeros(20, 20)
    padded[:5, :7] = FULL
    part = padded[leaf.box.slices()].to(leaf.dtype)
    flat = leaf.flattened_range
    assert torch.equal(loaded, part if flat is None else part.reshape(-1)[flat])
    assert leaf.data is None or loaded is leaf.data


def template(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "none",
    flat: slice | None = None,
    global_shape: tuple[int, int] = (5, 7),
) -> ShardedTensor:
    data = memory(kind, shape if flat is None else (flat.stop - flat.start,), dtype)
    return ShardedTensor(
        "w", data, dtype, shape, global_shape, offset, None,
        allow_shape_mismatch=True, flattened_range=flat,
    )  # fmt: skip


PLACES = [((3, 4), (4, 5)), ((0, 6), (5, 3)), ((4, 0), (1, 9)), ((5, 0), (2, 7)), ((0, 0), (9, 9))]


@pytest.mark.parametrize("number", range(4))
def test_the_part_outside_is_zero(folder: Path, number: int) -> None:
    kind = ["none", "given", "strided", "turned"][number]
    for offset, shape in PLACES:
        size = shape[0] * shape[1]
        cases: list[tuple[torch.dtype, slice | None]] = [
            (torch.float32, None),
            (torch.bfloat16, None),
            (torch.float32, slice(1, size - 1)),
            (torch.float64, slice(2, size)),
        ]
        dtype, flat = cases[(number + size) % 4]
        leaf = template(offset, shape, dtype=dtype, kind=kind, flat=flat)
        check(leaf, load({"w": leaf}, folder, cast="any")["w"])


@pytest.mark.parametrize(
    ("mode", "kind"), [(ReadMode.MEMMAP, "given"), (ReadMode.PREAD, "strided")]
)
def test_by_a_strategy_of_ones_own(folder: Path, mode: ReadMode, kind: str) -> None:
    found: Any = strategy_for(folder)
    assert isinstance(found, PlannedLoadStrategy)
    found.options = StorageOptions(read_mode=mode, buffer_bytes=1, threads=2)
    for offset, shape in PLACES:
        leaf, again = (template(offset, shape, kind=kind) for _ in range(2))
        check(leaf, load({"w": leaf}, folder, found)["w"])
        # The strategy alone, as other programs call it.
        check(again, found.load({"w": again}, folder)["w"])


def strategy_for(folder: Path) -> Any:
    return select_strategy(StrategyAction.LOAD_SHARDED, None, Checkpoint.open(folder).backend)


def test_of_a_tensor_that_was_saved_smaller(folder: Path) -> None:
    """It sticks out of what is stored and of what it says its tensor is."""
    for row in (2, 6):
        own = ShardedTensor(
            "w", None, FULL.dtype, (9,), (8, 9), (row, 0), None, 0, 1, allow_shape_mismatch=True
        )
        check(own, load({"w": own}, folder)["w"][None])
    for kind in ("none", "strided"):
        leaf = template((4, 4), (6, 5), kind=kind, global_shape=(8, 8))
        check(leaf, load({"w": leaf}, folder)["w"])


def test_where_ranks_share_their_reads(folder: Path) -> None:
    leaves = {str(i): template(*place) for i, place in enumerate(PLACES)}

    def work(comm: Comm) -> None:
        shared = FullyParallelLoadStrategyWrapper(strategy_for(folder), min_shared_bytes=0)
        loaded: Any = load(dict(leaves), folder, shared, comm=comm)
        for name, leaf in leaves.items():
            check(leaf, loaded[name])

    run_ranks(3, work)

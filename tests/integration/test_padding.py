"""What of a shard lies outside its global tensor, or is not stored, is zero however it is read."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
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

MEMORY = ["none", "given", "strided", "expanded-axes"]


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Memory that is not written shows: torch fills it with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def stored_as(how: str) -> dict[str, ShardedTensor]:
    cuts = {"whole": [0, 5], "chunks": [0, 1, 2, 3, 4, 5], "pieces": [0, 2, 5]}[how]
    return {str(a): between("w", FULL, a, b) for a, b in itertools.pairwise(cuts)}


PAIRS = [*((name, "pieces") for name in BACKENDS), ("zarr-2", "whole"), ("zarr-1", "chunks")]
PAIRS += [("tensorstore", "chunks"), ("torch_dist", "whole")]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend, how = request.param
    path = tmp_path_factory.mktemp("saved") / "c"
    save(stored_as(how), path, BACKENDS[backend]())
    return path


def memory(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    nan = float("nan")
    if kind == "none":
        return None
    if kind == "given":
        return torch.full(shape, nan, dtype=dtype)
    if kind == "strided":
        return torch.full((*shape[:-1], 2 * shape[-1]), nan, dtype=dtype)[..., ::2]
    return torch.full(tuple(reversed(shape)), nan, dtype=dtype).permute(
        *reversed(range(len(shape)))
    )


def template(
    offset: tuple[int, int],
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "none",
    flat: slice | None = None,
    global_shape: tuple[int, int] = (5, 7),
) -> ShardedTensor:
    own = shape if flat is None else (flat.stop - flat.start,)
    return ShardedTensor(
        "w",
        memory(kind, own, dtype),
        dtype,
        shape,
        global_shape,
        offset,
        None,
        allow_shape_mismatch=True,
        flattened_range=flat,
    )


def expected(leaf: ShardedTensor) -> torch.Tensor:
    padded = torch.zeros(20, 20)
    padded[:5, :7] = FULL
    part = padded[leaf.box.slices()].to(leaf.dtype)
    flat = leaf.flattened_range
    return part if flat is None else part.reshape(-1)[flat]


PLACES = [((3, 4), (4, 5)), ((0, 6), (5, 3)), ((4, 0), (1, 9)), ((5, 0), (2, 7)), ((0, 0), (9, 9))]


@pytest.mark.parametrize(("offset", "shape"), PLACES)
def test_the_part_outside_is_zero(
    folder: Path, offset: tuple[int, int], shape: tuple[int, int]
) -> None:
    cases: list[tuple[torch.dtype, slice | None]] = [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, slice(1, shape[0] * shape[1] - 1)),
        (torch.float64, slice(2, shape[0] * shape[1])),
    ]
    for (dtype, flat), kind in zip(cases, MEMORY[len(shape) % 4 :] + MEMORY, strict=False):
        leaf = template(offset, shape, dtype=dtype, kind=kind, flat=flat)
        with unwritten_memory_is_nan():
            loaded = load({"w": leaf}, folder, cast="any")["w"]
        assert torch.equal(loaded, expected(leaf))
        if leaf.data is not None:
            assert loaded is leaf.data


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(ReadMode.PREAD, "none"), (ReadMode.MEMMAP, "given"), (ReadMode.PREAD, "strided")],
)
def test_by_a_strategy_of_ones_own(folder: Path, mode: ReadMode, kind: str) -> None:
    options = StorageOptions(read_mode=mode, buffer_bytes=1, threads=2)
    found: Any = select_strategy(StrategyAction.LOAD_SHARDED, None, _backend_of(folder))
    assert isinstance(found, PlannedLoadStrategy)
    found.options = options
    for offset, shape in PLACES:
        leaf = template(offset, shape, kind=kind)
        with unwritten_memory_is_nan():
            loaded = load({"w": leaf}, folder, found)["w"]
            again = template(offset, shape, kind=kind)
            # The strategy alone, as other programs call it.
            direct = found.load({"w": again}, folder)["w"]
        assert torch.equal(loaded, expected(leaf))
        assert torch.equal(direct, expected(leaf))


def _backend_of(folder: Path) -> tuple[str, int]:
    return Checkpoint.open(folder).backend


def test_of_a_tensor_that_was_saved_smaller(folder: Path) -> None:
    """It sticks out of what is stored and of what it says its tensor is."""
    for row in (2, 6):
        whole, offset = (8, 9), (row, 0)
        own = ShardedTensor(
            "w", None, FULL.dtype, (9,), whole, offset, None, 0, 1, allow_shape_mismatch=True
        )
        with unwritten_memory_is_nan():
            assert torch.equal(load({"w": own}, folder)["w"], expected(own)[0])
    for kind in ("none", "strided"):
        leaf = template((4, 4), (6, 5), kind=kind, global_shape=(8, 8))
        with unwritten_memory_is_nan():
            loaded = load({"w": leaf}, folder)["w"]
        assert torch.equal(loaded, expected(leaf))


def test_where_ranks_share_their_reads(folder: Path) -> None:
    def work(comm: Comm) -> list[torch.Tensor]:
        base: Any = select_strategy(StrategyAction.LOAD_SHARDED, None, _backend_of(folder))
        shared = FullyParallelLoadStrategyWrapper(base, min_shared_bytes=0)
        leaves = {str(i): template(o, s, kind="none") for i, (o, s) in enumerate(PLACES)}
        loaded: Any = load(leaves, folder, shared, comm=comm)
        return [loaded[name] for name in leaves]

    with unwritten_memory_is_nan():
        for tensors in run_ranks(3, work):
            for tensor, (offset, shape) in zip(tensors, PLACES, strict=True):
                assert torch.equal(tensor, expected(template(offset, shape)))

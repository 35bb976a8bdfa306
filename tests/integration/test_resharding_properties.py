"""Any save grid to any load grid. The oracle is the plain full tensor, compared bit by bit.

Files are mapped or read, with small buffers, over gaps of any size, from a disk or a store.
"""

import copy
import functools
import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import ranged_reads
from dist_checkpointing.format import Box
from dist_checkpointing.mapping import DTYPES, ReplicaId
from dist_checkpointing.planning import WholeShardLayout, resharding
from dist_checkpointing.storage import ReadMode, StorageOptions
from dist_checkpointing.strategies import (
    StrategyAction,
    Zarr3SaveShardedStrategy,
    ZarrSaveShardedStrategy,
    ZarrV2Writer,
    chunk_reads,
)
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.testing import random_bits, run_ranks
from simulated_groups import TinyChunks
from states import wholes
from stores import copied_up, new_url
from tiers import examples
from tilings import tilings

Ints = tuple[int, ...]
Memory = Literal["contiguous", "transposed", "strided", "offset"]

MEMORIES: tuple[Memory, ...] = ("contiguous", "transposed", "strided", "offset")
MAX_PARTS = 10
UNTOUCHED = 1  # what every byte is before a load; a valid bool too


class SharedChunkWriter(ZarrV2Writer):
    layout = WholeShardLayout(max_chunks_per_shard=1)


class SharedChunkStrategy(ZarrSaveShardedStrategy):
    """Uneven cuts make one chunk into which several ranks write."""

    writer_type = SharedChunkWriter


FORMATS: dict[str, Any] = {
    "zarr 1": ZarrSaveShardedStrategy,
    "zarr 1 shared chunks": SharedChunkStrategy,
    "zarr 2": Zarr3SaveShardedStrategy,
    "zarr 2 zstd": functools.partial(Zarr3SaveShardedStrategy, codec="zstd"),
    "zarr 2 gzip": functools.partial(Zarr3SaveShardedStrategy, codec="gzip"),
    "zarr 2 blosc": functools.partial(Zarr3SaveShardedStrategy, codec="blosc"),
    "zarr 2 tiny chunks": TinyChunks,
    "zarr 2 tiny chunks zstd": functools.partial(TinyChunks, codec="zstd"),
}
BACKENDS = ["tensorstore", "torch_dist", "zarr 1", "zarr 2 zstd"]


def strategy(file_format: str) -> Any:
    made: Any = FORMATS.get(file_format, lambda: file_format)()
    return made


@dataclass(frozen=True)
class Part:
    """A part of a global tensor that one rank saves or wants.

    ``memory`` is how its tensor lies in memory; None means a template without data.
    """

    rank: int
    offset: Ints
    shape: Ints
    flat: tuple[int, int] | None = None
    replica_id: ReplicaId = 0
    prepend: int = 0
    fragmentations: Ints | None = None
    memory: Memory | None = "contiguous"

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """What this part must hold."""
        slices = tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))
        box = full[slices].reshape(self.shape[self.prepend :])
        return box if self.flat is None else box.reshape(-1)[slice(*self.flat)]


@dataclass(frozen=True)
class Case:
    """A global tensor, how it is saved and how it is wanted."""

    key: str
    dtype: torch.dtype
    shape: Ints
    saved: tuple[Part, ...]
    wanted: tuple[Part, ...]
    seed: int = 0

    @property
    def full(self) -> torch.Tensor:
        return random_bits(self.shape, self.dtype, self.seed)


def bits(tensor: torch.Tensor) -> bytes:
    packed = tensor.detach().clone(memory_format=torch.contiguous_format)
    return packed.reshape(-1).view(torch.uint8).numpy().tobytes()


def allocate(shape: Ints, dtype: torch.dtype, memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor lying in memory as asked, and the whole memory as bytes."""
    if memory == "transposed":
        outer = shape[::-1]
    elif memory == "strided":
        outer = (*shape[:-1], 2 * shape[-1] + 1) if shape else (3,)
    elif memory == "offset":
        outer = tuple(extent + 2 for extent in shape) or (3,)
    else:
        outer = shape
    raw = torch.full((math.prod(outer) * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8)
    base = raw.view(dtype).reshape(outer)
    if memory == "transposed":
        return base.permute(tuple(reversed(range(len(shape))))), raw
    if memory == "strided":
        return (base[..., 1::2] if shape else base[1]), raw
    if memory == "offset":
        return (base[tuple(slice(1, 1 + e) for e in shape)] if shape else base[1]), raw
    return base, raw


def leaf(case: Case, part: Part, data: torch.Tensor | None) -> dc.ShardedTensor:
    return dc.ShardedTensor(
        case.key,
        data,
        case.dtype,
        part.shape[part.prepend :],
        case.shape,
        part.offset,
        part.fragmentations,
        part.replica_id,
        part.prepend,
        flattened_range=None if part.flat is None else slice(*part.flat),
    )


def save_cases(cases: Sequence[Case], world_size: int, folder: Path, file_format: str) -> None:
    def save_rank(comm: Comm) -> None:
        leaves = []
        for case in cases:
            for part in case.saved:
                if part.rank == comm.rank:
                    values = part.of(case.full)
                    data, _ = allocate(tuple(values.shape), case.dtype, part.memory or "contiguous")
                    data.copy_(values)
                    leaves.append(leaf(case, part, data))
        dc.save({"leaves": leaves}, folder, strategy(file_format), comm=comm)

    run_ranks(world_size, save_rank)


def check_load(
    cases: Sequence[Case], world_size: int, folder: Path | str, reader: str | None, options: Any
) -> None:
    """Load what every rank wants, and compare each part with the full tensor."""
    backend = dc.Checkpoint.open(folder).backend

    def load_rank(comm: Comm) -> None:
        reading: Any = copy.copy(select_strategy(StrategyAction.LOAD_SHARDED, reader, backend))
        reading.options = options
        parts = [(c, p) for c in cases for p in c.wanted if p.rank == comm.rank]
        leaves, memories = [], []
        for case, part in parts:
            shape = tuple(part.of(case.full).shape)
            given, memory = None, None
            if part.memory is not None:
                given, memory = allocate(shape, case.dtype, part.memory)
            leaves.append(leaf(case, part, given))
            memories.append(memory)
        loaded: Any = dc.load({"leaves": leaves}, folder, reading, comm=comm)
        if not leaves:
            return
        for (case, part), asked, memory, got in zip(
            parts, leaves, memories, loaded["leaves"], strict=True
        ):
            expected = part.of(case.full)
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            assert bits(got) == bits(expected), (case, part)
            assert (memory is None) == (asked.data is None)
            if memory is not None and asked.data is not None:
                assert got is asked.data
                asked.data.copy_(memory.new_ones(got.nbytes).view(got.dtype).view(got.shape))
                assert (memory == UNTOUCHED).all(), "wrote outside of the given tensor"

    run_ranks(world_size, load_rank)


def check_whole(cases: Sequence[Case], folder: Path | str) -> None:
    """One plain process reads everything."""
    metadata = dc.load_tensors_metadata(folder)
    assert {k: (t.global_shape, t.dtype) for k, t in metadata.items()} == {
        case.key: (case.shape, case.dtype) for case in cases
    }
    plain = dc.load_plain_tensors(folder)
    assert {key: bits(plain[key]) for key in metadata} == {
        case.key: bits(case.full) for case in cases
    }


# How a tensor is cut: all boxes together cover it exactly once.


def product_of(cuts: Sequence[Sequence[int]]) -> list[tuple[Ints, Ints]]:
    """(offset, shape) of all boxes between the given cut points of every axis."""
    intervals = [list(itertools.pairwise(points)) for points in cuts]
    return [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in itertools.product(*intervals)
    ]


@st.composite
def regular_grids(draw: st.DrawFn, shape: Ints) -> tuple[list[tuple[Ints, Ints]], Ints]:
    budget, counts = MAX_PARTS, []
    for extent in shape:
        divisors = [n for n in range(1, min(extent, budget) + 1) if extent % n == 0]
        counts.append(draw(st.sampled_from(divisors or [1])))
        budget //= counts[-1]
    cuts = [
        [i * (extent // count) for i in range(count + 1)]
        for extent, count in zip(shape, counts, strict=True)
    ]
    return product_of(cuts), tuple(counts)


@st.composite
def any_boxes(draw: st.DrawFn, shape: Ints, max_size: int) -> list[tuple[Ints, Ints]]:
    """Boxes that may overlap, leave gaps, or be empty."""
    boxes = []
    for _ in range(draw(st.integers(0, max_size))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append((tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return boxes


@st.composite
def flat_pieces(draw: st.DrawFn, shape: Ints) -> list[tuple[int, int]]:
    size = math.prod(shape)
    points = draw(st.lists(st.integers(0, size), max_size=3))
    return list(itertools.pairwise(sorted([0, *points, size])))


def leading_ones(shape: Ints) -> int:
    return next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape))


MAIN_IDS: list[ReplicaId] = [0, (0,), (0, 0)]
OTHER_IDS: list[ReplicaId] = [1, 3, (0, 1), (2, 0)]


@st.composite
def covers(draw: st.DrawFn, shape: Ints, world_size: int) -> list[Part]:
    """Parts whose main replicas cover the tensor exactly once."""
    ranks = st.integers(0, world_size - 1)
    memories = st.sampled_from(MEMORIES)
    counts: Ints | None = None
    if draw(st.booleans()):
        boxes, counts = draw(regular_grids(shape))
    else:
        tiles = draw(tilings(Box.whole(shape), 3))
        boxes = [(tile.offset, tile.shape) for tile in tiles]
    flatten = draw(st.sampled_from(["none", "none", "all", "some"]))
    parts = []
    for offset, box_shape in boxes:
        prepend = draw(st.integers(0, leading_ones(box_shape)))
        pieces: list[tuple[int, int] | None] = [None]
        if flatten == "all" or (flatten == "some" and draw(st.booleans())):
            pieces = list(draw(flat_pieces(box_shape)))
        for flat in pieces:
            holders = draw(st.lists(ranks, min_size=1, max_size=3))
            for i, rank in enumerate(holders):
                replica_id = draw(st.sampled_from(OTHER_IDS if i else MAIN_IDS))
                memory = draw(memories)
                parts.append(
                    Part(rank, offset, box_shape, flat, replica_id, prepend, counts, memory)
                )
    # Shards that count for nothing: empty ones at any place, and replicas that line up with no main
    # one.
    for offset, box_shape in draw(any_boxes(shape, 2)):
        replica_id = draw(st.sampled_from(OTHER_IDS))
        if math.prod(box_shape) == 0:
            replica_id = draw(st.sampled_from(MAIN_IDS + OTHER_IDS))
        parts.append(Part(draw(ranks), offset, box_shape, None, replica_id))
    order = draw(st.permutations(range(len(parts)))) if len(parts) < 8 else range(len(parts))
    return [parts[i] for i in order]


@st.composite
def wishes(draw: st.DrawFn, shape: Ints, world_size: int) -> list[Part]:
    """Any parts: a whole cut, or boxes that leave gaps and overlap; flattened or not."""
    ranks = st.integers(0, world_size - 1)
    memories = st.sampled_from([None, *MEMORIES])
    if draw(st.booleans()):
        parts = draw(covers(shape, world_size))
        return [replace(p, memory=draw(memories)) for p in parts]
    parts = []
    for offset, box_shape in draw(any_boxes(shape, 4)):
        flat = None
        if draw(st.booleans()):
            size = math.prod(box_shape)
            start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
            flat = (start, stop)
        prepend = draw(st.integers(0, leading_ones(box_shape)))
        parts.append(Part(draw(ranks), offset, box_shape, flat, 0, prepend, None, draw(memories)))
    return parts


SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12]), max_size=4).filter(
    lambda shape: math.prod(shape) <= 600
)
KEYS = ["w", "decoder.layers.0.weight", "optimizer/state/exp_avg", "Gewicht ü %41", "-c.0"]


@st.composite
def cases(draw: st.DrawFn, save_size: int, load_size: int) -> list[Case]:
    made = []
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)):
        shape = tuple(draw(SHAPES))
        dtype = draw(st.sampled_from(DTYPES)).torch
        saved = draw(covers(shape, save_size))
        wanted = draw(wishes(shape, load_size))
        made.append(Case(key, dtype, shape, tuple(saved), tuple(wanted), draw(st.integers(0, 99))))
    return made


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, list[Case]]:
    save_size, load_size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return save_size, load_size, draw(cases(save_size, load_size))


OPTIONS = st.builds(
    StorageOptions,
    read_mode=st.sampled_from(ReadMode),
    buffer_bytes=st.sampled_from([1, 64, 2**20]),
    threads=st.sampled_from([1, 2]),
)
GAPS = [
    (chunk_reads, "_MOST_GAP_BYTES"),
    (chunk_reads, "_MOST_MAPPED_GAP_BYTES"),
    (ranged_reads.StoreFile, "most_gap"),
]


@examples(75)
@given(
    world=worlds(),
    file_format=st.sampled_from([*FORMATS, "tensorstore", "torch_dist"]),
    by_tensorstore=st.booleans(),
    options=OPTIONS,
    in_store=st.sampled_from([False, False, True]),
    most_pairs=st.sampled_from([1, 7, resharding._MOST_PAIRS]),
    most_gap=st.sampled_from([0, 4, 8, 24, 2**16]),
)
def test_any_save_grid_loads_into_any_load_grid(
    file_format: str,
    world: tuple[int, int, list[Case]],
    *,
    by_tensorstore: bool,
    options: StorageOptions,
    in_store: bool,
    most_pairs: int,
    most_gap: int,
) -> None:
    """TensorStore also reads what the zarr backends have written; planned at once, or in parts."""
    save_size, load_size, tensors = world
    reader = "tensorstore" if by_tensorstore and file_format != "torch_dist" else None
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "checkpoint"
        save_cases(tensors, save_size, folder, file_format)
        place = copied_up(folder, new_url()) if in_store else folder
        patch.setattr(resharding, "_MOST_PAIRS", most_pairs)
        for owner, gap in GAPS:
            patch.setattr(owner, gap, most_gap)
        check_load(tensors, load_size, place, reader, options)
        check_whole(tensors, place)


@pytest.mark.parametrize("file_format", BACKENDS)
def test_views_that_overlap_themselves_are_saved_as_their_values(
    tmp_path: Path, file_format: str
) -> None:
    tensors = {
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 3),
        "inside a graph": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)) * 2,
        "diagonal": torch.arange(9.0).reshape(3, 3).diagonal(),
        "overlapping windows": torch.arange(6.0).unfold(0, 3, 1),
    }
    dc.save(wholes(tensors), tmp_path / "checkpoint", strategy(file_format))
    plain = dc.load_plain_tensors(tmp_path / "checkpoint")
    for key, expected in tensors.items():
        assert torch.equal(plain[key], expected.detach()), key

"""Global tensors cut into shards for simulated ranks, and exact comparison.

A *cut* turns a full tensor into the shards of every rank. The values of a shard are taken from the
full tensor by plain indexing. So after a save with one cut, the shards of another cut are the
expected result of a load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dist_checkpointing.mapping import ReplicaId, ShardedTensor, flatten
from dist_checkpointing.mapping.nested_dicts import mapped, path_text, value_at

Shards = list[list[ShardedTensor]]
Place = tuple[int, int, int]
Sharding = Callable[[str, torch.Tensor, int], Shards]
"""``(key, full tensor, world size)`` -> the shards of each rank, in rank order."""

CUT_SHAPE = (8, 4, 6)
"""A shape that every entry of CUTS can cut for 1, 2, 3 and 4 ranks."""


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes: NaNs with payloads, infinities and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).to(torch.bool)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def poisoned(expected: torch.Tensor) -> torch.Tensor:
    """A tensor to load into, in which every element differs from the expected one."""
    values = expected.detach().contiguous()
    if values.dtype == torch.bool:
        return ~values
    inverted = values.reshape(-1).view(torch.uint8).bitwise_not()
    return inverted.view(values.dtype).reshape(values.shape)


def assert_same_bits(actual: object, expected: torch.Tensor, what: str) -> None:
    """Fail unless ``actual`` is a tensor of the same dtype, shape and bits."""
    assert isinstance(actual, torch.Tensor), f"{what}: not a tensor but {type(actual).__name__}"
    found, wanted = (actual.dtype, tuple(actual.shape)), (expected.dtype, tuple(expected.shape))
    assert found == wanted, f"{what}: {found} instead of {wanted}"
    pair = [t.detach().cpu().resolve_conj().resolve_neg() for t in (actual, expected)]
    # A copy: a view of one element counts as contiguous for any strides.
    have, want = (
        t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in pair
    )
    differing = int((have != want).sum())
    assert not differing, f"{what}: {differing} of {len(want)} bytes differ"


def data_of(shard: ShardedTensor) -> torch.Tensor:
    assert shard.data is not None
    return shard.data


def template(shard: ShardedTensor, data: torch.Tensor | None = None) -> ShardedTensor:
    """The same part of the global tensor, to load into ``data`` (None: into new memory)."""
    return replace(shard, data=data, replica_id=0)


def blank(nest: Any) -> Any:
    """The same nest of shards, to load into memory in which every element is wrong."""
    return mapped(nest, lambda shard: template(shard, poisoned(data_of(shard))))


def assert_loaded(result: Any, nest: Any, what: str) -> None:
    """Fail unless ``result`` has the values of all shards of a nest."""
    for path, shard in flatten(nest)[0].items():
        assert_same_bits(value_at(result, path), data_of(shard), f"{path_text(path)}, {what}")


def every_cut(full: Mapping[str, torch.Tensor], world_size: int, rank: int) -> dict[str, Any]:
    """The shards of one rank; each tensor is cut in the way that its key names."""
    return {name: CUTS[name](name, tensor, world_size)[rank] for name, tensor in full.items()}


def one_for_each_cut(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: random_bits(CUT_SHAPE, dtype, i) for i, name in enumerate(CUTS)}


def _regular(
    key: str, part: torch.Tensor, *places: Place, replica_id: ReplicaId = 0, prepended: int = 0
) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        key, part.clone(), *places, replica_id=replica_id, prepend_axis_num=prepended
    )


def uneven_shard(
    key: str, full: torch.Tensor, offset: Sequence[int], shape: Sequence[int]
) -> ShardedTensor:
    """A box of ``full`` as a shard without a declared grid."""
    box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return ShardedTensor(
        key, full[box].clone(), full.dtype, tuple(shape), tuple(full.shape), tuple(offset), None
    )


def _along(axis: int, key: str, full: torch.Tensor, count: int) -> Shards:
    if full.shape[axis] % count == 0:
        parts = full.chunk(count, axis)
        return [[_regular(key, part, (axis, rank, count))] for rank, part in enumerate(parts)]
    edges = [full.shape[axis] * rank // count for rank in range(count + 1)]
    offset, shape = [0] * full.ndim, [*full.shape]
    shards = []
    for start, stop in itertools.pairwise(edges):
        offset[axis], shape[axis] = start, stop - start
        shards.append([uneven_shard(key, full, offset, shape)])
    return shards


by_rows: Sharding = partial(_along, 0)
by_columns: Sharding = partial(_along, 1)


def rows_of(full: Mapping[str, torch.Tensor], world_size: int, rank: int) -> dict[str, Any]:
    return {key: by_rows(key, tensor, world_size)[rank][0] for key, tensor in full.items()}


def by_blocks(key: str, full: torch.Tensor, world_size: int) -> Shards:
    rows = max(1, world_size // 2)
    columns = world_size // rows
    return [
        [_regular(key, block, (0, i, rows), (2, j, columns))]
        for i, row in enumerate(full.chunk(rows, 0))
        for j, block in enumerate(row.chunk(columns, 2))
    ]


def interleaved(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Each row is a shard, and the ranks get them in turn: several shards of a key on each rank."""
    count = full.shape[0]
    rows = [_regular(key, full[i : i + 1], (0, i, count)) for i in range(count)]
    return [rows[rank::world_size] for rank in range(world_size)]


def unevenly(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Parts of different size along axis 0; with four ranks, one of them holds nothing."""
    cuts = {1: [0], 2: [0, 3], 3: [0, 1, 6], 4: [0, 1, 1, 6]}[world_size] + [full.shape[0]]
    rest = full.shape[1:]
    return [
        [uneven_shard(key, full, (a, *(0 for _ in rest)), (b - a, *rest))]
        for a, b in itertools.pairwise(cuts)
    ]


def ragged(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Rank 0 has the first rows, the others have columns of the rest: there is no grid."""
    rows, columns, depth = full.shape
    if world_size == 1:
        return [[uneven_shard(key, full, (0, 0, 0), full.shape)]]
    first = [uneven_shard(key, full, (0, 0, 0), (3, columns, depth))]
    edges = itertools.pairwise([*range(world_size - 1), columns])
    rest = [[uneven_shard(key, full, (3, a, 0), (rows - 3, b - a, depth))] for a, b in edges]
    return [first, *rest]


def replicated(key: str, full: torch.Tensor, world_size: int) -> Shards:
    return [[_regular(key, full, replica_id=rank)] for rank in range(world_size)]


def whole(full: Mapping[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: replicated(key, tensor, 1)[0][0] for key, tensor in full.items()}


def in_replicated_pairs(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Rows over pairs of ranks; the second of a pair holds the main replica."""
    count = max(1, world_size // 2)
    parts = full.chunk(count, 0)
    size = world_size // count
    return [
        [_regular(key, part, (0, i, count), replica_id=(0, size - 1 - copy))]
        for i, part in enumerate(parts)
        for copy in range(size)
    ]


def prepended(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Axis 0 exists only globally: every layer is a shard, and each rank has a block of layers."""
    count = full.shape[0]
    layers = [_regular(key, full[i], (0, i, count), prepended=1) for i in range(count)]
    edges = [count * rank // world_size for rank in range(world_size + 1)]
    return [layers[start:stop] for start, stop in itertools.pairwise(edges)]


def prepended_columns(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Each rank has a part of every layer, cut along the first axis of the layer.

    Where it cannot be cut for so many ranks, only rank 0 has any.
    """
    count = full.shape[0]
    num_parts = world_size if full.shape[1] % world_size == 0 else 1
    shards: Shards = [[] for _ in range(world_size)]
    for i, layer in enumerate(full):
        for rank, part in enumerate(layer.chunk(num_parts, 0)):
            shards[rank].append(
                _regular(key, part, (0, i, count), (1, rank, num_parts), prepended=1)
            )
    return shards


def _ranges(size: int, count: int) -> list[slice]:
    """``count`` ranges of different sizes that make up ``size`` elements; a fourth is empty."""
    starts = [0, size // 7, size // 2 + 1, size // 2 + 1][:count]
    return [slice(a, b) for a, b in itertools.pairwise([*starts, size])]


def _flat(
    key: str, whole: torch.Tensor, part: slice, place: Place, prepended: int = 0
) -> ShardedTensor:
    data, shape = whole.reshape(-1)[part].clone(), tuple(whole.shape)
    return ShardedTensor.from_rank_offsets_flat(
        key, data, shape, place, flattened_range=part, prepend_axis_num=prepended
    )


def _flattened(num_rows: int, key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Rows over groups of ranks; each group shares the flattening of its rows."""
    return [
        [_flat(key, rows, part, (0, i, num_rows))]
        for i, rows in enumerate(full.chunk(num_rows, 0))
        for part in _ranges(rows.numel(), world_size // num_rows)
    ]


def flattened_layers(key: str, full: torch.Tensor, world_size: int) -> Shards:
    """Axis 0 exists only globally, and the ranks share the flattening of every layer."""
    return [
        [_flat(key, layer, part, (0, i, len(full)), 1) for i, layer in enumerate(full)]
        for part in _ranges(full[0].numel(), world_size)
    ]


CUTS: dict[str, Sharding] = {
    "by_rows": by_rows,
    "by_rows_backwards": lambda *tensor: by_rows(*tensor)[::-1],
    "by_columns": by_columns,
    "by_blocks": by_blocks,
    "interleaved": interleaved,
    "unevenly": unevenly,
    "ragged": ragged,
    "replicated": replicated,
    "in_replicated_pairs": in_replicated_pairs,
    "prepended": prepended,
    "prepended_columns": prepended_columns,
    "flattened": partial(_flattened, 1),
    "flattened_rows": lambda *tensor: _flattened(max(1, tensor[-1] // 2), *tensor),
    "flattened_layers": flattened_layers,
}

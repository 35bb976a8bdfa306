"""What a conversion will do, as a value: nothing is read and nothing is written for it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import (
    Box,
    ChunkGrid,
    Ints,
    boxes_of_part,
    largest_divisor_block,
    split_rows,
)
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.mapping.tensor_memory import is_lossless
from dist_checkpointing.tools.convert.rules import Rules

_LOW = 2**20
"""Parts are not made smaller than this many bytes for the sake of reading."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensor:
    """A tensor on its way.

    Attributes:
        source: The tensor in the source.
        key: New key.
        dtype: New element type.
        chunk_shape: New shape of the parts; None if they stay as they are.
    """

    source: StoredTensor
    key: str
    dtype: DType
    chunk_shape: Ints | None = None

    @property
    def shape(self) -> Ints:
        """Shape of the whole (global) tensor."""
        return self.source.global_shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor with its new dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def widest_itemsize(self) -> int:
        """Bytes of an element where it takes most, before or after."""
        return max(self.dtype.itemsize, self.source.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """A sharded object on its way: its name, its new name, the shape of its grid of cells."""

    source_key: str
    key: str
    shape: Ints


@dataclass(frozen=True, slots=True)
class CastCount:
    """How many tensors a cast concerns."""

    stored: str
    wanted: str
    tensors: int
    is_lossless: bool


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """All that will be converted.

    Attributes:
        tensors: Tensors, by new key.
        objects: Sharded objects, by new key.
        num_left: Number of tensors and objects that the rules leave out.
        num_renamed: Number of tensors and objects that get another key.
        casts: Number of tensors for each change of the dtype.
        uncut: Old keys of tensors that lack the axis they should be cut along.
    """

    tensors: tuple[PlannedTensor, ...]
    objects: tuple[PlannedObject, ...]
    num_left: int
    num_renamed: int
    casts: tuple[CastCount, ...]
    uncut: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the destination."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan_conversion(
    index: Mapping[str, StoredTensor], objects: Mapping[str, Ints], rules: Rules
) -> ConversionPlan:
    """Apply rules to what a source holds.

    Raises:
        CheckpointingException: if nothing is left, two keys get one name, or a cast loses values.
    """
    keys = [key for key in index if rules.takes(key)]
    cells = [] if rules.tensors_only else [key for key in objects if rules.takes(key)]
    if (index or objects) and not keys and not cells:
        finding = Finding(
            f"none of {len(index) + len(objects)} keys", remedy="See what there is: dckpt ls."
        )
        raise CheckpointingException("include and exclude leave nothing to convert", [finding])
    names = {key: rules.new_name(key) for key in (*keys, *cells)}
    _check_names(names)
    tensors, uncut = [], []
    for key in keys:
        stored, reshard = index[key], rules.reshard_of(key)
        chunk = None if reshard is None else reshard.chunk_shape(stored.global_shape)
        if reshard is not None and chunk is None:
            uncut.append(key)
        tensors.append(PlannedTensor(stored, names[key], rules.new_dtype(key, stored.dtype), chunk))
    casts = _casts(tensors)
    if not rules.lossy:
        _check_lossless(casts)
    return ConversionPlan(
        tuple(sorted(tensors, key=lambda tensor: tensor.key)),
        tuple(PlannedObject(key, names[key], tuple(objects[key])) for key in cells),
        len(index) + len(objects) - len(keys) - len(cells),
        sum(old != new for old, new in names.items()),
        casts,
        tuple(uncut),
    )


def _check_names(names: Mapping[str, str]) -> None:
    by_name: dict[str, list[str]] = {}
    for old, new in names.items():
        by_name.setdefault(new, []).append(old)
    findings = [
        Finding("several keys would have this name", new, found=", ".join(map(repr, old)))
        for new, old in by_name.items()
        if len(old) > 1
    ]
    findings += [Finding("would have no name", old) for old, new in names.items() if not new]
    if findings:
        raise CheckpointingException("rename gives no valid names", findings)


def _casts(tensors: Iterable[PlannedTensor]) -> tuple[CastCount, ...]:
    counts = Counter((t.source.dtype, t.dtype) for t in tensors if t.source.dtype != t.dtype)
    return tuple(
        CastCount(a.name, b.name, count, is_lossless(a.torch, b.torch))
        for (a, b), count in sorted(counts.items(), key=lambda item: item[0][0].name)
    )


def _check_lossless(casts: Iterable[CastCount]) -> None:
    findings = [
        Finding(f"{cast.stored} to {cast.wanted} ({cast.tensors} tensors) changes values")
        for cast in casts
        if not cast.is_lossless
    ]
    if findings:
        remedy = "the cast loses precision or range; allow that with lossy (--lossy)"
        raise CheckpointingException(remedy, findings)


def shards(tensor: PlannedTensor, most_bytes: int) -> Iterator[Box]:
    """The boxes in which a tensor is saved; together they cover it.

    They are the boxes that it is stored in, or those that the rules ask for. Boxes larger than
    ``most_bytes`` are divided. A tensor without elements has one.
    """
    if 0 in tensor.shape:
        yield Box.whole(tensor.shape)
        return
    pieces = tensor.source.pieces
    chunk = tensor.chunk_shape or tensor.source.chunk_shape
    if chunk is None:
        assert pieces is not None
        most = max(1, most_bytes // tensor.widest_itemsize)
        for box, flat in pieces:
            for part in _boxes(box, flat):
                yield from split_rows(part, most)
        return
    chunk = tuple(min(c, e) for c, e in zip(chunk, tensor.shape, strict=True))
    itemsize = tensor.widest_itemsize
    if is_cut_across(tensor):
        # Low enough that whole rows of parts can be read at once: else each would be read often.
        part_row = itemsize * math.prod(chunk[1:])
        rows = max(1, most_bytes // (itemsize * math.prod(tensor.shape[1:])), _LOW // part_row)
        chunk = divided(tensor.shape, chunk, itemsize, rows * part_row)
    grid = ChunkGrid(tensor.shape, divided(tensor.shape, chunk, itemsize, most_bytes))
    for index in itertools.product(*map(range, grid.counts)):
        yield grid.box(index)


def is_cut_across(tensor: PlannedTensor) -> bool:
    """Whether parts are asked for that are not whole rows."""
    return tensor.chunk_shape is not None and tensor.chunk_shape[1:] != tensor.shape[1:]


def _boxes(box: Box, flat: tuple[int, int] | None) -> list[Box]:
    return [own for own in boxes_of_part(box, flat) if own.num_elements]


def divided(shape: Ints, chunk: Ints, itemsize: int, most_bytes: int) -> Ints:
    """A chunk shape of at most ``most_bytes`` that divides the given one if possible."""
    for axis, extent in enumerate(chunk):
        if itemsize * math.prod(chunk) <= most_bytes:
            break
        rows = max(1, most_bytes // max(1, itemsize * math.prod(chunk[axis + 1 :])))
        block = -(-extent // -(-extent // rows))
        if extent < shape[axis]:
            # So that no stored chunk is read twice, unless that would leave tiny ones.
            divisor = largest_divisor_block(extent, rows)
            block = divisor if 2 * divisor > block else block
        chunk = (*chunk[:axis], block, *chunk[axis + 1 :])
    return chunk


def runs(tensor: PlannedTensor, most_bytes: int) -> Iterator[Box]:
    """The boxes in which a tensor is copied into a file that holds it in C order.

    Each is one run of that order, and as high as a row of the chunks in which it is stored, so that
    no chunk is read twice; divided where that is more than ``most_bytes``.
    """
    if 0 in tensor.shape:
        return
    whole = Box.whole(tensor.shape)
    most = max(1, most_bytes // tensor.widest_itemsize)
    chunk = tensor.source.chunk_shape
    if whole.num_elements <= most or not chunk:
        yield from split_rows(whole, most)
        return
    row = whole.num_elements // tensor.shape[0]
    # As many rows of chunks as fit, and at least one.
    height = min(tensor.shape[0], chunk[0] * max(1, most // max(1, row * chunk[0])))
    for start in range(0, tensor.shape[0], height):
        extent = min(height, tensor.shape[0] - start)
        block = Box((start, *whole.offset[1:]), (extent, *tensor.shape[1:]))
        yield from split_rows(block, most)

"""What a conversion will do, as a value: what is written, in which boxes it is copied.

Nothing is read and nothing is written here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dist_checkpointing.errors import CheckpointingException, Finding, counted
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.file_names import EVERY_KEY, key_pattern
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
from dist_checkpointing.planning.recipe import Derivation

_CUT = re.compile(r"\s*axis\s*=\s*(\d+)\s*,\s*parts\s*=\s*(\d+)\s*")
_SMALL_BYTES = 2**20
"""Parts are not made smaller than this for the sake of reading."""

DEFAULT_MEMORY_BYTES: Final = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How a conversion is done.

    Attributes:
        memory_bytes: memory that the whole process may take.
        threads: number of threads that read and write; by default that of StorageOptions.
        shard_bytes: size of the values in one file of a safetensors folder, at most.
        overwrite: replace what is at the destination, if it is of the kind that is written, and
            write tensors that take far more than the files that they are read from.
        trusted: unpickle anything in the source. Lets it run any code.
        verify: compare the tensors that are read with the checksums of the source, if it has any.
        dry_run: plan only, write nothing.
        reshard: how tensors are cut, ``axis=0,parts=8`` or ``PATTERN:axis=0,parts=8``; more axes
            follow after ``;``. The first PATTERN that matches the whole key counts.
        lossy: allow casts that change values.
        tensors_only: leave out objects and common state.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    threads: int | None = None
    shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    trusted: bool = False
    verify: bool = True
    dry_run: bool = False
    reshard: Sequence[str] = ()
    lossy: bool = False
    tensors_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensor:
    """A tensor as the recipe makes it, and the shape of its parts (None if they stay as they are).

    ``widest_itemsize`` is the bytes of an element where it takes most, as stored or as written.
    """

    stored: StoredTensor
    widest_itemsize: int
    chunk_shape: Ints | None = None

    def num_bytes_of(self, box: Box) -> int:
        """Bytes of a box where it takes most."""
        return box.num_elements * self.widest_itemsize


class CastCount(NamedTuple):
    """How many tensors a cast concerns."""

    stored: str
    wanted: str
    tensors: int
    is_lossless: bool


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """All that will be converted, tensors sorted by key.

    ``objects`` are the shapes of sharded objects by key. ``uncut`` are keys of tensors that lack
    the axis they should be cut along.
    """

    tensors: tuple[PlannedTensor, ...]
    objects: Mapping[str, Ints]
    casts: tuple[CastCount, ...]
    uncut: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.stored.num_bytes for tensor in self.tensors)


def plan_conversion(
    made: Derivation, objects: Mapping[str, Ints], options: ConvertOptions
) -> ConversionPlan:
    """Plan the conversion of what a recipe makes; ``objects`` are shapes by their new keys.

    Raises:
        CheckpointingException: if nothing is left, or a cast loses values.
    """
    cuts = [_parse_cut(text) for text in options.reshard]
    objects = {} if options.tensors_only else objects
    num_stored = len(made.stored) + len(made.objects) + len(made.objects_left_out)
    if num_stored and not (made.tensors or objects):
        problem = f"none of {counted(num_stored, 'key')}"
        finding = Finding(problem, remedy="See what there is: dckpt ls.")
        raise CheckpointingException("nothing is left to convert", [finding, *made.unused])
    tensors, uncut, pairs = [], [], Counter[tuple[DType, DType]]()
    for key, tensor in sorted(made.tensors.items()):
        dtypes = {made.stored[own].dtype for own in tensor.sources}
        pairs.update((dtype, tensor.dtype) for dtype in made.cast_from(key))
        parts = next((parts for pattern, parts in cuts if pattern.fullmatch(key)), {})
        chunk = None
        if max(parts, default=-1) >= len(tensor.shape):
            uncut.append(key)
        elif parts:
            # As torch.chunk cuts: all parts are alike but the last, and there may be fewer of them.
            extents = enumerate(tensor.shape)
            chunk = tuple(max(1, -(-n // parts.get(axis, 1))) for axis, n in extents)
        widest = max(dtype.itemsize for dtype in {tensor.dtype, *dtypes})
        tensors.append(PlannedTensor(made.index[key], widest, chunk))
    casts = [
        CastCount(old.name, new.name, count, is_lossless(old.torch, new.torch))
        for (old, new), count in sorted(pairs.items(), key=lambda item: item[0][0].name)
    ]
    findings = [
        Finding(f"{old} to {new} ({counted(number, 'tensor')}) changes values")
        for old, new, number, is_exact in casts
        if not is_exact
    ]
    if findings and not options.lossy:
        message = "the cast loses precision or range; allow that with lossy (--lossy)"
        raise CheckpointingException(message, findings)
    return ConversionPlan(tuple(tensors), objects, tuple(casts), tuple(uncut))


def _parse_cut(text: str) -> tuple[re.Pattern[str], Mapping[int, int]]:
    """The pattern of keys, and the number of parts by axis."""
    pattern, _, cuts = text.rpartition(":")
    found = [_CUT.fullmatch(cut) for cut in cuts.split(";")]
    parts = {int(match[1]): int(match[2]) for match in found if match}
    if len(parts) < len(found) or min(parts.values()) < 1:
        problem = "expected [PATTERN:]axis=0,parts=8[;axis=1,parts=2]"
        raise CheckpointingException(f"reshard {text!r}: {problem}")
    try:
        return key_pattern(pattern or EVERY_KEY), parts
    except ValueError as error:
        raise CheckpointingException(f"reshard {error}") from error


def shards(tensor: PlannedTensor, most_bytes: int) -> Iterator[Box]:
    """The boxes in which a tensor is saved; together they cover it.

    They are the boxes that it is stored in, or those that ``reshard`` asks for. Boxes larger than
    ``most_bytes`` are divided. A tensor without elements has one.
    """
    shape, itemsize = tensor.stored.global_shape, tensor.widest_itemsize
    if 0 in shape:
        yield Box.whole(shape)
        return
    chunk = tensor.chunk_shape or tensor.stored.chunk_shape
    if chunk is None:
        most = max(1, most_bytes // itemsize)
        for box, flat in tensor.stored.parts():
            for part in boxes_of_part(box, flat):
                if part.num_elements:
                    yield from split_rows(part, most)
        return
    chunk = tuple(min(c, e) for c, e in zip(chunk, shape, strict=True))
    if is_cut_across(tensor):
        # Low enough that whole rows of parts can be read at once: else each would be read often.
        part_row, row = (itemsize * math.prod(own[1:]) for own in (chunk, shape))
        rows = max(1, most_bytes // row, _SMALL_BYTES // part_row)
        most_bytes = min(most_bytes, rows * part_row)
    grid = ChunkGrid(shape, _divided(shape, chunk, itemsize, most_bytes))
    for index in itertools.product(*map(range, grid.counts)):
        yield grid.box(index)


def is_cut_across(tensor: PlannedTensor) -> bool:
    """Whether parts are asked for that are not whole rows."""
    return (
        tensor.chunk_shape is not None and tensor.chunk_shape[1:] != tensor.stored.global_shape[1:]
    )


def _divided(shape: Ints, chunk: Ints, itemsize: int, most_bytes: int) -> Ints:
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

"""What a conversion will do, as a value: its rules, what they make of a source, in which boxes it
is copied. Nothing is read and nothing is written here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    UnsupportedFormatError,
    counted,
)
from dist_checkpointing.format.dtypes import FLOATING, DType, from_name
from dist_checkpointing.format.file_names import PLACEHOLDER, key_pattern
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

_CUT = re.compile(r"\s*axis\s*=\s*(\d+)\s*,\s*parts\s*=\s*(\d+)\s*")
_SMALL_BYTES = 2**20
"""Parts are not made smaller than this for the sake of reading."""

DEFAULT_MEMORY_BYTES: Final = 2 * 2**30
Pattern = re.Pattern[str]
T = TypeVar("T")


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
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    threads: int | None = None
    shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    trusted: bool = False
    verify: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """All that a conversion changes, see ``parse``; by default nothing."""

    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()
    renames: tuple[tuple[Pattern, str], ...] = ()
    casts: tuple[tuple[Pattern, DType], ...] = ()
    reshards: tuple[tuple[Pattern, Mapping[int, int]], ...] = ()
    lossy: bool = False
    tensors_only: bool = False

    @classmethod
    def parse(
        cls,
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        rename: Iterable[str] = (),
        cast: Iterable[str] = (),
        reshard: Iterable[str] = (),
        lossy: bool = False,
        tensors_only: bool = False,
    ) -> Rules:
        """The rules as texts say them.

        Args:
            include: patterns, see ``key_pattern``: a key is converted if one of these is found in
                it, or if there are none.
            exclude: a key is left out if one of these patterns is found in it.
            rename: ``PATTERN=REPLACEMENT``, applied one after the other; the last ``=`` is the one
                between them.
            cast: ``DTYPE`` or ``PATTERN=DTYPE``, of floating-point tensors; the first that is found
                in the old key counts.
            reshard: ``axis=0,parts=8`` or ``PATTERN:axis=0,parts=8``; more axes follow after ``;``,
                and the first that is found counts.
            lossy: whether a cast may change values.
            tensors_only: leave out objects and common state.

        Raises:
            CheckpointingException: for a text that says nothing.
        """
        return cls(
            tuple(_pattern("include", text) for text in include),
            tuple(_pattern("exclude", text) for text in exclude),
            tuple(map(_rename, rename)),
            tuple(map(_cast, cast)),
            tuple(map(_reshard, reshard)),
            lossy,
            tensors_only,
        )

    def takes(self, key: str) -> bool:
        """Whether a tensor or an object is converted."""
        is_included = not self.include or any(pattern.search(key) for pattern in self.include)
        return is_included and not any(pattern.search(key) for pattern in self.exclude)


def _bad(what: str, text: str, error: object) -> CheckpointingException:
    return CheckpointingException(f"{what} {text!r}: {error}")


def _pattern(what: str, text: str) -> Pattern:
    try:
        return key_pattern(text)
    except ValueError as error:
        raise CheckpointingException(f"{what} {error}") from error


def _rename(text: str) -> tuple[Pattern, str]:
    pattern, _, replacement = text.rpartition("=")
    if not pattern:
        raise _bad("rename", text, "expected PATTERN=REPLACEMENT")
    return _pattern("rename", pattern), PLACEHOLDER.sub(r"\\g<\1>", replacement)


def _cast(text: str) -> tuple[Pattern, DType]:
    pattern, _, name = text.rpartition("=")
    try:
        dtype = from_name(name.removeprefix("torch."))
    except UnsupportedFormatError as error:
        raise _bad("cast", text, f"{name!r} is not one of {', '.join(sorted(FLOATING))}") from error
    if dtype.name not in FLOATING:
        finding = Finding("only floating-point tensors are cast", found=dtype.name)
        raise CheckpointingException(f"cast {text!r}: not to a floating-point dtype", [finding])
    return _pattern("cast", pattern), dtype


def _reshard(text: str) -> tuple[Pattern, Mapping[int, int]]:
    pattern, _, cuts = text.rpartition(":")
    found = [_CUT.fullmatch(cut) for cut in cuts.split(";")]
    parts = {int(match[1]): int(match[2]) for match in found if match}
    if len(parts) < len(found) or min(parts.values()) < 1:
        raise _bad("reshard", text, "expected [PATTERN:]axis=0,parts=8[;axis=1,parts=2]")
    return _pattern("reshard", pattern), parts


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensor:
    """A tensor of the source, its new key and dtype, and the new shape of its parts (None if they
    stay as they are).
    """

    source: StoredTensor
    key: str
    dtype: DType
    chunk_shape: Ints | None = None

    @property
    def shape(self) -> Ints:
        return self.source.global_shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def widest_itemsize(self) -> int:
        """Bytes of an element where it takes most, before or after."""
        return max(self.dtype.itemsize, self.source.dtype.itemsize)

    def num_bytes_of(self, box: Box) -> int:
        """Bytes of a box where it takes most."""
        return box.num_elements * self.widest_itemsize


class PlannedObject(NamedTuple):
    """A sharded object on its way: its name, its new name, the shape of its grid of cells."""

    source_key: str
    key: str
    shape: Ints


class CastCount(NamedTuple):
    """How many tensors a cast concerns."""

    stored: str
    wanted: str
    tensors: int
    is_lossless: bool


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """All that will be converted, tensors sorted by new key.

    Numbers are of tensors and objects. ``uncut`` are old keys of tensors that lack the axis they
    should be cut along.
    """

    tensors: tuple[PlannedTensor, ...]
    objects: tuple[PlannedObject, ...]
    num_left: int
    num_renamed: int
    casts: tuple[CastCount, ...]
    uncut: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
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
    names = {key: _renamed(key, rules.renames) for key in (*keys, *cells)}
    num_stored = len(index) + len(objects)
    if num_stored and not names:
        problem = f"none of {counted(num_stored, 'key')}"
        finding = Finding(problem, remedy="See what there is: dckpt ls.")
        raise CheckpointingException("include and exclude leave nothing to convert", [finding])
    by_name: dict[str, list[str]] = {}
    for old, new in names.items():
        by_name.setdefault(new, []).append(old)
    problem = "several keys would have this name"
    findings = [
        Finding(problem, new, found=", ".join(map(repr, old)))
        for new, old in by_name.items()
        if len(old) > 1
    ]
    findings += [Finding("would have no name", old) for old in by_name.get("", ())]
    if findings:
        raise CheckpointingException("rename gives no valid names", findings)
    tensors, uncut, pairs = [], [], Counter[tuple[DType, DType]]()
    for key in keys:
        stored, chunk = index[key], None
        shape, dtype = stored.global_shape, stored.dtype
        if dtype.name in FLOATING:
            dtype = _first(rules.casts, key, dtype)
        if dtype != stored.dtype:
            pairs[stored.dtype, dtype] += 1
        parts = _first(rules.reshards, key, {})
        if max(parts, default=-1) >= len(shape):
            uncut.append(key)
        elif parts:
            # As torch.chunk cuts: all parts are alike but the last, and there may be fewer of them.
            chunk = tuple(max(1, -(-n // parts.get(axis, 1))) for axis, n in enumerate(shape))
        tensors.append(PlannedTensor(stored, names[key], dtype, chunk))
    casts = [
        CastCount(old.name, new.name, count, is_lossless(old.torch, new.torch))
        for (old, new), count in sorted(pairs.items(), key=lambda item: item[0][0].name)
    ]
    findings = [
        Finding(
            f"{cast.stored} to {cast.wanted} ({counted(cast.tensors, 'tensor')}) changes values"
        )
        for cast in casts
        if not cast.is_lossless
    ]
    if findings and not rules.lossy:
        message = "the cast loses precision or range; allow that with lossy (--lossy)"
        raise CheckpointingException(message, findings)
    return ConversionPlan(
        tuple(sorted(tensors, key=lambda tensor: tensor.key)),
        tuple(PlannedObject(key, names[key], tuple(objects[key])) for key in cells),
        num_stored - len(keys) - len(cells),
        sum(old != new for old, new in names.items()),
        tuple(casts),
        tuple(uncut),
    )


def _first(rules: Iterable[tuple[Pattern, T]], key: str, default: T) -> T:
    return next((value for pattern, value in rules if pattern.search(key)), default)


def _renamed(key: str, renames: Iterable[tuple[Pattern, str]]) -> str:
    for pattern, replacement in renames:
        try:
            key = pattern.sub(replacement, key)
        except (re.error, IndexError) as error:
            raise _bad("rename", f"{pattern.pattern}={replacement}", error) from error
    return key


def shards(tensor: PlannedTensor, most_bytes: int) -> Iterator[Box]:
    """The boxes in which a tensor is saved; together they cover it.

    They are the boxes that it is stored in, or those that the rules ask for. Boxes larger than
    ``most_bytes`` are divided. A tensor without elements has one.
    """
    if 0 in tensor.shape:
        yield Box.whole(tensor.shape)
        return
    chunk = tensor.chunk_shape or tensor.source.chunk_shape
    if chunk is None:
        most = max(1, most_bytes // tensor.widest_itemsize)
        for box, flat in tensor.source.parts():
            for part in boxes_of_part(box, flat):
                if part.num_elements:
                    yield from split_rows(part, most)
        return
    chunk = tuple(min(c, e) for c, e in zip(chunk, tensor.shape, strict=True))
    itemsize = tensor.widest_itemsize
    if is_cut_across(tensor):
        # Low enough that whole rows of parts can be read at once: else each would be read often.
        part_row, row = (itemsize * math.prod(shape[1:]) for shape in (chunk, tensor.shape))
        rows = max(1, most_bytes // row, _SMALL_BYTES // part_row)
        most_bytes = min(most_bytes, rows * part_row)
    grid = ChunkGrid(tensor.shape, _divided(tensor.shape, chunk, itemsize, most_bytes))
    for index in itertools.product(*map(range, grid.counts)):
        yield grid.box(index)


def is_cut_across(tensor: PlannedTensor) -> bool:
    """Whether parts are asked for that are not whole rows."""
    return tensor.chunk_shape is not None and tensor.chunk_shape[1:] != tensor.shape[1:]


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

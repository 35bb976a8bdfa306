"""What differs between two checkpoints of any backend and sharding."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.checkpoint.slicing import ObjectHandle
from dist_checkpointing.format.file_names import is_of_optimizer
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES
from dist_checkpointing.strategies.safetensors_folder import texts_of
from dist_checkpointing.strategies.torch_file import loadable
from dist_checkpointing.tools.inspect import plain_state
from dist_checkpointing.tools.inspect.values import (
    SLAB_ELEMENTS,
    slabs,
    stream_pairs,
    without_equal_fingerprints,
)

Array = npt.NDArray[Any]
_SMALL_NORM = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Two numbers are the same if ``|a - b| <= atol + rtol * |b|``.

    Attributes:
        rtol: Relative tolerance, for ``b`` of the second checkpoint.
        atol: Absolute tolerance.
        equal_nan: Whether NaN is the same as NaN.
    """

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = False

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number >= 0, not {getattr(self, name)}")


EXACT = Tolerance()


@dataclass(frozen=True, slots=True)
class Difference:
    """How the values of two tensors differ.

    Attributes:
        num_differing: Number of elements that are not the same.
        num_compared: Number of all elements.
        max_abs: Largest ``|a - b|`` that is a number; infinity if ``a`` or ``b`` is infinite.
        max_rel: Largest ``|a - b| / |b|``; infinity if ``b`` is 0.
        first_index: Index of the first element that differs, in C order.
        first_values: The two values of that element.
        norm_before: L2 norm of all finite values of the first.
        norm_of_change: L2 norm of ``a - b`` where the values differ and are finite.
    """

    num_differing: int = 0
    num_compared: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    first_index: Ints | None = None
    first_values: tuple[Any, Any] | None = None
    norm_before: float = 0.0
    norm_of_change: float = 0.0

    @property
    def relative_change(self) -> float:
        """``norm_of_change / norm_before``; NaN if nothing finite changed."""
        if self.num_differing and not self.norm_of_change:
            return math.nan
        if not self.norm_before:
            return math.inf if self.num_differing else 0.0
        return self.norm_of_change / self.norm_before

    def with_more(self, other: Difference) -> Difference:
        """The difference of both parts together."""
        ours, theirs = self.first_index, other.first_index
        first = other if ours is None or (theirs is not None and theirs < ours) else self
        return Difference(
            self.num_differing + other.num_differing,
            self.num_compared + other.num_compared,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            first.first_index,
            first.first_values,
            math.hypot(self.norm_before, other.norm_before),
            math.hypot(self.norm_of_change, other.norm_of_change),
        )


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """A tensor that both checkpoints have. Pairs are for the first and the second.

    Attributes:
        key: Key of the tensor.
        shapes: Global shapes.
        dtypes: Names of the element types.
        values: Difference of the values; None if the shapes differ.
    """

    key: str
    shapes: tuple[Ints, Ints]
    dtypes: tuple[str, str]
    values: Difference | None

    @property
    def is_same(self) -> bool:
        """Whether shape, element type and values are the same."""
        return self.dtypes[0] == self.dtypes[1] and self.has_same_values

    @property
    def has_same_values(self) -> bool:
        """Whether shape and values are the same."""
        return self.values is not None and self.values.num_differing == 0

    @property
    def is_counter(self) -> bool:
        """Whether it is a single number of an optimizer, such as the count of its steps."""
        return (
            is_of_optimizer(self.key) and self.values is not None and self.values.num_compared == 1
        )


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """An entry of an object or of the common state that is not the same in both.

    Attributes:
        name: Path of the entry.
        texts: The value in the first and in the second, as text; None if there is none.
    """

    name: str
    texts: tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints compared.

    Attributes:
        only_first: Keys of tensors that only the first has.
        only_second: Keys of tensors that only the second has.
        tensors: Tensors that both have, equal ones included.
        objects: Cells of sharded objects that differ or are in only one.
        common: Entries of the common state that differ or are in only one.
        ignores_dtype: Whether tensors with the same values and different dtypes are equal.
        num_by_fingerprint: Number of tensors that were not read: their fingerprints are the same.
        left_out: What was not compared, because a file of tensors cannot hold it, in words.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    tensors: tuple[TensorComparison, ...]
    objects: tuple[ValueComparison, ...]
    common: tuple[ValueComparison, ...]
    ignores_dtype: bool = False
    num_by_fingerprint: int = 0
    left_out: str | None = None

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        """The tensors that both have and that differ; those that changed most come first."""
        if self.ignores_dtype:
            rows = [row for row in self.tensors if not row.has_same_values]
        else:
            rows = [row for row in self.tensors if not row.is_same]
        return tuple(sorted(rows, key=_rank))

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.only_first or self.only_second or self.differing or self.objects or self.common
        )


def _rank(row: TensorComparison) -> float:
    change = math.nan if row.values is None else row.values.relative_change
    return -math.inf if math.isnan(change) else -change


def compare_checkpoints(
    first: Checkpoint,
    second: Checkpoint,
    *,
    tolerance: Tolerance = EXACT,
    wanted: Callable[[str], bool] = lambda _: True,
    ignore_dtype: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
    read_all: bool = False,
) -> Comparison:
    """Compare what two checkpoints hold, however they store it.

    Args:
        first: one checkpoint.
        second: the other checkpoint; the relative tolerance is relative to its values.
        tolerance: when two numbers are the same.
        wanted: tells which keys (of tensors, objects and common state) to compare.
        ignore_dtype: treat tensors with the same values and different dtypes as equal.
        memory_bytes: most bytes of values of both that are in memory at a time.
        report: called with the number of bytes of the first that were compared since the last call.
        read_all: read also tensors that have the same fingerprint in both checkpoints. Otherwise
            they are the same bit for bit, NaN included.

    Raises:
        CheckpointingException: if something cannot be read.
    """
    common = [key for key in first if key in second and wanted(key)]
    commons, objects, left_out = _others(first, second)
    same_shape = [key for key in common if first[key].shape == second[key].shape]
    found = dict.fromkeys(same_shape, Difference())

    def compare(key: str, box: Box, a: torch.Tensor, b: torch.Tensor) -> None:
        found[key] = found[key].with_more(compare_tensors(a, b, tolerance, box.offset))
        report(a.nbytes)

    to_read = same_shape if read_all else without_equal_fingerprints(first, second, same_shape)
    for key in set(same_shape) - set(to_read):
        found[key] = Difference(num_compared=first[key].num_elements)
        report(first[key].num_bytes)
    stream_pairs(first, second, to_read, memory_bytes, compare)
    tensors = [
        TensorComparison(
            key,
            (first[key].shape, second[key].shape),
            (first[key].dtype_name, second[key].dtype_name),
            found.get(key),
        )
        for key in common
    ]
    return Comparison(
        tuple(key for key in first if key not in second and wanted(key)),
        tuple(key for key in second if key not in first and wanted(key)),
        tuple(tensors),
        tuple(_compare_objects(objects[0], objects[1], tolerance, wanted)),
        tuple(
            row
            for row in compare_values(commons[0], commons[1], tolerance)
            if row.name and wanted(row.name)
        ),
        ignore_dtype,
        len(same_shape) - len(to_read),
        left_out,
    )


def _others(
    first: Checkpoint, second: Checkpoint
) -> tuple[list[dict[str, Any]], list[Mapping[str, ObjectHandle]], str | None]:
    """Common states and objects, as far as the formats of both hold them; and what is left out."""
    formats = first.backend[0], second.backend[0]
    whole = [first.common, second.common]
    held_by = {"safetensors": texts_of, "torch": loadable}
    commons: list[dict[str, Any]] = [
        held_by.get(other, dict)(state) for other, state in zip(formats[::-1], whole, strict=True)
    ]
    objects = [first.objects, second.objects]
    kept = [{}, {}] if "safetensors" in formats else objects
    if commons == whole and kept == objects:
        return whole, objects, None
    return commons, kept, "objects and common state that a file of tensors cannot hold"


def compare_tensors(
    a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance = EXACT, origin: Ints | None = None
) -> Difference:
    """Compare two CPU tensors of one shape.

    Args:
        a: one tensor.
        b: the other tensor.
        tolerance: when two numbers are the same.
        origin: index of their first element, for ``first_index``.
    """
    total = Difference(num_compared=a.numel())
    start = 0
    for x, y in zip(slabs(a), slabs(b), strict=True):
        found, place = _compare_slab(x, y, tolerance)
        total = total.with_more(Difference(norm_before=_norm(x)))
        if place is not None:
            index = np.unravel_index(start + place, a.shape) if a.ndim else ()
            offset = origin or (0,) * a.ndim
            where = tuple(int(i) + o for i, o in zip(index, offset, strict=True))
            pair = a[index].item() if a.ndim else a.item(), b[index].item() if a.ndim else b.item()
            total = total.with_more(replace(found, first_index=where, first_values=pair))
        start += x.size
    return total


def _compare_slab(x: Array, y: Array, tolerance: Tolerance) -> tuple[Difference, int | None]:
    """The difference of two slabs, and the position of the first element that differs."""
    if x.dtype != y.dtype:
        kind = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.longdouble
        x, y = x.astype(kind), y.astype(kind)
    with np.errstate(invalid="ignore"):  # for signalling NaNs
        unequal = x != y
    if tolerance.equal_nan and x.dtype.kind in "fc":
        unequal &= ~(np.isnan(x) & np.isnan(y))
    places = np.flatnonzero(unequal)
    if not len(places):
        return Difference(), None
    # 64-bit integers are exact in this type too.
    wide = np.complex128 if x.dtype.kind == "c" else np.longdouble
    p, q = x[places].astype(wide), y[places].astype(wide)
    with np.errstate(all="ignore"):
        distance: Array = np.abs(np.subtract(p, q))
        size = np.abs(q)
        # Written such that NaN is never within the tolerance.
        differs = ~(distance <= tolerance.atol + tolerance.rtol * size)
        # Infinities of one sign are equal, and so not here; others are not within any tolerance.
        differs |= np.isinf(p) | np.isinf(q)
        distance, size, places = distance[differs], size[differs], places[differs]
        if not len(places):
            return Difference(), None
        relative = distance / size
    found = Difference(
        len(places),
        max_abs=_largest(distance),
        max_rel=_largest(relative),
        norm_of_change=_norm(distance),
    )
    return found, int(places[0])


def _norm(values: Array) -> float:
    """The L2 norm of the finite values."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(values))
        if _SMALL_NORM < norm < math.inf:
            return norm
        # The squares of float32 overflow and underflow.
        wide = np.complex128 if values.dtype.kind == "c" else np.float64
        return float(np.linalg.norm(values[np.isfinite(values)].astype(wide)))


def _largest(numbers: Array) -> float:
    known = numbers[~np.isnan(numbers)]
    return float(known.max()) if known.size else 0.0


def _compare_objects(
    first: Mapping[str, ObjectHandle],
    second: Mapping[str, ObjectHandle],
    tolerance: Tolerance,
    wanted: Callable[[str], bool],
) -> Iterable[ValueComparison]:
    for key in sorted({*first, *second}):
        if not wanted(key):
            continue
        pair = first.get(key), second.get(key)
        if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
            grids = [None if one is None else f"object {list(one.shape)}" for one in pair]
            yield ValueComparison(key, (grids[0], grids[1]))
            continue
        for cell in itertools.product(*map(range, pair[0].shape)):
            yield from compare_values(
                pair[0][cell], pair[1][cell], tolerance, f"{key}[{','.join(map(str, cell))}]"
            )


def compare_values(
    a: Any, b: Any, tolerance: Tolerance = EXACT, name: str = ""
) -> list[ValueComparison]:
    """The entries of two nests of plain values that are not the same."""
    left, right = plain_state.entries(a, name), plain_state.entries(b, name)
    return [
        ValueComparison(path, (_text(left, path), _text(right, path)))
        for path in dict.fromkeys([*left, *right])
        if path not in left or path not in right or not _same(left[path], right[path], tolerance)
    ]


def _text(entries: Mapping[str, Any], path: str) -> str | None:
    return plain_state.value_text(entries[path]) if path in entries else None


def _same(a: Any, b: Any, tolerance: Tolerance) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, io.BytesIO):
        a, b = a.getvalue(), b.getvalue()
    if isinstance(a, np.ndarray) and a.dtype.kind in "biufc":
        return _same_arrays(a, b, tolerance)
    if isinstance(a, torch.Tensor):
        return _same_tensors(a.detach(), b.detach(), tolerance)
    if isinstance(a, float | complex):
        return _same_arrays(np.array([a]), np.array([b]), tolerance)
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - an unknown __eq__ may raise anything, or return an array
        return plain_state.value_text(a) == plain_state.value_text(b)


def _same_arrays(a: Array, b: Array, tolerance: Tolerance) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    count = a.size // SLAB_ELEMENTS + 1
    parts = (np.array_split(array.reshape(-1), count) for array in (a, b))
    return all(_compare_slab(x, y, tolerance)[1] is None for x, y in zip(*parts, strict=True))


def _same_tensors(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return bool(torch.equal(a, b))
    return compare_tensors(a, b, tolerance).num_differing == 0

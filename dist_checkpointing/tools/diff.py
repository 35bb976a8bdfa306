"""``dckpt diff``: shows what differs between two checkpoints of any backend and sharding."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from typer import Argument, Option

from dist_checkpointing.byte_sizes import parse_bytes
from dist_checkpointing.checkpoint.checkpoint import Checkpoint, ObjectHandle
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.errors import counted, hint
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.file_names import EVERY_KEY, WHOLE_KEY, is_of_optimizer, key_pattern
from dist_checkpointing.format.geometry import Box, Ints, unravel
from dist_checkpointing.storage.options import ReadMode, StorageOptions
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES
from dist_checkpointing.strategies import registry
from dist_checkpointing.strategies.base import PlannedSaveStrategy
from dist_checkpointing.tools import values
from dist_checkpointing.tools.ls import Pattern
from dist_checkpointing.tools.opening import CheckpointArgument, Memory, Trusted, open_named
from dist_checkpointing.tools.report import (
    AsJson,
    Report,
    is_narrower_than,
    progress_bar,
    shape_text,
)
from dist_checkpointing.tools.torchrun import ranks
from dist_checkpointing.tools.values import Array, budget_of

_SMALL_NORM = 1e-12
_MAX_LISTED = 50
_HEADERS = ("KEY", "MOVED BY", "DIFFERING", "MAX ABS", "MAX REL", "FIRST AT", "VALUES")
_NARROW = 106
_NUM_COLUMNS_IF_NARROW = 5


def diff(
    first: CheckpointArgument,
    second: Annotated[
        Path, Argument(parser=as_location, help="The checkpoint to compare it with.")
    ],
    pattern: Pattern = None,
    *,
    rtol: Annotated[float, Option(help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, Option(help="Absolute tolerance.")] = 0.0,
    equal_nan: Annotated[bool, Option("--equal-nan", help="NaN is the same as NaN.")] = False,
    ignore_dtype: Annotated[
        bool, Option("--ignore-dtype", help="Compare the values of different dtypes.")
    ] = False,
    memory: Memory = "2GiB",
    read_all: Annotated[
        bool, Option("--read-all", help="Read also tensors that have the same fingerprint in both.")
    ] = False,
    summary: Annotated[
        bool, Option("--summary", help="Print only the counts, in one line.")
    ] = False,
    trusted: Trusted = False,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print nothing; only set the exit code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the contents of two checkpoints of any backend and sharding.

    Two numbers are the same if |a - b| <= atol + rtol * |b|. Sharded
    objects and common state are compared too. Tensors that have the same
    fingerprint in both (see --fingerprint of dckpt ls) are not read: they are
    the same bit for bit, NaN included.

    Tensors that changed most come first: MOVED BY is the L2 norm of the
    change divided by the norm before. Single numbers of an optimizer, such as
    counts of steps, are listed only if PATTERN selects them, and in --json.

    Exit code: 0 if they are the same, 1 if they differ, 2 if they cannot
    be compared. Also opens safetensors (a file or a folder), files of
    torch.save and DeepSpeed checkpoints, and compares what these can hold.

    Example: dckpt diff ckpt/1000 converted --rtol 1e-3
    """
    wanted = key_pattern(pattern or EVERY_KEY).fullmatch
    tolerance = Tolerance(rtol=rtol, atol=atol, equal_nan=equal_nan)
    a, b = (open_named(path, trusted=trusted) for path in (first, second))
    keys = (key for one in (a, b) for key in (*one, *one.objects, *values.entries(one.common)))
    if pattern is not None and not any(map(wanted, keys)):
        near = hint(pattern, a)
        problem = f"neither checkpoint has a key that matches {pattern!r}: {WHOLE_KEY}{near}"
        raise LookupError(problem)
    budget = budget_of(parse_bytes(memory))
    # Pages of a mapped file would count as memory in use.
    a.reads.options = b.reads.options = StorageOptions(read_mode=ReadMode.PREAD)
    num_bytes = sum(tensor.num_bytes for key, tensor in a.items() if wanted(key) and key in b)
    with ranks() as comm, progress_bar("comparing", num_bytes // comm.world_size) as bar:
        found = compare_checkpoints(
            a,
            b,
            tolerance=tolerance,
            wanted=wanted,
            ignore_dtype=ignore_dtype,
            memory_bytes=budget.buffer_bytes,
            report=bar.advance,
            read_all=read_all,
            comm=comm,
        )
    document = _document(a, b, found, summary=summary) if as_json else {}
    report = Report()
    if not (quiet or summary or as_json):
        _add_differences(report, a, b, found, with_counters=pattern is not None)
    if not quiet:
        report.paragraph(_verdict(found), "green" if found.is_same else "red")
    report.finish(document, as_json=as_json, code=int(not found.is_same))


# The comparison.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Two numbers are the same if ``|a - b| <= atol + rtol * |b|``, ``b`` of the second."""

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
        first = min(self, other, key=lambda one: (one.first_index is None, one.first_index or ()))
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
    """A tensor that both checkpoints have, in pairs; with other shapes, values are not compared."""

    key: str
    shapes: tuple[Ints, Ints]
    dtypes: tuple[str, str]
    values: Difference | None

    @property
    def change(self) -> float:
        """How much it changed; infinity if nobody can say."""
        share = math.nan if self.values is None else self.values.relative_change
        return math.inf if math.isnan(share) else share


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """An entry of an object or of the common state that is not the same in both, as text."""

    name: str
    texts: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints compared.

    ``num_by_fingerprint`` tensors were not read: their fingerprints are the same. The tensors that
    changed most come first. Cells of objects and entries of the common state differ, or are in only
    one. ``left_out`` says what a file of tensors cannot hold, and so was not compared.
    """

    num_compared: int
    num_by_fingerprint: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differing: tuple[TensorComparison, ...]
    objects: tuple[ValueComparison, ...]
    common: tuple[ValueComparison, ...]
    left_out: str | None

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        both = self.differing or self.objects or self.common
        return not (both or self.only_first or self.only_second)


def compare_checkpoints(
    first: Checkpoint,
    second: Checkpoint,
    *,
    tolerance: Tolerance = EXACT,
    wanted: Callable[[str], object] = lambda _: True,
    ignore_dtype: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
    read_all: bool = False,
    comm: Comm | None = None,
) -> Comparison:
    """Compare what two checkpoints hold, however they store it.

    The tolerance is relative to the values of the second. At most ``memory_bytes`` of values of
    both are in memory at a time, and ``report`` gets the number of bytes of the first that were
    compared since the last call. Unless ``read_all``, tensors that have the same fingerprint in
    both are not read: they are the same bit for bit, NaN included. The ranks of ``comm`` share the
    tensors out and get the same result.
    """
    comm = comm or SingleProcess()
    common = [key for key in first if key in second and wanted(key)]
    commons, objects, left_out = _others(first, second)
    ours, theirs = first.index.fingerprints, second.index.fingerprints
    found = {key: Difference() for key in common if first[key].shape == second[key].shape}
    to_read = [key for key in found if read_all or key not in ours or ours[key] != theirs.get(key)]
    for key in found.keys() - to_read:
        found[key] = Difference(num_compared=first[key].numel())
        report(first[key].num_bytes)

    def compare(key: str, box: Box, pair: Sequence[torch.Tensor]) -> None:
        found[key] = found[key].with_more(compare_tensors(pair[0], pair[1], tolerance, box.offset))
        report(pair[0].nbytes)

    def compare_share() -> dict[str, Difference]:
        share = to_read[comm.rank :: comm.world_size]
        values.walk([first, second], share, memory_bytes, compare)
        return {key: found[key] for key in share}

    for shared in comm.exchange("comparing", compare_share):
        found |= shared
    differing = []
    for key in common:
        a, b = first[key], second[key]
        one = found.get(key)
        is_cast = a.dtype_name != b.dtype_name and not ignore_dtype
        if one is None or one.num_differing or is_cast:
            dtypes = a.dtype_name, b.dtype_name
            differing.append(TensorComparison(key, (a.shape, b.shape), dtypes, one))
    return Comparison(
        len(common),
        len(found) - len(to_read),
        tuple(key for key in first if key not in second and wanted(key)),
        tuple(key for key in second if key not in first and wanted(key)),
        tuple(sorted(differing, key=attrgetter("change"), reverse=True)),
        tuple(_compare_objects(*objects, tolerance, wanted)),
        tuple(r for r in compare_values(*commons, tolerance) if r.name and wanted(r.name)),
        left_out,
    )


def _holdable(target: Checkpoint, common: Any, objects: Any) -> tuple[Any, Any]:
    """What the format of a checkpoint can hold of a common state and of objects."""
    if target.backend not in registry.available_strategies(registry.StrategyAction.SAVE_SHARDED):
        return common, objects
    strategy = registry.get_default_strategy(registry.StrategyAction.SAVE_SHARDED, *target.backend)
    if not isinstance(strategy, PlannedSaveStrategy):
        return common, objects
    cells = {key: dict(handle) for key, handle in objects.items()}
    kept, held = strategy.holdable(target.path, common, cells)
    return kept, {key: objects[key] for key in held}


def _others(
    first: Checkpoint, second: Checkpoint
) -> tuple[tuple[Any, Any], tuple[Any, Any], str | None]:
    """Common states and objects, as far as the formats of both hold them; and what is left out."""
    whole, objects = (first.common, second.common), (first.objects, second.objects)
    (held, kept), (other_held, other_kept) = (
        _holdable(other, common, cells)
        for other, common, cells in zip((second, first), whole, objects, strict=True)
    )
    commons, kept = (held, other_held), (kept, other_kept)
    if commons == whole and kept == objects:
        return whole, objects, None
    return commons, kept, "objects and common state that a file of tensors cannot hold"


def compare_tensors(
    a: torch.Tensor | Array,
    b: torch.Tensor | Array,
    tolerance: Tolerance = EXACT,
    origin: Ints | None = None,
) -> Difference:
    """Compare CPU tensors, or arrays, of one shape; ``origin`` is the index of their first."""
    total = Difference()
    for x, y in zip(values.slabs(a), values.slabs(b), strict=True):
        total = total.with_more(_compare_slab(x, y, tolerance, total.num_compared))
    if total.first_index is None:
        return total
    index = unravel(total.first_index[0], tuple(a.shape))
    where = zip(index, origin or (0,) * a.ndim, strict=True)
    return replace(total, first_index=tuple(map(sum, where)))


def _compare_slab(x: Array, y: Array, tolerance: Tolerance, start: int) -> Difference:
    """The difference of two slabs, the first of whose elements has the flat index ``start``."""
    found = Difference(num_compared=x.size, norm_before=_norm(x))
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.longdouble
    left, right = (x, y) if x.dtype == y.dtype else (x.astype(wide), y.astype(wide))
    with np.errstate(invalid="ignore"):  # for signalling NaNs
        unequal = left != right
    if tolerance.equal_nan and left.dtype.kind in "fc":
        unequal &= ~(np.isnan(left) & np.isnan(right))
    differing = np.flatnonzero(unequal)
    if not len(differing):
        return found
    # 64-bit integers are exact in this type too.
    p, q = left[differing].astype(wide), right[differing].astype(wide)
    with np.errstate(all="ignore"):
        distance: Array = np.abs(np.subtract(p, q))
        size = np.abs(q)
        # Written such that NaN is never within the tolerance.
        differs = ~(distance <= tolerance.atol + tolerance.rtol * size)
        # Infinities of one sign are equal, and so not here; others are not within any tolerance.
        differs |= np.isinf(p) | np.isinf(q)
        distance, differing = distance[differs], differing[differs]
        if not len(differing):
            return found
        relative = distance / size[differs]
    position = int(differing[0])
    return replace(
        found,
        num_differing=len(differing),
        max_abs=float(np.fmax.reduce(distance, initial=0)),  # which is no NaN if one is none
        max_rel=float(np.fmax.reduce(relative, initial=0)),
        first_index=(start + position,),
        first_values=(x[position].item(), y[position].item()),
        norm_of_change=_norm(distance),
    )


def _norm(values: Array) -> float:
    """The L2 norm of the finite values."""
    if values.dtype.kind in "biu":
        # Exact enough for a percentage. The sum of squares of float64, which numpy would take, is
        # spread over threads by the BLAS, and takes 30 times longer where the cores are busy.
        values = values.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(values))
        if _SMALL_NORM < norm < math.inf:
            return norm
        # The squares of float32 overflow and underflow.
        wide = np.complex128 if values.dtype.kind == "c" else np.float64
        return float(np.linalg.norm(values[np.isfinite(values)].astype(wide)))


def _compare_objects(
    first: Mapping[str, ObjectHandle],
    second: Mapping[str, ObjectHandle],
    tolerance: Tolerance,
    wanted: Callable[[str], object],
) -> Iterator[ValueComparison]:
    for key in filter(wanted, sorted({*first, *second})):
        a, b = first.get(key), second.get(key)
        if a is None or b is None or a.shape != b.shape:
            grids = (None if one is None else f"object {list(one.shape)}" for one in (a, b))
            yield ValueComparison(key, tuple(grids))
            continue
        for cell in a:
            name = f"{key}[{','.join(map(str, cell))}]"
            yield from compare_values(a[cell], b[cell], tolerance, name)


def compare_values(
    a: Any, b: Any, tolerance: Tolerance = EXACT, name: str = ""
) -> list[ValueComparison]:
    """The entries of two nests of plain values that are not the same."""
    left, right = both = values.entries(a, name), values.entries(b, name)

    def texts(path: str) -> tuple[str | None, ...]:
        return tuple(values.value_text(nest[path]) if path in nest else None for nest in both)

    return [
        ValueComparison(path, texts(path))
        for path in left | right
        if path not in left or path not in right or not _same(left[path], right[path], tolerance)
    ]


def _same(a: Any, b: Any, tolerance: Tolerance) -> bool:
    is_array = isinstance(a, torch.Tensor | np.ndarray)
    if type(a) is not type(b) or (is_array and (a.dtype != b.dtype or a.shape != b.shape)):
        return False
    if isinstance(a, io.BytesIO):
        a, b = a.getvalue(), b.getvalue()
    if isinstance(a, float | complex):
        a, b = np.array(a), np.array(b)
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided or b.layout is not a.layout or a.is_quantized:
            return a.layout is b.layout and bool(torch.equal(a, b))
        a, b = a.detach(), b.detach()
    elif not isinstance(a, np.ndarray) or a.dtype.kind not in "biufc":
        try:
            return bool(a == b)
        except Exception:  # noqa: BLE001 - an unknown __eq__ may raise anything, or return an array
            return values.value_text(a) == values.value_text(b)
    return not compare_tensors(a, b, tolerance).num_differing


# What is printed.


def _add_differences(
    report: Report, a: Checkpoint, b: Checkpoint, found: Comparison, *, with_counters: bool
) -> None:
    for sign, style, opened, keys in (
        ("-", "red", a, found.only_first),
        ("+", "green", b, found.only_second),
    ):
        tensors = map(opened.__getitem__, keys)
        texts = [f"{sign} {t.key}  {shape_text(t.shape)} {t.dtype_name}" for t in tensors]
        report.section(f"only in {opened.path}")
        report.lines(texts, style, _MAX_LISTED)
    kinds = [row for row in found.differing if not row.values or len(set(row.dtypes)) > 1]
    report.section("other shape or dtype")
    report.table(("KEY", "FIRST", "SECOND"), map(_kinds, kinds[:_MAX_LISTED]))
    report.left_out(len(kinds) - _MAX_LISTED)
    changed = [(r.key, r.values) for r in found.differing if r.values and r.values.num_differing]
    # Counters such as the number of steps of an optimizer are left out.
    shown = [
        (key, one)
        for key, one in changed
        if with_counters or one.num_compared > 1 or not is_of_optimizer(key)
    ]
    num_columns = _NUM_COLUMNS_IF_NARROW if is_narrower_than(_NARROW) else len(_HEADERS)
    report.section("other values")
    rows = [_cells(key, one)[:num_columns] for key, one in shown[:_MAX_LISTED]]
    report.table(_HEADERS[:num_columns], rows, right=[1, 2, 3, 4])
    report.left_out(len(shown) - _MAX_LISTED)
    if number := len(changed) - len(shown):
        counters = counted(number, "optimizer counter")
        report.paragraph(f"not listed: {counters} (a PATTERN or --json lists them)", "dim")
    for title, entries in (("sharded objects", found.objects), ("common state", found.common)):
        report.section(title)
        for entry in entries[:_MAX_LISTED]:
            for sign, text, style in zip("-+", entry.texts, ("red", "green"), strict=True):
                if text is not None:
                    report.line(f"{sign} {entry.name} = {text}", style)
        report.left_out(len(entries) - _MAX_LISTED)
    if found.left_out is not None:
        report.paragraph(f"not compared: {found.left_out}", "dim")


def _kinds(row: TensorComparison) -> tuple[str, ...]:
    pairs = zip(row.shapes, row.dtypes, strict=True)
    return row.key, *(f"{shape_text(shape)} {dtype}" for shape, dtype in pairs)


def _cells(key: str, found: Difference) -> tuple[str, ...]:
    share = found.relative_change
    moved = "nan" if math.isnan(share) else "from 0" if math.isinf(share) else f"{100 * share:.3g}%"
    number = f"{found.num_differing:,}"
    if not is_narrower_than(_NARROW):
        number += f" of {found.num_compared:,}"
    # If only NaN differ, there is no distance.
    most = [f"{found.max_abs:.3g}", f"{found.max_rel:.3g}"] if found.max_abs else ["nan", "nan"]
    index = f"[{','.join(map(str, found.first_index or ()))}]"
    pair = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in found.first_values or ())
    return key, moved, number, *most, index, " ".join(pair)


def _verdict(found: Comparison) -> str:
    compared = counted(found.num_compared, "tensor")
    if found.is_same:
        known = found.num_by_fingerprint
        compared += f" ({known:,} by fingerprint)" if known else ""
        return f"the same: {compared}{'' if found.left_out else ', objects and common state'}"
    counts = {
        f"of {compared} differing": found.differing,
        "only in the first": found.only_first,
        "only in the second": found.only_second,
        "in the sharded objects": found.objects,
        "in the common state": found.common,
    }
    texts = [f"{len(rows):,} {what}" for what, rows in counts.items() if rows]
    return f"differences: {', '.join(texts)}"


def _document(a: Checkpoint, b: Checkpoint, found: Comparison, *, summary: bool) -> dict[str, Any]:
    rows = dataclasses.asdict(found)
    rows["tensors"] = rows["differing"]
    names = ("only_first", "only_second", "tensors", "objects", "common")
    return {
        "first": str(a.path),
        "second": str(b.path),
        "is_same": found.is_same,
        "num_compared": found.num_compared,
        "num_by_fingerprint": found.num_by_fingerprint,
        "num_differing": len(found.differing),
        **{f"num_{name}": len(rows[name]) for name in names if name != "tensors"},
        "not_compared": found.left_out,
        **({} if summary else {name: rows[name] for name in names}),
    }

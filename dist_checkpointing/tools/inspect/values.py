"""Values of tensors: read in blocks that fit into memory, their statistics, their corners."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.checkpoint.slicing import TensorHandle, positions
from dist_checkpointing.format.geometry import Box, split_rows
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.storage.streaming import (
    DEFAULT_MEMORY_BYTES,
    MOST_BOXES,
    batches,
    blocks,
    stream,
)

Array = npt.NDArray[Any]
Result = TypeVar("Result")

SLAB_ELEMENTS = 2**18
"""Number of elements that are processed at a time, such that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor, or of a part of it.

    Attributes:
        count: Number of elements.
        minimum: Smallest finite value; None if there is none, and for complex numbers.
        maximum: Largest finite value; None likewise.
        mean: Mean of the finite values; None if there are none.
        std: Standard deviation of the finite values (divided by their number).
        num_nan: Number of elements that are NaN.
        num_inf: Number of infinite elements.
        num_zero: Number of zeros of either sign.
    """

    count: int = 0
    minimum: int | float | None = None
    maximum: int | float | None = None
    mean: float | complex | None = None
    std: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    num_zero: int = 0

    @property
    def num_finite(self) -> int:
        """Number of elements that are neither NaN nor infinite."""
        return self.count - self.num_nan - self.num_inf

    def with_more(self, other: Statistics) -> Statistics:
        """The statistics of both parts together."""
        if not self.num_finite or not other.num_finite:
            known = self if self.num_finite else other
            moments = known.minimum, known.maximum, known.mean, known.std
        else:
            moments = _together(self, other)
        return Statistics(
            self.count + other.count,
            *moments,
            num_nan=self.num_nan + other.num_nan,
            num_inf=self.num_inf + other.num_inf,
            num_zero=self.num_zero + other.num_zero,
        )


def _together(a: Statistics, b: Statistics) -> tuple[Any, Any, Any, float]:
    # Chan, Golub and LeVeque (1979): means and sums of squares of two parts, without cancellation.
    assert a.mean is not None
    assert b.mean is not None
    assert a.std is not None
    assert b.std is not None
    count = a.num_finite + b.num_finite
    weight = b.num_finite / count
    delta = b.mean - a.mean
    mean = a.mean + delta * weight
    variance = (1 - weight) * a.std**2 + weight * b.std**2 + abs(delta) ** 2 * weight * (1 - weight)
    if a.minimum is None or b.minimum is None or a.maximum is None or b.maximum is None:
        return None, None, mean, math.sqrt(variance)
    least, most = min(a.minimum, b.minimum), max(a.maximum, b.maximum)
    return least, most, mean, math.sqrt(variance)


def as_numbers(tensor: torch.Tensor) -> Array:
    """The values in a dtype that numpy can calculate with; short floats become float32, exactly."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return tensor.float().numpy()
        return tensor_memory.as_numpy(tensor).astype(np.float32)
    return tensor_memory.as_numpy(tensor)


def slabs(tensor: torch.Tensor) -> Iterator[Array]:
    """The values of a CPU tensor as numbers, some at a time.

    All of a bfloat16 tensor would take twice its memory as float32.
    """
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), SLAB_ELEMENTS):
        yield as_numbers(flat[start : start + SLAB_ELEMENTS])


def statistics_of(tensor: torch.Tensor) -> Statistics:
    """The statistics of a CPU tensor."""
    total = Statistics()
    for values in slabs(tensor):
        total = total.with_more(_of_slab(values))
    return total


def _of_slab(values: Array) -> Statistics:
    num_zero = values.size - int(np.count_nonzero(values))
    num_nan = num_inf = 0
    finite = values
    if values.dtype.kind in "fc":
        is_finite = np.isfinite(values)
        if not is_finite.all():
            num_nan = int(np.count_nonzero(np.isnan(values)))
            finite = values[is_finite]
            num_inf = values.size - finite.size - num_nan
    if not finite.size:
        return Statistics(values.size, num_nan=num_nan, num_inf=num_inf, num_zero=num_zero)
    least = most = None
    if values.dtype.kind != "c":
        least, most = finite.min().item(), finite.max().item()
    wide = finite.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = wide.mean().item()
        std = float(np.sqrt(np.mean(np.abs(wide - mean) ** 2)))
    return Statistics(values.size, least, most, mean, std, num_nan, num_inf, num_zero)


def stream_statistics(
    checkpoint: Checkpoint,
    regions: Iterable[tuple[str, Box]],
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
) -> dict[str, Statistics]:
    """The statistics of parts of tensors, read block by block.

    Args:
        checkpoint: the checkpoint.
        regions: keys, and boxes in elements of the global tensors.
        memory_bytes: most bytes of values that are in memory at a time.
        report: called with the number of bytes that were read since the last call.

    Returns:
        The statistics of each key; several regions of one key together.

    Raises:
        CheckpointingException: if a part cannot be read.
    """
    wanted = list(regions)
    found = {key: Statistics() for key, _ in wanted}

    def add(key: str, _: Box, tensor: torch.Tensor) -> None:
        found[key] = found[key].with_more(statistics_of(tensor))
        report(tensor.nbytes)

    stream(batches(checkpoint.index, wanted, memory_bytes), checkpoint.read, add)
    return found


def without_equal_fingerprints(
    first: Checkpoint, second: Checkpoint, keys: Iterable[str]
) -> list[str]:
    """The tensors that are not known to be the same bit for bit, NaN included."""
    ours, theirs = first.index.fingerprints, second.index.fingerprints
    return [key for key in keys if key not in ours or ours[key] != theirs.get(key)]


def stream_pairs(
    first: Checkpoint,
    second: Checkpoint,
    keys: Iterable[str],
    memory_bytes: int,
    use: Callable[[str, Box, torch.Tensor, torch.Tensor], None],
) -> None:
    """Read tensors of one shape from both checkpoints, block by block.

    Args:
        first: one checkpoint.
        second: the other checkpoint.
        keys: keys of the tensors.
        memory_bytes: most bytes of values of both that are in memory at a time.
        use: called with key, box, and the values of both.
    """
    most = memory_bytes // 2

    def read(batch: Sequence[tuple[str, Box]]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return zip(first.read(batch), second.read(batch), strict=True)

    together = in_batches(_boxes_of_both(first, second, keys, most), most, MOST_BOXES)
    stream(together, read, lambda key, box, pair: use(key, box, *pair))


def _boxes_of_both(
    first: Checkpoint, second: Checkpoint, keys: Iterable[str], most_bytes: int
) -> Iterator[tuple[tuple[str, Box], int]]:
    """Key and box of everything that is compared, and its bytes."""
    for key in keys:
        pair = first.index[key], second.index[key]
        # Along the chunks of the checkpoint that must decode whole chunks.
        lead = pair[1] if second.index.codec and not first.index.codec else pair[0]
        widest = max(stored.dtype.itemsize for stored in pair)
        most = most_bytes * lead.dtype.itemsize // widest
        for box in blocks(lead, Box.whole(lead.global_shape), most):
            yield (key, box), box.num_elements * widest


def statistics_of_part(
    handle: TensorHandle,
    slices: Any = ...,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
) -> Statistics:
    """The statistics of ``handle[slices]``, which need not fit into memory.

    Raises:
        IndexError: if ``slices`` do not fit the shape.
        CheckpointingException: if the part cannot be read.
    """
    total = Statistics()
    for part in _parts(handle, slices, memory_bytes):
        total = total.with_more(_used(handle, part, statistics_of, report))
    return total


def _used(
    handle: TensorHandle,
    part: Any,
    use: Callable[[torch.Tensor], Result],
    report: Callable[[int], None],
) -> Result:
    # A function of its own, so that the values are freed before the next part is read.
    tensor = handle[part]
    report(tensor.nbytes)
    return use(tensor)


def _parts(handle: TensorHandle, slices: Any, memory_bytes: int) -> Iterator[tuple[slice, ...]]:
    """``slices`` of a tensor, cut into parts that fit into memory."""
    taken = positions(handle.shape, slices, handle.key)
    ranges = [range(part, part + 1) if isinstance(part, int) else part for part in taken]
    itemsize = handle.num_bytes // handle.num_elements if handle.num_elements else 1
    if all(part.step == 1 for part in ranges):
        box = Box(tuple(part.start for part in ranges), tuple(map(len, ranges)))
        yield from (block.slices() for block in blocks(handle.stored, box, memory_bytes))
        return
    whole = Box.whole(tuple(map(len, ranges)))
    for block in split_rows(whole, max(1, memory_bytes // itemsize)):
        if block.num_elements:
            inside = zip(ranges, block.slices(), strict=True)
            yield tuple(_as_slice(part[chosen]) for part, chosen in inside)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values of a tensor lie between ``edges[i]`` and ``edges[i + 1]``.

    Attributes:
        edges: Borders of the bins; the last one belongs to the last bin.
        counts: Number of values in each bin.
        below: Number of finite values below the first edge.
        above: Number of finite values above the last edge.
        is_of_integers: Whether each bin is for one integer, which lies in its middle.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    above: int
    is_of_integers: bool


def histogram_of_part(
    handle: TensorHandle,
    slices: Any,
    known: Statistics,
    *,
    bins: int,
    report: Callable[[int], None] = lambda _: None,
) -> Histogram:
    """The histogram of the finite values of ``handle[slices]``, which need not fit into memory.

    It reaches as far as four standard deviations from the mean, so that a few outliers do not
    leave all the rest in one bin. A few integers have a bin each.

    Raises:
        ValueError: if the values have no order: complex numbers, or no finite value.
    """
    if known.minimum is None or known.maximum is None or known.std is None:
        raise ValueError(f"{handle.key!r} has no finite real numbers to draw")
    least, most = float(known.minimum), float(known.maximum)
    is_of_integers = isinstance(known.minimum, int) and most - least < bins
    if is_of_integers:
        edges = np.arange(least - 0.5, most + 1)
    else:
        assert isinstance(known.mean, int | float)
        least = max(least, known.mean - 4 * known.std)
        most = min(most, known.mean + 4 * known.std)
        edges = np.linspace(least, most if most > least else least + 1, bins + 1)
    counts = np.zeros(len(edges) + 1, dtype=np.int64)

    def count(tensor: torch.Tensor) -> Array:
        total = np.zeros_like(counts)
        for slab in slabs(tensor):
            values = slab.astype(np.float64)
            values = values[np.isfinite(values)]
            places = np.searchsorted(edges, values, side="right")
            places[values == edges[-1]] = len(edges) - 1
            total += np.bincount(places, minlength=len(total))
        return total

    for part in _parts(handle, slices, DEFAULT_MEMORY_BYTES):
        counts += _used(handle, part, count, report)
    below, *inside, above = counts.tolist()
    return Histogram(tuple(edges.tolist()), tuple(inside), below, above, is_of_integers)


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """A tensor, or its corners.

    Attributes:
        values: All values, or the first and last ``edge`` of every long axis. Between them is one
            more, in place of the values that were left out.
        is_whole: Whether these are all values.
        shape: Shape of the whole tensor or slice.
        edge: Number of values at each end of a long axis.
    """

    values: torch.Tensor
    is_whole: bool
    shape: tuple[int, ...]
    edge: int


def read_excerpt(handle: TensorHandle, slices: Any = ..., *, most: int, edge: int) -> Excerpt:
    """Read a part of a tensor, or its corners if it is large.

    Args:
        handle: the tensor.
        slices: the part to read, see ``TensorHandle``.
        most: largest number of elements of which all are read.
        edge: number of values to read at each end of an axis otherwise.

    Raises:
        IndexError: if ``slices`` do not fit the shape.
        CheckpointingException: if the tensor cannot be read.
    """
    taken = positions(handle.shape, slices, handle.key)
    shape = tuple(len(part) for part in taken if isinstance(part, range))
    if math.prod(shape) <= most:
        return Excerpt(handle[slices], is_whole=True, shape=shape, edge=edge)
    ends: list[list[Any]] = []
    for part in taken:
        if isinstance(part, int):
            ends.append([part])
        elif len(part) <= 2 * edge:
            ends.append([_as_slice(part)])
        else:
            ends.append([_as_slice(part[: edge + 1]), _as_slice(part[len(part) - edge :])])
    corners = [handle[corner] for corner in itertools.product(*ends)]
    axis = len(shape)
    for choices in reversed([end for end in ends if not isinstance(end[0], int)]):
        axis -= 1
        step = len(choices)
        corners = [
            torch.cat(corners[start : start + step], dim=axis) if step > 1 else corners[start]
            for start in range(0, len(corners), step)
        ]
    (values,) = corners
    return Excerpt(values, is_whole=False, shape=shape, edge=edge)


def _as_slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)

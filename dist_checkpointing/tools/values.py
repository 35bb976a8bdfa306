"""Values in bounded memory: its budget, statistics and corners of tensors, named plain values."""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import resource
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.checkpoint.checkpoint import Checkpoint, TensorHandle
from dist_checkpointing.checkpoint.slicing import positions
from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.format.geometry import Box, Ints, split_rows
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES, MOST_BOXES, blocks, stream
from dist_checkpointing.tools.report import shape_text

Array = npt.NDArray[Any]

SLAB_ELEMENTS = 2**18
"""Number of elements that are processed at a time, such that they stay in the cache."""

_MIN_REST_BYTES = 192 * 2**20
_SLACK_BYTES = 96 * 2**20
"""For what comes with the work: modules, plans, threads, what the allocator keeps."""

_COPIES = 3
"""Of a box at a time: as it was read, as it was cast, on its way into the file."""

_MOST_BOX_BYTES = 128 * 2**20

_LEAST_REUSED_BYTES = 2**20

_MAX_ENTRIES = 1 << 20
_MAX_TEXT = 200
_MAX_NUMBERS = 16


@dataclass(frozen=True, slots=True)
class Budget:
    """How many threads work, on boxes of how many bytes each, and how much a writer may collect."""

    threads: int
    box_bytes: int
    buffer_bytes: int


def budget_of(memory_bytes: int, threads: int | None = None) -> Budget:
    """Divide what a budget for the whole process leaves among threads and buffers."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used = pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: its peak, in bytes
    rest = memory_bytes - used
    if rest < _MIN_REST_BYTES:
        least = -(-(used + _MIN_REST_BYTES) // 2**20)
        finding = Finding(
            "the program itself takes most of it",
            expected=f"at least {least} MiB",
            found=f"{memory_bytes // 2**20} MiB",
            remedy=f"Allow more: --memory {least}MiB.",
        )
        raise CheckpointingException("the memory budget is too small", [finding])
    rest -= _SLACK_BYTES
    count = threads or StorageOptions().threads
    box_bytes = max(2**20, min(_MOST_BOX_BYTES, rest // (2 * _COPIES * count)))
    return Budget(count, box_bytes, max(2**20, rest // 4))


class ReusedMemory:
    """Makes tensors in memory that earlier ones gave back. From any thread.

    The first touch of fresh memory takes longer than it takes to read into it and to write it.
    ``most_bytes`` are kept for the next ones.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._free: deque[npt.NDArray[np.uint8]] = deque()

    def __call__(
        self, shape: Ints, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        block = self._fitting(num_bytes)
        values = block[:num_bytes]
        # The tensor holds the array, and nobody else does.
        weakref.finalize(values, self._give_back, block).atexit = False
        return torch.from_numpy(values).view(dtype).view(shape)

    def _fitting(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        # Single operations of a deque need no lock, which a finalizer could not wait for.
        with suppress(IndexError):
            for _ in range(len(self._free)):
                block = self._free.popleft()
                if num_bytes <= len(block) <= 2 * num_bytes:
                    return block
                self._free.append(block)
        return np.empty(num_bytes, dtype=np.uint8)

    def _give_back(self, block: npt.NDArray[np.uint8]) -> None:
        self._free.append(block)
        with suppress(IndexError):
            while sum(map(len, [*self._free])) > self.most_bytes:
                self._free.popleft()


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor, or of a part of it.

    All but the counts are of the finite values: None if there are none, and complex numbers have
    no minimum and maximum. The variance is divided by their number. Zeros have either sign.
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
        return self.count - self.num_nan - self.num_inf

    def with_more(self, other: Statistics) -> Statistics:
        names = ("count", "num_nan", "num_inf", "num_zero")
        counts = {name: getattr(self, name) + getattr(other, name) for name in names}
        if not (self.num_finite and other.num_finite):
            return replace(self if self.num_finite else other, **counts)
        a: Any = self
        b: Any = other
        # Chan, Golub and LeVeque (1979): means and sums of squares of two parts, without
        # cancellation.
        weight = b.num_finite / (a.num_finite + b.num_finite)
        delta = b.mean - a.mean
        between = abs(delta) * math.sqrt(weight * (1 - weight))
        return Statistics(
            minimum=None if a.minimum is None else min(a.minimum, b.minimum),
            maximum=None if a.maximum is None else max(a.maximum, b.maximum),
            mean=a.mean + delta * weight,
            std=math.hypot(math.sqrt(1 - weight) * a.std, math.sqrt(weight) * b.std, between),
            **counts,
        )


def as_numbers(tensor: torch.Tensor) -> Array:
    """The values in a dtype that numpy can calculate with; short floats become float32, exactly."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float().numpy()
    numbers = tensor_memory.as_numpy(tensor)
    # Those of ml_dtypes are converted faster by numpy than by torch.
    is_short = tensor.is_floating_point() and numbers.itemsize == 1
    return numbers.astype(np.float32) if is_short else numbers


def slabs(values: torch.Tensor | Array) -> Iterator[Array]:
    """The values of a CPU tensor or an array as numbers, some at a time.

    All of a bfloat16 tensor would take twice its memory as float32.
    """
    flat = values.reshape(-1)
    for start in range(0, len(flat), SLAB_ELEMENTS):
        slab = flat[start : start + SLAB_ELEMENTS]
        yield as_numbers(slab) if isinstance(slab, torch.Tensor) else slab


def statistics_of(tensor: torch.Tensor) -> Statistics:
    return reduce(Statistics.with_more, map(_of_slab, slabs(tensor)), Statistics())


def _of_slab(values: Array) -> Statistics:
    num_nan = num_inf = 0
    finite, kind = values, values.dtype.kind
    if kind in "fc" and not (is_finite := np.isfinite(values)).all():
        finite = values[is_finite]
        num_nan = int(np.count_nonzero(np.isnan(values)))
        num_inf = values.size - finite.size - num_nan
    least = most = mean = std = None
    if finite.size:
        if kind != "c":
            least, most = finite.min().item(), finite.max().item()
        wide = finite.astype(np.complex128 if kind == "c" else np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = wide.mean().item()
            std = float(np.sqrt(np.mean(np.abs(wide - mean) ** 2)))
    num_zero = values.size - int(np.count_nonzero(values))
    return Statistics(values.size, least, most, mean, std, num_nan, num_inf, num_zero)


def walk(
    checkpoints: Sequence[Checkpoint],
    keys: Iterable[str],
    memory_bytes: int,
    use: Callable[[str, Box, Sequence[torch.Tensor]], None],
) -> None:
    """Call ``use`` with each block of tensors that all checkpoints hold, in the same shape.

    At most ``memory_bytes`` of values of all checkpoints are in memory at a time.
    """
    indices = [checkpoint.index for checkpoint in checkpoints]
    # Along the chunks of a checkpoint that must decode whole chunks.
    lead = next((index for index in indices if index.codec), indices[0])
    most_bytes = memory_bytes // len(indices)

    def boxes() -> Iterator[tuple[tuple[str, Box], int]]:
        for key in keys:
            stored = lead[key]
            widest = max(index[key].dtype.itemsize for index in indices)
            most = most_bytes * stored.dtype.itemsize // widest
            for box in blocks(stored, Box.whole(stored.global_shape), most):
                yield (key, box), box.num_elements * widest

    def read(batch: Sequence[tuple[str, Box]]) -> Iterable[Sequence[torch.Tensor]]:
        return zip(*(checkpoint.read(batch) for checkpoint in checkpoints), strict=True)

    stream(in_batches(boxes(), most_bytes, MOST_BOXES), read, use)


def stream_statistics(
    checkpoint: Checkpoint,
    keys: Iterable[str],
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
) -> dict[str, Statistics]:
    """The statistics of tensors by key, read block by block; see ``walk``.

    ``report`` is called with the number of bytes that were read since the last call.
    """
    found = {key: Statistics() for key in keys}

    def add(key: str, _: Box, tensors: Sequence[torch.Tensor]) -> None:
        found[key] = found[key].with_more(statistics_of(tensors[0]))
        report(tensors[0].nbytes)

    walk([checkpoint], found, memory_bytes, add)
    return found


def statistics_of_part(
    handle: TensorHandle,
    slices: Any = ...,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
) -> Statistics:
    """The statistics of ``handle[slices]``, which need not fit into memory."""
    found = Statistics()
    for part in _parts(handle, slices, memory_bytes):
        tensor = handle[part]
        report(tensor.nbytes)
        found = found.with_more(statistics_of(tensor))
        del tensor  # before the next one is read
    return found


def _parts(handle: TensorHandle, slices: Any, memory_bytes: int) -> Iterator[tuple[slice, ...]]:
    chosen = positions(handle.shape, slices, handle.key)
    ranges = [range(part, part + 1) if isinstance(part, int) else part for part in chosen]
    shape = tuple(map(len, ranges))
    if all(part.step == 1 for part in ranges):
        box = Box(tuple(part.start for part in ranges), shape)
        yield from (block.slices() for block in blocks(handle.stored, box, memory_bytes))
    elif math.prod(shape):
        for block in split_rows(Box.whole(shape), memory_bytes // handle.stored.dtype.itemsize):
            inside = zip(ranges, block.slices(), strict=True)
            yield tuple(_as_slice(part[inner]) for part, inner in inside)


def read_excerpt(
    handle: TensorHandle, slices: Any = ..., *, most: int, edge: int
) -> tuple[torch.Tensor, bool]:
    """Read a part of a tensor, see ``TensorHandle``; returns also whether these are all its values.

    If it has more than ``most`` elements, they are the first and last ``edge`` of every long axis,
    and one more between them, in place of the values that were left out.
    """
    chosen = positions(handle.shape, slices, handle.key)
    if math.prod(len(part) for part in chosen if isinstance(part, range)) <= most:
        return handle[slices], True

    def read(*corner: int | slice) -> torch.Tensor:
        if len(corner) == len(chosen):
            return handle[corner]
        part = chosen[len(corner)]
        if isinstance(part, int):
            return read(*corner, part)
        is_long = len(part) > 2 * edge
        ends = [part[: edge + 1], part[len(part) - edge :]] if is_long else [part]
        axis = sum(isinstance(taken, slice) for taken in corner)
        return torch.cat([read(*corner, _as_slice(end)) for end in ends], dim=axis)

    return read(), False


def _as_slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)


# Common state and objects as a flat list of named values.


class _Unknown:
    """A value of a class that nothing imports, such as an enum: its name, and what made it."""

    text: str

    def __new__(cls, *args: Any) -> Self:
        made = super().__new__(cls)
        made.text = f"{cls.__module__}.{cls.__qualname__}({', '.join(map(repr, args))})"
        return made

    def __setstate__(self, state: object) -> None:
        """Keep the name alone."""

    def __repr__(self) -> str:
        return self.text


def common_state(opened: Checkpoint) -> dict[str, Any]:
    """The common state, in which values of classes that are not allowed are only named."""
    unknown: dict[str, type] = {}
    while True:
        try:
            with torch.serialization.safe_globals([(kind, n) for n, kind in unknown.items()]):
                return opened.common
        except UnsupportedFormatError as error:
            refused = {name for f in error.findings for name in str(f.found or "").split(", ")}
            if refused <= {*unknown, ""}:
                raise
            for full in refused:
                module, _, name = full.rpartition(".")
                unknown[full] = type(name, (_Unknown,), {"__module__": module})


def entries(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, lists, tuples and namespaces, by path such as ``args.betas.0``.

    An empty container is a leaf, and so is a container that contains itself.
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, frozenset[int]]] = [(name, value, frozenset())]
    while waiting:
        path, node, above = waiting.pop()
        children = None if id(node) in above else list(_children(node))
        if not children:
            # The keys 1 and "1" of one dict have the same text.
            names = itertools.chain([path], (f"{path} ({n})" for n in itertools.count(2)))
            found[next(name for name in names if name not in found)] = node
            continue
        if len(found) + len(waiting) > _MAX_ENTRIES:
            raise ValueError(f"more than {_MAX_ENTRIES} values are nested in {name or 'the state'}")
        inside = above | {id(node)}
        prefix = f"{path}." if path else ""
        waiting += [(f"{prefix}{step}", child, inside) for step, child in reversed(children)]
    return found


def _children(node: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(node, argparse.Namespace | types.SimpleNamespace):
        node = vars(node)
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple) and not isinstance(node, torch.Size):
        yield from enumerate(node)


def below(value: Any, path: str) -> Any:
    """The value at a path such as ``args.betas``."""
    for step, child in _children(value):
        name = str(step)  # a key may itself hold dots
        if path == name:
            return child
        if path.startswith(f"{name}."):
            with suppress(KeyError):
                return below(child, path.removeprefix(f"{name}."))
    raise KeyError(path)


def type_text(value: Any) -> str:
    """The type of a value as text: ``int``, ``float32 tensor 2x3``."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor {shape_text(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {shape_text(value.shape)}"
    return type(value).__name__


def value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        is_long = value.numel() > _MAX_NUMBERS or value.is_sparse or value.device.type == "meta"
        text = f"{type_text(value)} {'...' if is_long else value.detach().tolist()}"
    elif isinstance(value, io.BytesIO):
        text = f"BytesIO({value.getvalue()[:_MAX_TEXT]!r})"
    else:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001 - an unknown __repr__ may raise anything
            text = f"<{type(value).__name__}: {error}>"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"

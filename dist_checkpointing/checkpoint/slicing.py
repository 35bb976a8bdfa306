"""Tensors and objects that are read when asked for, and slices of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints, unravel
from dist_checkpointing.format.index import StoredTensor

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from dist_checkpointing.checkpoint.checkpoint import Checkpoint


_ALL = slice(None, None, 1)
_MOST_BOXES = 4096

_GAP_ELEMENTS = 4096
"""Rows further apart than this are read one by one, and what lies between them is not."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A part of a tensor.

    Attributes:
        boxes: Boxes to read, in elements of the tensor; they follow each other along ``axis``.
        axis: Axis along which they are joined.
        within: What to take of the array that they make up.
    """

    boxes: tuple[Box, ...]
    axis: int
    within: tuple[int | slice, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the array that the boxes make up is what is selected."""
        return all(part == _ALL for part in self.within)

    @property
    def shape(self) -> Ints:
        """Shape of what is selected."""
        extents = list(self.boxes[0].shape)
        if extents:
            extents[self.axis] = sum(box.shape[self.axis] for box in self.boxes)
        return tuple(
            len(range(extent)[part])
            for extent, part in zip(extents, self.within, strict=True)
            if isinstance(part, slice)
        )

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is selected, of the boxes that were read for it; in memory of its own."""
        import torch  # noqa: PLC0415 - a checkpoint is listed without it

        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=self.axis)
        if self.is_whole:
            return whole
        part = whole[self.within]
        # A thin view would keep all that was read.
        return part if part.numel() == whole.numel() else part.clone()


def parse_slices(text: str) -> tuple[int | slice | Any, ...]:
    """What ``text`` means between brackets: ``"0:4,:8"``, ``"-1"``, ``"...,::2"``.

    Raises:
        ValueError: if it is something else.
    """
    parts: list[Any] = []
    for word in text.strip().removeprefix("[").removesuffix("]").split(","):
        bounds = word.strip().split(":")
        try:
            if word.strip() == "...":
                parts.append(Ellipsis)
            elif len(bounds) == 1:
                parts.append(int(word))
            elif len(bounds) <= 3:
                parts.append(slice(*(int(bound) if bound.strip() else None for bound in bounds)))
            else:
                raise ValueError(word)
        except ValueError:
            raise ValueError(
                f"cannot read {word.strip()!r} in the slice {text!r}; write one index or "
                "start:stop:step for each axis, such as '0:4,:8' or '-1,...'"
            ) from None
    return tuple(parts)


def positions(shape: Ints, slices: Any, key: str) -> tuple[int | range, ...]:
    """For each axis the index, or the range of indices, that ``tensor[slices]`` takes.

    Raises:
        IndexError: if ``slices`` do not fit the shape.
    """
    given = slices if isinstance(slices, tuple) else (slices,)
    dots = [place for place, part in enumerate(given) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{key!r}: more than one '...'")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"{key!r}: {len(given) - len(dots)} indices for shape {shape}")
    place = dots[0] if dots else len(given)
    filling = (slice(None),) * (len(shape) - len(given) + len(dots))
    parts = given[:place] + filling + given[place + 1 :]
    return tuple(
        _along(axis, extent, part, key)
        for axis, (extent, part) in enumerate(zip(shape, parts, strict=True))
    )


def select(shape: Ints, slices: Any, key: str) -> Selected:
    """The part of a tensor that ``tensor[slices]`` means.

    Args:
        shape: shape of the tensor.
        slices: an int, a slice with a positive step, ``...``, or a tuple of them.
        key: key of the tensor, for messages.

    Raises:
        IndexError: if they do not fit the shape.
    """
    taken = positions(shape, slices, key)
    ranges = [range(part, part + 1) if isinstance(part, int) else part for part in taken]
    box = Box(
        tuple(min(r.start, extent) for r, extent in zip(ranges, shape, strict=True)),
        tuple(r[-1] - r[0] + 1 if r else 0 for r in ranges),
    )
    within = tuple(0 if isinstance(p, int) else slice(None, None, p.step) for p in taken)
    if all(r.step == 1 for r in ranges):
        return Selected((box,), 0, within)
    return _rows_apart(box, within)


def _rows_apart(box: Box, within: tuple[int | slice, ...]) -> Selected:
    """Leave out what lies between rows that are far apart."""
    for axis, part in enumerate(within):
        step = part.step or 1 if isinstance(part, slice) else 1
        places = range(0, box.shape[axis], step)
        row_elements = math.prod(box.shape) // max(1, box.shape[axis])
        if len(places) <= 1 or len(places) > _MOST_BOXES:
            continue
        if (step - 1) * row_elements < _GAP_ELEMENTS:
            continue
        rows = tuple(
            Box(
                (*box.offset[:axis], box.offset[axis] + place, *box.offset[axis + 1 :]),
                (*box.shape[:axis], 1, *box.shape[axis + 1 :]),
            )
            for place in places
        )
        return Selected(rows, axis, (*within[:axis], slice(None), *within[axis + 1 :]))
    return Selected((box,), 0, within)


def _along(axis: int, extent: int, part: Any, key: str) -> int | range:
    if isinstance(part, slice):
        try:
            start, stop, step = part.indices(extent)
        except (TypeError, ValueError) as error:
            raise IndexError(f"{key!r}: axis {axis}: {error}") from error
        if step < 1:
            raise IndexError(f"{key!r}: axis {axis}: a step of {step} is not supported, only >= 1")
        return range(start, stop, step)
    # For torch, True is a mask and not the number 1.
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        found = type(part).__name__
        raise IndexError(f"{key!r}: axis {axis}: an int or a slice is needed, not {found}")
    try:
        place = part.__index__()
    except TypeError as error:
        raise IndexError(f"{key!r}: axis {axis}: {error}") from error
    if not -extent <= place < extent:
        raise IndexError(f"{key!r}: axis {axis} has {extent} elements, there is no {place}")
    return int(place % extent)


Slices = Any
"""What may stand between the brackets of a tensor: an int, a slice, ``...``, or a tuple of them."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One part of a tensor that is stored as a whole.

    Attributes:
        box: Box in elements of the global tensor.
        flat_range: If given, only these elements of the flattened box.
        num_bytes: Size of the values, before compression.
    """

    box: Box
    flat_range: tuple[int, int] | None
    num_bytes: int


class TensorHandle:
    """One tensor of a checkpoint: known by name, not read.

    ``handle[a:b, :]`` reads only the chunks that it needs, and returns a CPU tensor;
    ``np.asarray(handle)`` and ``torch.as_tensor(handle)`` read all of it.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> Checkpoint.open("ckpt")["w"][1:3]
        tensor([1., 1.])
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredTensor) -> None:
        self._checkpoint = checkpoint
        self._stored = stored

    @property
    def stored(self) -> StoredTensor:
        """Row of the index."""
        return self._stored

    @property
    def key(self) -> str:
        """Key of the tensor."""
        return self._stored.key

    @property
    def shape(self) -> Ints:
        """Shape of the whole (global) tensor."""
        return self._stored.global_shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type, for torch."""
        return self._stored.dtype.torch

    @property
    def dtype_name(self) -> str:
        """Element type as a word, such as ``"bfloat16"``; needs no torch."""
        return self._stored.dtype.name

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, before compression."""
        return self._stored.num_bytes

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return self._stored.num_bytes // self._stored.dtype.itemsize

    def numel(self) -> int:
        """``num_elements``, as torch calls it."""
        return self.num_elements

    @property
    def chunk_shape(self) -> Ints | None:
        """Shape of a chunk; None if the tensor is stored as pieces of any shape."""
        return self._stored.chunk_shape

    @cached_property
    def chunks(self) -> tuple[StoredChunk, ...]:
        """The parts in which it is stored, in C order."""
        return tuple(self.iter_chunks())

    def iter_chunks(self) -> Iterator[StoredChunk]:
        """``chunks`` one after the other, for tensors that have very many."""
        for box, flat in self._stored.parts():
            count = box.num_elements if flat is None else flat[1] - flat[0]
            yield StoredChunk(box, flat, count * self._stored.dtype.itemsize)

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self._stored.num_parts

    @property
    def folder(self) -> Location:
        """Folder of the checkpoint."""
        return self._checkpoint.folder

    def __getitem__(self, slices: Slices) -> torch.Tensor:
        """Read a part.

        Args:
            slices: as for a torch tensor: ints, slices with a positive step, ``...``.

        Raises:
            IndexError: if they do not fit the shape.
            CheckpointingException: if it cannot be read.
        """
        checkpoint, stored = self._checkpoint, self._stored
        selected = select(stored.global_shape, slices, stored.key)
        reads = checkpoint.reads
        try:  # in place of ``checkpoint.reading()``, which takes as long as looking for the file
            parts = reads.boxes(checkpoint.index, [(stored, box) for box in selected.boxes])
        except Exception:
            checkpoint.require_unchanged()
            raise
        checkpoint.require_same()
        return selected.joined(parts)

    def read(self, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the whole tensor.

        Args:
            device: where the new tensor lies; it is read into the memory of the CPU first.

        Raises:
            CheckpointingException: if it cannot be read.
        """
        return self[...].to(device)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.key!r} has no axes, so it has no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        """True: whether a tensor is stored, not what its elements are."""
        return True

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """All elements; bfloat16 and the like as dtypes of ml_dtypes."""
        if copy is False:
            raise ValueError(f"{self.key!r} cannot become an array without being read")
        from dist_checkpointing.mapping.tensor_memory import as_numpy  # noqa: PLC0415 - imports torch

        array = as_numpy(self.read())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """All elements for other array libraries, and for ``torch.as_tensor``."""
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU

    def location(self, number: int) -> str:
        """Where the chunk ``chunks[number]`` lies: its file, and the bytes of it if it says so.

        Raises:
            CheckpointingException: if that cannot be found out.
        """
        if self._stored.pieces is None:
            grid = self._stored.grid
            box = grid.box(unravel(number, grid.counts))
        else:
            box, _ = self._stored.pieces[number]
        return self._checkpoint.reads.location(self._checkpoint.index, self.key, box, number)

    def __repr__(self) -> str:
        return f"<{self.key!r}: {self.dtype_name}{list(self.shape)}, {self.num_bytes} bytes>"


class ObjectHandle(Mapping[Ints, Any]):
    """The cells of one sharded object: cell index -> value, unpickled when asked for.

    Attributes:
        key: Key of the object.
        shape: Shape of the grid of cells.

    Example:
        >>> rng = ShardedObject("rng", {"seed": 1}, (1,), (0,))
        >>> save({"rng": rng}, "ckpt")
        >>> Checkpoint.open("ckpt").objects["rng"][0]
        {'seed': 1}
    """

    def __init__(self, checkpoint: Checkpoint, key: str, shape: Ints) -> None:
        self._checkpoint = checkpoint
        self.key = key
        self.shape = shape

    def __getitem__(self, cell: int | Sequence[int]) -> Any:
        index = (cell,) if isinstance(cell, int) else tuple(cell)
        if index not in self:
            raise KeyError(f"{self.key!r} has no cell {index} in its grid {self.shape}")
        with self._checkpoint.reading():
            return self._checkpoint.reads.object_cell(
                self._checkpoint.index, self.key, self.shape, index
            )

    def __contains__(self, cell: object) -> bool:
        if not isinstance(cell, tuple) or len(cell) != len(self.shape):
            return False
        return all(isinstance(i, int) and 0 <= i < n for i, n in zip(cell, self.shape, strict=True))

    def __iter__(self) -> Iterator[Ints]:
        return itertools.product(*map(range, self.shape))

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<{self.key!r}: object{list(self.shape)}>"

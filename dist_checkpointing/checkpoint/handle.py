"""Checkpoint.open: a checkpoint as a read-only mapping, on one machine, without a process group.

Nothing here imports torch: a checkpoint of an indexed backend is listed without it, and whatever
needs a strategy or a value loads ``reads`` on first use.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_checkpointing.checkpoint.slicing import select
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.paths import local_folder
from dist_checkpointing.format.claims import large_objects
from dist_checkpointing.format.commit import (
    CONTENT_METADATA_KEY,
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    read_config,
)
from dist_checkpointing.format.geometry import Box, Ints, unravel
from dist_checkpointing.format.index import Index, StoredTensor, read_index
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME, number_of_save
from dist_checkpointing.format.near_names import hint

if TYPE_CHECKING:
    import torch

    from dist_checkpointing.checkpoint.reads import PartialReads

Slices = Any
"""What may stand between the brackets of a tensor: an int, a slice, ``...``, or a tuple of them."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One part of a tensor that is stored as a whole.

    Attributes:
        box: Box in elements of the global tensor.
        flat_range: if given, only these elements of the flattened box.
        num_bytes: size of the values, before compression.
    """

    box: Box
    flat_range: tuple[int, int] | None
    num_bytes: int


class TensorHandle:
    """One tensor of a checkpoint: known by name, not read.

    ``handle[a:b, :]`` reads only the chunks that it needs, and returns a CPU tensor.

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
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return self._checkpoint.path

    def __getitem__(self, slices: Slices) -> torch.Tensor:
        """Read a part.

        Args:
            slices: as for a torch tensor: ints, slices with a positive step, ``...``.

        Raises:
            IndexError: if they do not fit the shape.
            CheckpointingException: if it cannot be read.
        """
        selected = select(self.shape, slices, self.key)
        parts = self._checkpoint.read([(self.key, box) for box in selected.boxes])
        return self._checkpoint.reads.joined(parts, selected)

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
        key: key of the object.
        shape: shape of the grid of cells.

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
        try:
            return self._checkpoint.reads.object_cell(
                self._checkpoint.index, self.key, self.shape, index
            )
        finally:
            # Also if it failed: that it was deleted says more than that a file is gone.
            self._checkpoint.require_unchanged()

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


class Checkpoint(Mapping[str, TensorHandle]):
    """A committed checkpoint of any backend, also of Megatron and torch DCP; see ``open``.

    Attributes:
        path: folder of the checkpoint.
        trusted: whether anything is unpickled.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, Checkpoint, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> save(state, "ckpt")
        >>> opened = Checkpoint.open("ckpt")
        >>> opened["w"][2:4]
        tensor([2., 3.])
        >>> opened.common
        {'step': 100}
    """

    def __init__(
        self,
        path: Path,
        config: CheckpointingConfig,
        save_number: int,
        *,
        trusted: bool,
        stamp: object = None,
    ) -> None:
        self.path = path
        self.trusted = trusted
        self._config = config
        self._save_number = save_number
        self._stamp = stamp

    @classmethod
    def open(cls, path: str | PathLike[str], *, trusted: bool = False) -> Checkpoint:
        """Open a checkpoint to look into it. Not collective; reads a few bytes.

        Args:
            path: a committed checkpoint.
            trusted: unpickle anything in common state and objects. Lets the checkpoint run any
                code.

        Raises:
            CheckpointNotFoundError: nothing is committed there.
            CorruptCheckpointError: what says how to read it is damaged.
        """
        folder = local_folder(path)
        # First: a save that begins in between must not go for the one whose config is read.
        stamp, save_number = _stamp(folder), number_of_save(folder)
        return cls(folder, read_config(folder), save_number, trusted=trusted, stamp=stamp)

    @property
    def backend(self) -> tuple[str, int]:
        """Name and version of the backend of the tensors."""
        return self._config.sharded_backend, self._config.sharded_backend_version

    @property
    def common_backend(self) -> tuple[str, int]:
        """Name and version of the backend of the common state."""
        return self._config.common_backend, self._config.common_backend_version

    @property
    def is_committed(self) -> bool:
        """Whether what was opened is still there: not deleted, not overwritten by another save."""
        if self._stamp is not None and self._stamp == _stamp(self.path):
            return True
        return (
            check_is_distributed_checkpoint(self.path)
            and number_of_save(self.path) == self._save_number
        )

    @cached_property
    def index(self) -> Index:
        """What is stored, as columns.

        Raises:
            CheckpointingException: if that cannot be found out.
        """
        index = read_index(self.path)
        if index is None:
            index = self.reads.index()
        self.require_unchanged()
        return index

    @cached_property
    def reads(self) -> PartialReads:
        """How values are read."""
        # Not at the top: it imports torch.
        from dist_checkpointing.checkpoint.reads import PartialReads  # noqa: PLC0415

        return PartialReads(self.path, self._config, trusted=self.trusted)

    @cached_property
    def objects(self) -> Mapping[str, ObjectHandle]:
        """The sharded objects by key."""
        index = self.index
        if index.objects:
            claims = large_objects(index.objects)
            if claims:
                self.reads.require_stored(claims, index)
        grids = index.objects or self.reads.object_grids(index)
        return {key: ObjectHandle(self, key, shape) for key, shape in sorted(grids.items())}

    @cached_property
    def common(self) -> dict[str, Any]:
        """The common state; unpickled with an allow-list of plain types unless ``trusted``."""
        common = self.reads.common()
        self.require_unchanged()
        return common

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The ``content_metadata`` that was passed to ``save``; None if there was none."""
        return self.common.get(CONTENT_METADATA_KEY)

    def read(self, wanted: Iterable[tuple[str, Box]]) -> list[torch.Tensor]:
        """Read boxes of any tensors at once, which is faster than one after the other.

        Args:
            wanted: keys and boxes, in elements of the global tensors.

        Returns:
            One new CPU tensor for each.

        Raises:
            KeyError: if there is no such tensor.
            IndexError: if a box does not lie in its tensor.
            CheckpointingException: if one cannot be read, or the checkpoint has been overwritten.
        """
        rows = list(wanted)
        for key, box in rows:
            _require_inside(self[key].shape, key, box)
        try:
            return self.reads.boxes(self.index, rows)
        finally:
            # Also if it failed: that it was deleted says more than that a file is gone.
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Make sure that what has been read is of the checkpoint that was opened.

        Raises:
            CorruptCheckpointError: if it was deleted or overwritten.
        """
        if not self.is_committed:
            finding = Finding(
                "deleted or overwritten", path=str(self.path), remedy="Open it again."
            )
            message = "it changed: this is not the checkpoint that was opened"
            raise CorruptCheckpointError(message, [finding])

    def __getitem__(self, key: str) -> TensorHandle:
        if key not in self.index:
            raise KeyError(f"{self.path} holds no tensor {key!r}{hint(key, self.index)}")
        return TensorHandle(self, self.index[key])

    def __contains__(self, key: object) -> bool:
        return key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        name, version = self.backend
        return f"<Checkpoint {str(self.path)!r}: {name} {version}, {len(self)} tensors>"


def _stamp(folder: Path) -> object:
    """Equal as long as what commits a checkpoint, and names its save, are the same files; or None.

    It costs a tenth of reading them. They are opened because some network file systems look for
    changes only then.
    """
    marks = []
    for name in (CONFIG_FNAME, ATTEMPT_NAME):
        try:
            descriptor = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        marks += [status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    return marks


def _require_inside(shape: Ints, key: str, box: Box) -> None:
    fits = (
        len(box.offset) == len(box.shape) == len(shape) and min((*box.offset, *box.shape, 0)) == 0
    )
    if not fits or not Box.whole(shape).contains(box):
        raise IndexError(f"{key!r}: {box} does not lie in a tensor of shape {shape}")

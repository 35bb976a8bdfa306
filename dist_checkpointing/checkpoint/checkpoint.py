"""``Checkpoint.open``: a checkpoint as a read-only mapping of tensors that are read when asked for.

Nothing here imports torch: a checkpoint of an indexed backend is listed without it, and whatever
needs a strategy or a value loads ``reads`` on first use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from dist_checkpointing.checkpoint.slicing import select
from dist_checkpointing.errors import CorruptCheckpointError, Finding, counted, hint
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.local_folder import is_local
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import commit
from dist_checkpointing.format.foreign_formats import foreign_backend, foreign_files
from dist_checkpointing.format.geometry import Box, Ints, unravel
from dist_checkpointing.format.index import Index, StoredTensor, large_objects, read_index
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME, number_of_save
from dist_checkpointing.format.run_steps import located
from dist_checkpointing.threads import paused_collector

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from dist_checkpointing.checkpoint.partial_reads import PartialReads

T = TypeVar("T")


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


_NAMES: Final = (CONFIG_FNAME, ATTEMPT_NAME)
"""What commits a checkpoint, and names its save."""


class Stamp(NamedTuple):
    """Equal as long as some files are the same; it costs a tenth of reading small ones."""

    folder: Location
    names: Sequence[str]
    marks: object

    @classmethod
    def of(cls, folder: Location, names: Sequence[str], *, opens: bool = True) -> Self | None:
        """None if a file is not there, or would have to be asked for."""
        marks = location.marks_of(folder, names, opens=opens)
        return None if marks is None else cls(folder, names, marks)


class TensorHandle:
    """One tensor of a checkpoint: known by name, not read.

    ``handle[a:b, :]`` reads only the chunks that it needs, and returns a CPU tensor;
    ``np.asarray(handle)`` and ``torch.as_tensor(handle)`` read all of it.

    Attributes:
        stored: Row of the index.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> Checkpoint.open("ckpt")["w"][1:3]
        tensor([1., 1.])
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredTensor) -> None:
        self._checkpoint = checkpoint
        self.stored = stored

    @property
    def key(self) -> str:
        """Key of the tensor."""
        return self.stored.key

    @property
    def shape(self) -> Ints:
        """Shape of the whole (global) tensor."""
        return self.stored.global_shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type, for torch."""
        return self.stored.dtype.torch

    @property
    def dtype_name(self) -> str:
        """Element type as a word, such as ``"bfloat16"``; needs no torch."""
        return self.stored.dtype.name

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, before compression."""
        return self.stored.num_bytes

    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return self.stored.num_bytes // self.stored.dtype.itemsize

    @property
    def chunk_shape(self) -> Ints | None:
        """Shape of a chunk; None if the tensor is stored as pieces of any shape."""
        return self.stored.chunk_shape

    @cached_property
    def chunks(self) -> tuple[StoredChunk, ...]:
        """The parts in which it is stored, in C order."""
        return tuple(self.iter_chunks())

    def iter_chunks(self) -> Iterator[StoredChunk]:
        """``chunks`` one after the other, for tensors that have very many."""
        for box, flat in self.stored.parts():
            count = box.num_elements if flat is None else flat[1] - flat[0]
            yield StoredChunk(box, flat, count * self.stored.dtype.itemsize)

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.stored.num_parts

    @property
    def folder(self) -> Location:
        """Folder of the checkpoint."""
        return self._checkpoint.folder

    def __getitem__(self, slices: Any) -> torch.Tensor:
        """Read a part.

        Args:
            slices: as for a torch tensor: ints, slices with a positive step, ``...``.

        Raises:
            IndexError: if they do not fit the shape.
            CheckpointingException: if it cannot be read.
        """
        checkpoint, stored = self._checkpoint, self.stored
        selected = select(stored.global_shape, slices, stored.key)
        rows = [(stored, box) for box in selected.boxes]
        parts = checkpoint.reading(checkpoint.reads.boxes, checkpoint.index, rows)
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
        if self.stored.pieces is None:
            grid = self.stored.grid
            box = grid.box(unravel(number, grid.counts))
        else:
            box, _ = self.stored.pieces[number]
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
        opened = self._checkpoint
        return opened.reading(opened.reads.object_cell, opened.index, self.key, self.shape, index)

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
        path: Where it is.
        folder: Folder of its files: on a disk ``path``, in an object store below it.
        trusted: Whether anything is unpickled.

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
        path: Location,
        config: commit.CheckpointingConfig,
        save_number: int,
        *,
        trusted: bool,
        stamp: Stamp | None = None,
        folder: Location | None = None,
    ) -> None:
        self.path = path
        # Absolute, so that a handle outlives a change of the working directory.
        self._root = path.absolute()
        self.folder: Location = self._root if folder is None else folder.absolute()
        self._is_in_place = self.folder == self._root
        self.trusted = trusted
        self._config = config
        self._save_number = save_number
        self._stamp = stamp

    @classmethod
    def open(cls, path: str | PathLike[str], *, trusted: bool = False) -> Checkpoint:
        """Open a checkpoint to look into it. Not collective; reads a few bytes.

        Args:
            path: folder or URL of a committed checkpoint; ``RUN@1000`` and ``RUN@latest`` are steps
                of a run.
            trusted: unpickle anything in common state and objects. Lets the checkpoint run any
                code.

        Raises:
            CheckpointNotFoundError: nothing is committed there.
            CorruptCheckpointError: what says how to read it is damaged.
        """
        root = located(as_location(path))
        folder = commit.data_folder(root)
        # First: a save that begins in between must not go for the one whose config is read.
        stamp, save_number = Stamp.of(folder, _NAMES), number_of_save(folder)
        config = commit.read_config(folder)
        if stamp is None and isinstance(folder, Path) and foreign_backend(folder) is not None:
            stamp = Stamp.of(*foreign_files(folder))
        return cls(root, config, save_number, trusted=trusted, stamp=stamp, folder=folder)

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
        if self._stamp is not None:
            folder, names, _ = self._stamp
            if self._stamp == Stamp.of(folder, names, opens=self._opens):
                return True
            if names is not _NAMES:
                return False
        return (
            commit.data_folder(self._root) == self.folder
            and commit.check_is_distributed_checkpoint(self.folder)
            and number_of_save(self.folder) == self._save_number
        )

    @cached_property
    def _opens(self) -> bool:
        return not (isinstance(self.folder, Path) and is_local(self.folder))

    @cached_property
    def index(self) -> Index:
        """What is stored, as columns.

        Raises:
            CheckpointingException: if that cannot be found out.
        """
        index = self.reading(read_index, self.folder)
        return self.reading(self.reads.index) if index is None else index

    @cached_property
    def reads(self) -> PartialReads:
        """How values are read."""
        # Not at the top: it imports torch. A collection among all its objects would take longer.
        with paused_collector():
            from dist_checkpointing.checkpoint.partial_reads import PartialReads  # noqa: PLC0415

            return PartialReads(self.folder, self._config, trusted=self.trusted)

    @cached_property
    def objects(self) -> Mapping[str, ObjectHandle]:
        """The sharded objects by key."""
        index = self.index
        if claims := large_objects(index.objects):
            self.reads.require_stored(claims, index)
        grids = index.objects or self.reads.object_grids(index)
        return {key: ObjectHandle(self, key, shape) for key, shape in sorted(grids.items())}

    @cached_property
    def common(self) -> dict[str, Any]:
        """The common state; unpickled with an allow-list of plain types unless ``trusted``."""
        return self.reading(self.reads.common)

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The ``content_metadata`` that was passed to ``save``; None if there was none."""
        return self.common.get(commit.CONTENT_METADATA_KEY)

    def fingerprint(self, key: str) -> str:
        """The fingerprint of a tensor, see ``dist_checkpointing.fingerprint``: 32 hex digits.

        As the save has kept it; if it kept none, the tensor is read.

        Raises:
            KeyError: if there is no such tensor.
            CheckpointingException: if it cannot be read, or the checkpoint has been overwritten.

        Example:
            >>> import torch
            >>> from dist_checkpointing import Checkpoint, ShardedTensor, fingerprint, save
            >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}
            >>> save(state, "ckpt", fingerprints=True)
            >>> Checkpoint.open("ckpt").fingerprint("w") == fingerprint(state)["w"]
            True
        """
        return self.fingerprints([key])[key]

    def fingerprints(
        self,
        keys: Iterable[str] | None = None,
        *,
        stored: bool = True,
        report: Callable[[int], None] = lambda _: None,
    ) -> dict[str, str]:
        """The fingerprints of several tensors by key; see ``fingerprint``.

        Args:
            keys: Keys of the tensors; by default all.
            stored: Take what the save has kept. Otherwise everything is read.
            report: Called with the number of bytes that were read since the last call.
        """
        wanted = [*self.index] if keys is None else [self[key].key for key in keys]
        known = self.index.fingerprints if stored else {}
        missing = [key for key in wanted if key not in known]
        found: dict[str, str] = {}
        if missing:
            # Not at the top: it imports torch.
            from dist_checkpointing.storage.fingerprints import (  # noqa: PLC0415
                fingerprints_by_reading,
            )

            found = fingerprints_by_reading(self.index, missing, self.read, report)
        return {key: found[key] if key in found else known[key] for key in wanted}

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
        rows = [(self[key].stored, box) for key, box in wanted]
        for stored, box in rows:
            shape, key, axes = stored.global_shape, stored.key, len(box.offset)
            fits = axes == len(box.shape) == len(shape) and min((*box.offset, *box.shape, 0)) == 0
            if not fits or not Box.whole(shape).contains(box):
                raise IndexError(f"{key!r}: {box!r} does not lie in a tensor of shape {shape}")
        return self.reading(self.reads.boxes, self.index, rows)

    def reading(self, read: Callable[..., T], *arguments: Any) -> T:
        """What ``read(*arguments)`` returns, if that is of the checkpoint that was opened.

        Raises:
            CorruptCheckpointError: if it was deleted or overwritten.
        """
        try:
            found = read(*arguments)
        except Exception:
            # That it was deleted says more than that a file is gone.
            self.require_unchanged()
            raise
        # The files of a save that has a folder of its own are never written again.
        if self._is_in_place:
            self.require_unchanged()
        return found

    def require_unchanged(self) -> None:
        """Make sure that what has been read is of the checkpoint that was opened.

        Raises:
            CorruptCheckpointError: if it was deleted or overwritten.
        """
        if not self.is_committed:
            problem, remedy = "deleted or overwritten", "Open it again."
            finding = Finding(problem, path=str(self.path), remedy=remedy)
            message = "it changed: this is not the checkpoint that was opened"
            raise CorruptCheckpointError(message, [finding])

    def __getitem__(self, key: str) -> TensorHandle:
        index = self.index
        if key not in index:
            raise KeyError(f"{self.path} holds no tensor {key!r}{hint(str(key), index)}")
        return TensorHandle(self, index[key])

    def __contains__(self, key: object) -> bool:
        return key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def _ipython_key_completions_(self) -> list[str]:
        return [*self]

    def __repr__(self) -> str:
        name, version = self.backend
        return f"<Checkpoint {str(self.path)!r}: {name} {version}, {counted(len(self), 'tensor')}>"

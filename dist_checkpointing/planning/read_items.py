"""One box to read, as our planner or a user's own describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints, Window, split_rows
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.planning.items import MetadataIndex

NOWHERE = Window(0, (), Box((), ()))
"""The windows of a cell of a sharded object."""


class LoadItemType(Enum):
    """What a ReadItem carries."""

    TENSOR = "tensor"
    BYTE_IO = "byte_io"


@dataclass(frozen=True, slots=True, init=False)
class ReadItem:
    """A box to copy from a stored chunk into one of this rank's leaves.

    Made either of two windows or of ``dest_offsets``, ``storage_offsets`` and ``lengths``. The
    shapes of the windows are then found from the indices when the plan is used.

    Args:
        dest: a window, or the same as ``dest_offsets``.
        storage: a window, or the same as ``storage_offsets``.
        lengths: shape of the box.
        dest_offsets: offset of the box in the destination.
        storage_offsets: offset of the box in the stored chunk.

    Attributes:
        type: Tensor or bytes.
        dest_index: Key, offset of the destination shard, and which leaf of this rank it is.
        dest: Where the box lies in the destination's memory.
        storage_index: Key, offset of the stored chunk, and which piece it is.
        storage: Where the box lies in the stored chunk, whose elements are in C order.

    Raises:
        InvalidShardingError: if it does not say which box goes where.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest: Window
    storage_index: MetadataIndex
    storage: Window

    def __init__(
        self,
        type: LoadItemType,  # noqa: A002 - the name that the protocol gives it
        dest_index: MetadataIndex,
        dest: Window | Sequence[int] | None = None,
        storage_index: MetadataIndex | None = None,
        storage: Window | Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        *,
        dest_offsets: Sequence[int] | None = None,
        storage_offsets: Sequence[int] | None = None,
    ) -> None:
        if storage_index is None:
            raise _incomplete(dest_index, "storage_index", None)
        if not isinstance(dest, Window):
            offsets = dest if dest_offsets is None else dest_offsets
            dest = _unplaced(type, dest_index, "dest_offsets", offsets, lengths)
        if not isinstance(storage, Window):
            offsets = storage if storage_offsets is None else storage_offsets
            storage = _unplaced(type, storage_index, "storage_offsets", offsets, lengths)
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "dest_index", dest_index)
        object.__setattr__(self, "dest", dest)
        object.__setattr__(self, "storage_index", storage_index)
        object.__setattr__(self, "storage", storage)

    @property
    def dest_offsets(self) -> Ints:
        """Offset of the box in the destination."""
        return _offsets(self.dest)

    @property
    def storage_offsets(self) -> Ints:
        """Offset of the box in the stored chunk."""
        return _offsets(self.storage)

    @property
    def lengths(self) -> Ints:
        """Shape of the box."""
        return self.dest.box.shape

    @property
    def is_placed(self) -> bool:
        """Whether everything about it is known, so that it can be read."""
        windows = (self.dest, self.storage)
        return (
            self.dest_index.index is not None
            and self.storage_index.offset is not None
            and all(len(window.shape) == len(window.box.shape) for window in windows)
        )

    def parts(self, max_elements: int) -> Iterator[ReadItem]:
        """The same in blocks of rows with at most so many elements each; itself if it is small."""
        if self.dest.box.num_elements <= max_elements:
            yield self
            return
        for block in split_rows(Box.whole(self.lengths), max_elements):
            yield replace(self, dest=self.dest.part(block), storage=self.storage.part(block))


def _offsets(window: Window) -> Ints:
    # A range of a flattened tensor may begin anywhere in what is stored, which has one axis too.
    return (window.start + window.box.offset[0],) if len(window.shape) == 1 else window.box.offset


def _incomplete(index: MetadataIndex, name: str, found: object) -> InvalidShardingError:
    finding = Finding(
        f"a ReadItem lacks a usable {name}",
        index.fqn,
        expected="storage_index, and for a tensor dest_offsets, storage_offsets and lengths of as "
        "many integers as the tensor has axes",
        found=found,
        remedy="Pass these by keyword.",
    )
    return InvalidShardingError("the plan of a planner cannot be used", [finding])


def _unplaced(
    kind: LoadItemType,
    index: MetadataIndex,
    name: str,
    offsets: Sequence[int] | None,
    lengths: Sequence[int] | None,
) -> Window:
    """A window whose array is not known yet."""
    if kind is LoadItemType.BYTE_IO:
        return NOWHERE
    try:
        box = Box(tuple(map(int, offsets or ())), tuple(map(int, lengths or ())))
    except (TypeError, ValueError):
        raise _incomplete(index, name, (offsets, lengths)) from None
    if offsets is None or lengths is None or len(box.offset) != len(box.shape):
        raise _incomplete(index, name, (offsets, lengths))
    return Window(0, (), box)


def placed_items(
    items: Sequence[ReadItem], index: Index, leaves: Sequence[ShardedBase]
) -> tuple[list[ReadItem], list[Finding]]:
    """Items with everything that is not known of them yet, and what the checkpoint has not."""
    placed: list[ReadItem] = []
    findings: list[Finding] = []
    for item in items:
        try:
            placed.append(item if item.is_placed else _placed(item, index, leaves))
        except InvalidShardingError as error:
            findings += error.findings
    return placed, findings


def _placed(item: ReadItem, index: Index, leaves: Sequence[ShardedBase]) -> ReadItem:
    source = _source(item.dest_index, leaves)
    dest_index = replace(item.dest_index, index=source)
    stored, key = item.storage_index, item.storage_index.fqn
    if item.type is LoadItemType.BYTE_IO:
        if key not in index.objects:
            raise _misplaced("not in the checkpoint", key)
        cell = tuple(stored.offset or (0,) * len(index.objects[key]))
        return replace(item, dest_index=dest_index, storage_index=MetadataIndex(key, cell))
    if key not in index:
        raise _misplaced("not in the checkpoint", key)
    number, shape = _chunk(stored, index[key])
    storage = _window(item.storage.box, shape, key, "the stored chunk")
    leaf = leaves[source] if source is not None and 0 <= source < len(leaves) else None
    if isinstance(leaf, ShardedTensor):
        flat = leaf.flat_range
        own = leaf.box.shape if flat is None else (flat[1] - flat[0],)
        dest = _window(item.dest.box, own, leaf.key, "the shard to fill")
    else:  # where it goes, only the planner knows
        dest = Window(0, item.dest.box.stop, item.dest.box)
    storage_index = MetadataIndex(key, stored.offset or (0,) * len(shape), number)
    return ReadItem(item.type, dest_index, dest, storage_index, storage)


def _source(wanted: MetadataIndex, leaves: Sequence[ShardedBase]) -> int | None:
    """Which leaf an index means; None if it is none of these."""

    def is_it(leaf: ShardedBase) -> bool:
        if leaf.key != wanted.fqn or not isinstance(leaf, ShardedTensor | ShardedObject):
            return False
        return wanted.offset is None or tuple(wanted.offset) == tuple(leaf.global_offset)

    hint = wanted.index
    if hint is not None and 0 <= hint < len(leaves) and is_it(leaves[hint]):
        return hint
    return next((source for source, leaf in enumerate(leaves) if is_it(leaf)), hint)


def _chunk(chunk: MetadataIndex, tensor: StoredTensor) -> tuple[int | None, Ints]:
    """The number of the piece that an index means, None on a grid, and the shape of its array."""
    offset = tuple(chunk.offset or (0,) * len(tensor.global_shape))
    if tensor.pieces is None:
        grid = tensor.grid
        if Box.whole(tensor.global_shape).contains(Box(offset, (0,) * len(offset))) and not any(
            o % n for o, n in zip(offset, grid.chunk_shape, strict=True)
        ):
            return None, grid.chunk_shape
        begins: object = f"a multiple of {grid.chunk_shape} in {tensor.global_shape}"
    else:
        offsets = [box.offset for box, _ in tensor.pieces]
        hint = chunk.index
        if hint is None or not 0 <= hint < len(offsets) or offsets[hint] != offset:
            hint = offsets.index(offset) if offset in offsets else None
        if hint is not None:
            box, flat = tensor.pieces[hint]
            return hint, box.shape if flat is None else (flat[1] - flat[0],)
        begins = f"one of {sorted(set(offsets))[:16]}"
    raise _misplaced("no stored chunk begins here", chunk.fqn, begins, offset)


def _window(box: Box, shape: Ints, key: str, what: str) -> Window:
    if len(box.shape) != len(shape) or not Box.whole(shape).contains(box):
        problem = f"the box of a ReadItem is not inside {what}"
        raise _misplaced(problem, key, f"inside {shape}", str(box))
    return Window(0, shape, box)


def _misplaced(
    problem: str, key: str, expected: object = None, found: object = None
) -> InvalidShardingError:
    remedy = "Compare storage_index and dest_index with what configure_planner was given."
    finding = Finding(problem, key, expected, found, remedy=remedy)
    return InvalidShardingError("the plan cannot be read", [finding])

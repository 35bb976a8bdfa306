"""The contents of a map: the tensors, their chunks, and which rank wrote each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.format.checksums import StoredPart, read_checksums
from dist_checkpointing.format.geometry import Box, Ints, boxes_of_part, ravel_offset
from dist_checkpointing.format.index import StoredTensor

_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")

Writers = tuple[int, ...]
"""The ranks that wrote a chunk, in order; empty if they were not recorded."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor and how it is stored.

    Attributes:
        key: Key of the tensor.
        dtype: Name of its element type.
        itemsize: Bytes of an element.
        shape: Global shape.
        chunk_shape: Shape of a chunk; None if it is stored as pieces.
        pieces: Boxes of each piece; a flattened range has several.
        writers: Ranks that wrote each chunk, in C order, or each piece.
    """

    key: str
    dtype: str
    itemsize: int
    shape: Ints
    chunk_shape: Ints | None
    pieces: tuple[tuple[Box, ...], ...]
    writers: tuple[Writers, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).num_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class CheckpointMap:
    """What a page shows.

    Attributes:
        name: The last two folders of the path of the checkpoint.
        backend: Name and version of the backend, as text.
        tensors: The tensors, sorted by key.
    """

    name: str
    backend: str
    tensors: tuple[MappedTensor, ...]


def checkpoint_map(checkpoint: Checkpoint, keys: Iterable[str] | None = None) -> CheckpointMap:
    """The map of some tensors, by default of all.

    Raises:
        KeyError: for a key that the checkpoint does not hold.
        CorruptCheckpointError: if the tables of checksums, which name the writers, are damaged.
    """
    wanted = [checkpoint[key].key for key in (checkpoint if keys is None else keys)]
    index = checkpoint.index
    parts: dict[str, list[StoredPart]] = {key: [] for key in wanted}
    for part in read_checksums(checkpoint.folder):
        if part.key in parts:
            parts[part.key].append(part)
    silent = [key for key in wanted if not parts[key]]
    by_file = _by_file_name(checkpoint, silent) if silent else {}
    tensors = []
    for key in sorted(wanted):
        stored = index[key]
        writers = by_file[key] if key in by_file else _by_checksums(stored, parts[key])
        tensors.append(
            MappedTensor(
                key,
                stored.dtype.name,
                stored.dtype.itemsize,
                stored.global_shape,
                stored.chunk_shape,
                tuple(_piece_boxes(stored)),
                tuple(writers),
            )
        )
    backend, version = checkpoint.backend
    path = checkpoint.path.absolute()
    return CheckpointMap(f"{path.parent.name}/{path.name}", f"{backend} {version}", tuple(tensors))


def _piece_boxes(stored: StoredTensor) -> Iterator[tuple[Box, ...]]:
    for box, flat in stored.pieces or ():
        yield tuple(boxes_of_part(box, flat))


def _by_checksums(stored: StoredTensor, parts: Sequence[StoredPart]) -> list[Writers]:
    if stored.pieces is not None:
        return _of_pieces(stored, parts)
    grid = stored.grid
    found: list[set[int]] = [set() for _ in itertools.product(*map(range, grid.counts))]
    for part in parts:
        for box in boxes_of_part(part.box, part.flat_range):
            for chunk, _ in grid.intersecting(box):
                found[ravel_offset(chunk, grid.counts)].add(_rank(part))
    return [tuple(sorted(ranks)) for ranks in found]


def _rank(part: StoredPart) -> int:
    assert part.rank is not None, "it is read from the file of a rank"
    return part.rank


def _of_pieces(stored: StoredTensor, parts: Sequence[StoredPart]) -> list[Writers]:
    assert stored.pieces is not None
    exact: dict[tuple[Box, tuple[int, int] | None], set[int]] = {}
    for part in parts:
        exact.setdefault((part.box, part.flat_range), set()).add(_rank(part))
    writers = []
    for box, flat in stored.pieces:
        ranks = exact.get((box, flat))
        if ranks is None:
            # The format may have cut the piece into smaller boxes.
            own = boxes_of_part(box, flat)
            ranks = {
                _rank(part)
                for part in parts
                if any(
                    a.intersect(b) is not None
                    for a in own
                    for b in boxes_of_part(part.box, part.flat_range)
                )
            }
        writers.append(tuple(sorted(ranks)))
    return writers


def _by_file_name(checkpoint: Checkpoint, keys: Sequence[str]) -> Mapping[str, list[Writers]]:
    """The writers according to the names of torch DCP's files: each rank writes its own files."""
    if checkpoint.backend[0] != "torch_dist":
        return {}
    # Imported here, because it imports torch.
    from dist_checkpointing.planning import MetadataIndex  # noqa: PLC0415

    chunks: list[MetadataIndex] = []
    counts = []
    for key in keys:
        stored = checkpoint.index[key]
        before = len(chunks)
        if stored.pieces is not None:
            rows = enumerate(stored.pieces)
            chunks += [MetadataIndex(key, box.offset, row) for row, (box, _) in rows]
        else:
            chunks += [MetadataIndex(key, chunk.box.offset) for chunk in checkpoint[key].chunks]
        counts.append(len(chunks) - before)
    files = iter(checkpoint.reads.files(checkpoint.index, chunks))
    return {
        key: [_rank_in(file) for file in itertools.islice(files, count)]
        for key, count in zip(keys, counts, strict=True)
    }


def _rank_in(file: str | None) -> Writers:
    match = None if file is None else _DCP_FILE.fullmatch(file)
    return () if match is None else (int(match[1]),)

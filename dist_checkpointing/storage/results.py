"""What a writer tells of what it has written, and what its ``finish`` learns of all ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import numpy.typing as npt

from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import MetadataIndex, SavePlan
from dist_checkpointing.planning.shard_table import Bools, Int64s, ShardTable


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a writer did with one item.

    Attributes:
        index: Index of the item. ``finish`` gets the index by which a reader asks for the stored
            chunk.
        size_in_bytes: Bytes stored.
        storage_data: Data for the writer's own ``finish``.
        checksum: Checksum of the item's values, see ``checksums``; None for none.
        files: Files that the writer made for the item, with their final sizes. What is not
            reported here rank 0 looks for itself before the commit.
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: object = None
    checksum: int | None = None
    files: tuple[SealedFile, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class WriteResults(Sequence[WriteResult]):
    """What a writer did with all rows of a plan, as columns.

    As a sequence it has a result for each row, in order, made when asked for, and one more behind
    them if there are ``storage_data`` or ``files``.

    Attributes:
        table: The rows.
        num_bytes: ``[rows]``, bytes stored.
        checksums: ``[rows]`` as uint64, see ``WriteResult``; None if no row has one.
        checked: ``[rows]``, which rows have a checksum; None if all have.
        files: Files that the writer made, with their final sizes.
        storage_data: For the writer's own ``finish``, about all rows together.
        uppers: ``[rows]`` as uint64, the upper halves of the 128-bit digests whose lower halves are
            the checksums; None if the writer does not know them.
    """

    table: ShardTable
    num_bytes: Int64s
    checksums: npt.NDArray[np.uint64] | None = None
    checked: Bools | None = None
    files: tuple[SealedFile, ...] = ()
    storage_data: object = None
    uppers: npt.NDArray[np.uint64] | None = None

    @property
    def has_rest(self) -> bool:
        """Whether there is one more result behind those of the rows."""
        return self.storage_data is not None or bool(self.files)

    def __len__(self) -> int:
        return len(self.table) + self.has_rest

    @overload
    def __getitem__(self, row: int) -> WriteResult: ...
    @overload
    def __getitem__(self, row: slice) -> list[WriteResult]: ...
    def __getitem__(self, row: int | slice) -> WriteResult | list[WriteResult]:
        if isinstance(row, slice):
            return [self[position] for position in range(len(self))[row]]
        row = range(len(self))[row]
        if row == len(self.table):
            return self.rest
        checksum = None
        if self.checksums is not None and (self.checked is None or self.checked[row]):
            checksum = int(self.checksums[row])
        index = MetadataIndex(
            self.table.key(row), self.table.box(row).offset, int(self.table.sources[row])
        )
        return WriteResult(index, int(self.num_bytes[row]), None, checksum)

    @property
    def rest(self) -> WriteResult:
        """The result behind those of the rows."""
        num_bytes = int(self.num_bytes.sum())
        return WriteResult(MetadataIndex(""), num_bytes, self.storage_data, None, self.files)


def results_for_finish(results: Sequence[WriteResult], plan: SavePlan) -> tuple[WriteResult, ...]:
    """The results of one rank, each under the index by which a reader asks for the chunk.

    Of columns it is only the result that concerns all rows, if it says anything.

    Args:
        results: what ``write_data`` gave, in any order.
        plan: what was written.
    """
    if isinstance(results, WriteResults):
        rest = results.rest
        return () if rest.storage_data is None else (replace(rest, files=()),)
    # Parts of one flattened range have the same index in a plan, and different ones as stored.
    stored: dict[MetadataIndex, deque[MetadataIndex]] = defaultdict(deque)
    if results:
        for item, index in zip(plan.items, _stored_indices(plan), strict=True):
            stored[item.index].append(index)
    noted = []
    for result in results:
        known = stored.get(result.index)
        index = known.popleft() if known else result.index
        noted.append(replace(result, index=index, files=()))
    return tuple(noted)


def _stored_indices(plan: SavePlan) -> list[MetadataIndex]:
    table, pieces = plan.table, {} if plan.index is None else plan.index.pieces
    numbers = {
        key: {piece: number for number, piece in enumerate(pieces[key])}
        for key in set(table.key_column)
        if key in pieces
    }
    indices = []
    for row in range(len(table)):
        key, box = table.key(row), table.box(row)
        number = numbers[key].get((box, table.flat_range(row))) if key in numbers else None
        indices.append(MetadataIndex(key, box.offset, number))
    return indices

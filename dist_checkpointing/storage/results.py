"""What a writer's ``finish`` learns of what every rank has written."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from dist_checkpointing.planning import MetadataIndex, SavePlan
from dist_checkpointing.storage.protocol import WriteResult, WriteResults


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

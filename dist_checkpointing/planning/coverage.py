"""Whether shards make up each global tensor exactly once. Pure functions of tables."""

from __future__ import annotations

import itertools

import numpy as np

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.planning.key_groups import KeyGroups
from dist_checkpointing.planning.shard_table import OBJECT, Bools, Int32s, ShardTable
from dist_checkpointing.planning.tiling import miscounted_parts

_MAX_NAMED_RANKS = 16


_MAX_NAMED_PARTS = 4


def _ranks(ranks: Int32s) -> tuple[int, ...]:
    return tuple(np.unique(ranks)[:_MAX_NAMED_RANKS].tolist())


def check_coverage(catalog: ShardTable, written: ShardTable) -> None:
    """Raise one error with everything ``find_coverage_problems`` finds.

    Raises:
        InvalidShardingError: if there is any finding.
    """
    findings = find_coverage_problems(catalog, written)
    if findings:
        message = (
            "Invalid access pattern: the shards do not make up each global tensor exactly once"
        )
        raise InvalidShardingError(message, findings)


def check_agreement(catalog: ShardTable) -> None:
    """Raise, with everything else that is wrong, if ranks disagree on what a key is.

    Until they agree nothing can be laid out.

    Raises:
        InvalidShardingError: if dtype, kind or global shape of a key differ, or a shard is outside.
    """
    groups = KeyGroups(catalog, np.ones(len(catalog), dtype=np.bool_))
    findings, _ = _find_disagreements(groups)
    if findings:
        check_coverage(catalog, catalog.take(catalog.main & (catalog.num_elements > 0)))


def find_coverage_problems(catalog: ShardTable, written: ShardTable) -> list[Finding]:
    """Whether all ranks agree on every key, and every element is written exactly once.

    Args:
        catalog: the shards of all ranks, replicas included, sorted by key.
        written: those that are written, sorted by key.
    """
    groups = KeyGroups(catalog, np.ones(len(catalog), dtype=np.bool_))
    findings, broken = _find_disagreements(groups)
    writers = KeyGroups(written, written.num_elements > 0)
    written_keys = [written.names[k] for k in written.keys[writers.starts]]
    covered = writers.is_covered_grid
    suspects = [
        (key, int(group))
        for group, key in enumerate(written_keys)
        if not covered[group] and key not in broken
    ]
    for key, group in suspects:
        rows = writers.rows(group)
        findings += _find_gaps_and_overlaps(key, written.take(rows[writers.counted[rows]]))
    known = set(written_keys) | broken
    for start in groups.starts[groups.global_shapes.prod(axis=1) > 0].tolist():
        key = catalog.key(start)
        if key not in known:
            rows = groups.rows(int(groups.of_row[start]))
            findings.append(
                Finding(
                    "no rank writes it: no shard is a main replica",
                    key,
                    ranks=_ranks(catalog.ranks[rows]),
                    remedy="Exactly one holder of each shard needs replica_id 0.",
                )
            )
    return findings


def _find_disagreements(groups: KeyGroups) -> tuple[list[Finding], set[str]]:
    """Keys on whose dtype, kind or global shape the ranks differ, and shards out of bounds."""
    table = groups.table
    first = groups.starts[groups.of_row]
    findings: list[Finding] = []
    broken: set[str] = set()
    columns: list[tuple[str, Bools]] = [
        ("dtype", table.dtypes != table.dtypes[first]),
        ("number of axes", table.ndim != table.ndim[first]),
        ("global shape", (table.global_shapes != table.global_shapes[first]).any(axis=1)),
    ]
    for what, differs in columns:
        for row in _first_of_each_key(table, differs):
            key, reference = table.key(row), int(first[row])
            if key in broken:
                continue
            broken.add(key)
            texts = [_seen(table, r, what) for r in (reference, row)]
            kinds = {table.dtype(r) == OBJECT for r in (reference, row)}
            aspect = "kind (tensor or object)" if len(kinds) == 2 else what
            rows = np.flatnonzero(differs & (table.keys == table.keys[row]))
            findings.append(
                Finding(
                    f"the {aspect} of one key must be the same everywhere",
                    key,
                    expected=f"{texts[0]} as on rank {table.ranks[reference]}",
                    found=texts[1],
                    ranks=_ranks(table.ranks[rows]),
                )
            )
    outside = np.any(table.offsets + table.shapes > table.global_shapes, axis=1)
    for row in _first_of_each_key(table, outside):
        key = table.key(row)
        if key in broken:
            continue
        broken.add(key)
        box = table.box(row)
        findings.append(
            Finding(
                "the shard sticks out of the global tensor",
                key,
                expected=f"inside {table.global_shape(row)}",
                found=f"{box.offset} .. {box.stop}",
                ranks=(int(table.ranks[row]),),
            )
        )
    return findings, broken


def _seen(table: ShardTable, row: int, what: str) -> str:
    if what == "dtype":
        return "ShardedObject" if table.dtype(row) == OBJECT else table.dtype(row)
    return str(table.global_shape(row))


def _first_of_each_key(table: ShardTable, mask: Bools) -> list[int]:
    rows = np.flatnonzero(mask)
    _, first = np.unique(table.keys[rows], return_index=True)
    chosen: list[int] = rows[first].tolist()
    return chosen


def _find_gaps_and_overlaps(key: str, rows: ShardTable) -> list[Finding]:
    if not len(rows):
        return [
            Finding(
                "no rank writes any of it: all main replicas are empty",
                key,
                remedy="Exactly one holder of each shard needs replica_id 0.",
            )
        ]
    findings, boxes, ranks = _merge_flat_ranges(key, rows)
    if findings:
        return findings
    shape = rows.global_shape(0)
    what = "shard" if rows.dtype(0) != OBJECT else "ShardedObject"
    for part in itertools.islice(miscounted_parts(shape, boxes), _MAX_NAMED_PARTS):
        box, count = part.box, len(part.holders)
        holders = sorted({ranks[row] for row in part.holders})
        problem = f"no {what} holds this part" if count == 0 else f"{count} {what}s hold this part"
        remedy = (
            "Every part needs one holder with replica_id 0."
            if count == 0
            else "Give all but one holder a replica_id that is not 0, or mend the offsets."
        )
        findings.append(
            Finding(
                problem,
                key,
                expected=f"one main replica in {shape}",
                found=f"{box.offset} .. {box.stop}",
                ranks=tuple(holders[:_MAX_NAMED_RANKS]),
                remedy=remedy,
            )
        )
    return findings


def _merge_flat_ranges(key: str, rows: ShardTable) -> tuple[list[Finding], list[Box], list[int]]:
    """The boxes that the rows make up: flattened ranges of one box count as that box, once."""
    ranges: dict[Box, list[tuple[int, int, int]]] = {}
    boxes: list[Box] = []
    ranks: list[int] = []
    for row in range(len(rows)):
        box, flat, rank = rows.box(row), rows.flat_range(row), int(rows.ranks[row])
        if flat is None:
            boxes.append(box)
            ranks.append(rank)
        else:
            ranges.setdefault(box, []).append((*flat, rank))
    findings = []
    for box, parts in ranges.items():
        boxes.append(box)
        ranks.append(parts[0][2])
        parts.sort()
        edges = [(0, 0, parts[0][2]), *parts, (box.num_elements, box.num_elements, parts[-1][2])]
        for (_, stop, rank), (start, _, other) in itertools.pairwise(edges):
            if start == stop:
                continue
            gap = start > stop
            findings.append(
                Finding(
                    "flattened ranges leave a gap" if gap else "flattened ranges overlap",
                    key,
                    expected=f"0:{box.num_elements} of the shard at {box.offset} in one chain",
                    found=f"{stop}:{start} is in none" if gap else f"{start}:{stop} is in two",
                    ranks=tuple(sorted({rank, other})),
                )
            )
    return findings, boxes, ranks

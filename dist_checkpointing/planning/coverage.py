"""Whether the shards of all ranks make up each global tensor exactly once: gaps, overlaps,
contradictions, with keys and ranks.

The cuts of all boxes divide the tensor into cells. There may be far too many to count
(two cuts on each of 30 axes make 2**30). Instead every axis gives each of its slabs a random
weight, and the weight of a cell is the product over the axes. The weights of all boxes then add up
to the weight of the tensor if every cell is in exactly one box. If any is not, both are different
polynomials of the weights, which agree by chance for less than one set of weights in 10**18
(Schwartz-Zippel lemma, with ``_TRIALS`` independent sets). What is wrong is found by halving.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints, changes
from dist_checkpointing.planning.shard_table import OBJECT, Bools, Int32s, Int64s, ShardTable

_PRIME: Final = 2**31 - 1
"""A product of two weights modulo this fits into 64 bits."""
_TRIALS: Final = 3


def miscounted_parts(shape: Ints, offsets: Int64s, shapes: Int64s) -> Iterator[tuple[Box, Ints]]:
    """The parts that are not in exactly one box, in C order, and the numbers of their boxes.

    No box is empty or sticks out. Takes ``len(boxes) * len(shape)`` steps to find out whether there
    is any, and a few times as many for each that is asked for.
    """
    boxes, stops = range(len(offsets)), offsets + shapes
    cuts = [
        np.unique(np.r_[0, extent, offsets[:, axis], stops[:, axis]])
        for axis, extent in enumerate(shape)
    ]
    random = np.random.default_rng(len(boxes))
    weights = [_summed(random.integers(1, _PRIME, (len(cut) - 1, _TRIALS))) for cut in cuts]
    # From here on everything is counted in cells.
    starts, ends = (
        np.array(
            [np.searchsorted(cut, edges[:, axis]) for axis, cut in enumerate(cuts)], dtype=np.int64
        ).reshape(len(shape), len(boxes))
        for edges in (offsets, stops)
    )
    first = np.zeros((len(shape), 1), dtype=np.int64)
    last = np.array([len(cut) - 1 for cut in cuts], dtype=np.int64).reshape(len(shape), 1)
    regions = [(first, last, np.arange(len(boxes)))]
    while regions:
        begin, end, rows = regions.pop()
        clipped = np.maximum(starts[:, rows], begin), np.minimum(ends[:, rows], end)
        inside = (clipped[0] < clipped[1]).all(axis=0)
        rows = rows[inside]
        held = _weight(weights, clipped[0][:, inside], clipped[1][:, inside])
        if np.array_equal(held, _weight(weights, begin, end)):
            continue
        divisible = np.flatnonzero((end - begin)[:, 0] > 1)
        if len(divisible):
            axis = divisible[0]
            upper, lower_end = begin.copy(), end.copy()
            upper[axis] = lower_end[axis] = (begin[axis] + end[axis]) // 2
            regions += [(upper, end, rows), (begin, lower_end, rows)]
            continue
        offset = tuple(int(cut[i]) for cut, i in zip(cuts, begin[:, 0], strict=True))
        stop = tuple(int(cut[i]) for cut, i in zip(cuts, end[:, 0], strict=True))
        part = Box(offset, tuple(b - a for a, b in zip(offset, stop, strict=True)))
        yield part, tuple(rows.tolist())


def _summed(weights: Int64s) -> Int64s:
    """Weight of everything before each cut, modulo the prime: ``[cuts, trials]``."""
    sums = np.zeros((len(weights) + 1, _TRIALS), dtype=np.int64)
    # A sum of 2**32 of them fits.
    sums[1:] = np.cumsum(weights, axis=0) % _PRIME
    return sums


def _weight(weights: Sequence[Int64s], starts: Int64s, ends: Int64s) -> Int64s:
    """Weight of some boxes together, given in cells as ``[axes, boxes]``: one a trial."""
    product = np.ones((starts.shape[1], _TRIALS), dtype=np.int64)
    for sums, start, end in zip(weights, starts, ends, strict=True):
        product = product * ((sums[end] - sums[start]) % _PRIME) % _PRIME
    total: Int64s = product.sum(axis=0) % _PRIME
    return total


_MAX_NAMED_RANKS = 16
_MAX_NAMED_PARTS = 4
_ONE_MAIN = "Exactly one holder of each shard needs replica_id 0."


def _named(ranks: Int32s) -> tuple[int, ...]:
    return tuple(ranks[:_MAX_NAMED_RANKS].tolist())


def main_rows(catalog: ShardTable) -> ShardTable:
    """The main replicas that have elements, sorted by key, with the ranks that hold them."""
    return catalog.take(catalog.main & (catalog.num_elements > 0)).of_ranks()


def check_coverage(catalog: ShardTable, written: ShardTable | None = None) -> None:
    """Raise one error with everything ``find_coverage_problems`` finds."""
    problem = "the shards do not make up each global tensor exactly once"
    findings = find_coverage_problems(catalog, written)
    InvalidShardingError.raise_if(findings, f"Invalid access pattern: {problem}")


def check_agreement(catalog: ShardTable) -> None:
    """Raise, with everything else that is wrong, if ranks disagree on what a key is.

    Until they agree nothing can be laid out.

    Raises:
        InvalidShardingError: if dtype, kind or global shape of a key differ, or a shard is outside.
    """
    if _find_disagreements(catalog)[0]:
        check_coverage(catalog)


def find_coverage_problems(catalog: ShardTable, written: ShardTable | None = None) -> list[Finding]:
    """Whether all ranks agree on every key, and every element is written exactly once.

    Both tables are sorted by key. The main replicas are written unless others are given.
    """
    if written is None:
        written = main_rows(catalog)
    findings, broken = _find_disagreements(catalog)
    # Flattened ranges that follow each other from end to end count as their box.
    merged, has_broken_chain = _merge_chains(written)
    numbers = merged.keys[merged.starts]
    for group in np.flatnonzero(~_is_covered_grid(merged) | has_broken_chain).tolist():
        number = int(numbers[group])
        key = written.names[number]
        if key in broken:
            continue
        table = written if has_broken_chain[group] else merged
        rows = table.take(table.rows_of(number))
        rows = rows.take(rows.num_elements > 0)
        find = _find_broken_chains if has_broken_chain[group] else _find_gaps_and_overlaps
        findings += find(key, rows)
    wanted = catalog.keys[catalog.starts]
    is_missing = catalog.global_shapes[catalog.starts].all(axis=1)
    if written.names is catalog.names:
        is_written = np.zeros(len(catalog.names), dtype=np.bool_)
        is_written[numbers] = True
        is_missing &= ~is_written[wanted]
    if is_missing.any():
        broken = broken.union(written.names[number] for number in numbers.tolist())
    for number in wanted[is_missing].tolist():
        key = catalog.names[number]
        if key not in broken:
            ranks = _named(catalog.ranks_of(catalog.rows_of(number)))
            problem = "no rank writes it: no shard is a main replica"
            findings.append(Finding(problem, key, ranks=ranks, remedy=_ONE_MAIN))
    return findings


def _is_covered_grid(table: ShardTable) -> Bools:
    """Per key of a sorted table: whether there is a grid and each chunk of it is held once."""
    groups, of_row = table.groups, table.groups.of_row
    counts = -(-groups.global_shapes // groups.chunk_shapes)
    num_chunks = counts.prod(axis=1)
    index = table.offsets // groups.chunk_shapes[of_row]
    chunk = np.zeros(len(table), dtype=np.int64)
    for axis in range(table.max_ndim):
        chunk = chunk * counts[of_row, axis] + index[:, axis]
    stops = num_chunks.cumsum()
    place = chunk + (stops - num_chunks)[of_row]
    place = place[groups.is_counted & groups.is_grid[of_row]]
    is_ascending = (place[1:] > place[:-1]).all()
    unique = place if is_ascending else np.unique(place)
    owner = stops.searchsorted(unique, side="right")
    distinct = np.bincount(owner, minlength=len(stops))[: len(stops)]
    is_covered: Bools = (groups.num_counted == num_chunks) & (distinct == num_chunks)
    return is_covered & groups.is_grid


def _find_disagreements(table: ShardTable) -> tuple[list[Finding], set[str]]:
    """Keys on whose dtype, kind or global shape the ranks differ, and shards out of bounds."""
    outside = table.offsets + table.shapes > table.global_shapes
    compared = (table.dtypes, table.ndim, *table.global_shapes.T)
    is_same = ~table.is_start[1:]
    differ = ((is_same & (column[1:] != column[:-1])).any() for column in compared)
    # Nearly always each row is as the one before of its key, which takes little time to see.
    is_alike = len(table.starts) == len(table) or not any(differ)
    if is_alike and not outside.any():
        return [], set()
    first = np.repeat(table.starts, np.diff(table.starts, append=len(table)))
    columns = {
        "dtype": table.dtypes != table.dtypes[first],
        "number of axes": table.ndim != table.ndim[first],
        "global shape": (table.global_shapes != table.global_shapes[first]).any(axis=1),
        "box": outside.any(axis=1),
    }
    found: dict[str, Finding] = {}
    for what, differs in columns.items():
        rows = np.flatnonzero(differs)
        for row in rows[np.unique(table.keys[rows], return_index=True)[1]].tolist():
            key, reference = table.key(row), int(first[row])
            if key in found:
                continue
            problem = f"the {what} of one key must be the same everywhere"
            expected, seen = str(table.global_shape(reference)), str(table.global_shape(row))
            ranks = table.ranks_of(differs & (table.keys == table.keys[row]))
            if what == "box":
                problem = "the shard sticks out of the global tensor"
                expected, seen = f"inside {seen}", str(table.box(row))
                ranks = table.ranks_of([row])[:1]
            else:
                if what == "dtype":
                    expected, seen = table.dtype(reference), table.dtype(row)
                    if OBJECT in (expected, seen):
                        problem = problem.replace(what, "kind (tensor or object)")
                        expected = expected.replace(OBJECT, "ShardedObject")
                        seen = seen.replace(OBJECT, "ShardedObject")
                expected += f" as on rank {table.ranks_of([reference])[0]}"
            found[key] = Finding(problem, key, expected, seen, _named(ranks))
    return [*found.values()], {*found}


def _find_gaps_and_overlaps(key: str, rows: ShardTable) -> list[Finding]:
    if not len(rows):
        problem = "no rank writes any of it: all main replicas are empty"
        return [Finding(problem, key, remedy=_ONE_MAIN)]
    findings = []
    shape = rows.global_shape(0)
    what = "shard" if rows.dtype(0) != OBJECT else "ShardedObject"
    ndim = len(shape)
    parts = miscounted_parts(shape, rows.offsets[:, :ndim], rows.shapes[:, :ndim])
    for box, holding in itertools.islice(parts, _MAX_NAMED_PARTS):
        problem = f"no {what} holds this part"
        remedy = "Every part needs one holder with replica_id 0."
        if holding:
            problem = f"{len(holding)} {what}s hold this part"
            remedy = "Give all but one holder a replica_id that is not 0, or mend the offsets."
        ranks = _named(rows.ranks_of(list(holding)))
        expected = f"one main replica in {shape}"
        findings.append(Finding(problem, key, expected, str(box), ranks, remedy=remedy))
    return findings


def _merge_chains(table: ShardTable) -> tuple[ShardTable, Bools]:
    """The table with one box for each chain of flattened ranges, and which keys have a broken one.

    The ranges of one box are a chain if, sorted, each begins where the one before ends, the first
    at the first element of the box, and the last ends at the last.
    """
    is_flat = (table.flat[:, 0] >= 0) & (table.num_elements > 0)
    if not is_flat.any():
        return table, np.zeros(len(table.starts), dtype=np.bool_)
    ranges = table.take(is_flat).sorted_by_box()
    begins = changes([ranges.keys, *ranges.offsets.T, *ranges.shapes.T])
    starts, stops = ranges.flat.T
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(ranges)) - 1
    boxes = ranges.take(firsts)
    is_gap = ~begins[1:] & (starts[1:] != stops[:-1])
    is_broken = (starts[firsts] != 0) | (stops[lasts] != boxes.shapes.prod(axis=1))
    is_broken |= np.logical_or.reduceat(np.append(False, is_gap), firsts)
    # Who is named for an overlap of boxes is the lowest rank that holds a part of the chain.
    boxes = replace(
        boxes,
        flat=np.full_like(boxes.flat, -1),
        ranks=np.minimum.reduceat(ranges.ranks, firsts),
    )
    merged = table.take(~is_flat).joined(boxes)
    merged = merged.take(np.argsort(merged.keys, kind="stable"))
    return merged, np.isin(merged.keys[merged.starts], boxes.keys[is_broken])


def _find_broken_chains(key: str, rows: ShardTable) -> list[Finding]:
    ranges: dict[Box, list[tuple[int, int, int]]] = {}
    for row in np.flatnonzero(rows.flat[:, 0] >= 0).tolist():
        start, stop = rows.flat[row].tolist()
        ranges.setdefault(rows.box(row), []).append((start, stop, int(rows.ranks[row])))
    findings = []
    for box, parts in ranges.items():
        parts.sort()
        edges = [(0, 0, parts[0][2]), *parts, (box.num_elements, box.num_elements, parts[-1][2])]
        for (_, stop, rank), (start, _, other) in itertools.pairwise(edges):
            if start == stop:
                continue
            problem, found = "flattened ranges overlap", f"{start}:{stop} is in two"
            if start > stop:
                problem, found = "flattened ranges leave a gap", f"{stop}:{start} is in none"
            expected = f"0:{box.num_elements} of the shard at {box.offset} in one chain"
            ranks = tuple(sorted({rank, other}))
            findings.append(Finding(problem, key, expected, found, ranks))
    return findings

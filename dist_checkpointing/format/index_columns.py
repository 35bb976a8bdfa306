"""Columns of the index as JSON, and back. What is read is checked, and wrong is a ValueError."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format.pieces import (
    MAX_AXES,
    MAX_EXTENT,
    Int64s,
    PieceColumns,
    Pieces,
    ints_from_json,
    rows_from_lists,
)


def json_text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def pieces_text(pieces: Mapping[str, Pieces]) -> str:
    """The pieces of all tensors as JSON. Columns of tensors that are cut alike become text once."""
    known: dict[tuple[bytes, tuple[int, ...]], str] = {}

    def text(column: Int64s) -> str:
        content = column.tobytes(), column.shape
        if content not in known:
            known[content] = _rows_text(column)
        return known[content]

    tables = (
        f'{json_text(key)}:{{"offsets":{text(table.offsets)},'
        f'"shapes":{text(table.shapes)},"flat":{text(table.flat)}}}'
        for key, table in pieces.items()
    )
    return f"{{{','.join(tables)}}}"


def _rows_text(rows: Int64s) -> str:
    """Rows of ints as JSON. Flattened pieces of one box have the same offset and shape."""
    if len(rows) > 1 and (rows == rows[0]).all():
        return f"[{','.join([json_text(rows[0].tolist())] * len(rows))}]"
    return json_text(rows.tolist())


def without_pieces(data: bytes) -> tuple[bytes, list[Pieces]]:
    """The text of an index with a number for each table of pieces, and the tables by number.

    Their lists are most of a large index. They become arrays without a Python object for each row,
    and what is the same for many tensors does so once.
    """
    rows = cache(_parsed_rows)

    @cache
    def table(columns: bytes) -> Pieces:
        offsets, rest = columns.split(b',"shapes":')
        return Pieces.checked(rows(offsets), *map(rows, rest.split(b',"flat":')))

    # A quotation mark in a string has a backslash before it, so that no key contains this.
    first, *texts = data.split(b'{"offsets":')
    parts, tables = [first], []
    for number, text in enumerate(texts):
        columns, _, rest = text.partition(b"}")
        tables.append(table(columns))
        parts += [b"%d" % number, rest]
    return b"".join(parts), tables


def _parsed_rows(text: bytes) -> Int64s:
    """Rows of ints of a JSON text: ``[rows, ints]``."""
    inner = text[2:-2]
    if inner.strip(b"[],") and b"[[%b]]" % inner == text:
        num_rows = inner.count(b"],[") + 1
        first = inner.partition(b"],[")[0]
        if num_rows > 1 and inner == b"],[".join([first] * num_rows):
            return _parsed_rows(b"[[%b]]" % first).repeat(num_rows, axis=0)
        numbers = local_folder.parse_json(b"[%b]" % inner.replace(b"],[", b","))
        width = len(numbers) // num_rows
        # All rows have so many numbers, and nothing is in them but digits.
        bare = b"],[".join([b"," * (width - 1)] * num_rows)
        if width <= MAX_AXES and inner.translate(None, b"-0123456789") == bare:
            return np.array(numbers, dtype=np.int64).reshape(num_rows, width)
    return rows_from_lists(local_folder.parse_json(text))


def pieces_of_json(content: Any, tables: Sequence[Pieces]) -> PieceColumns:
    """The pieces of all tensors, of what ``without_pieces`` has left and found."""
    if not isinstance(content, dict) or [*content.values()] != [*range(len(tables))]:
        raise ValueError("expected pieces by key")
    return PieceColumns.of(dict(zip(content, tables, strict=True)))


def strings(values: Any) -> list[str]:
    """A list of strings, checked."""
    if not isinstance(values, list) or not {str}.issuperset(map(type, values)):
        raise ValueError("expected a list of strings")
    return values


def shapes(keys: Sequence[str], column: Any, *, optional: bool = False) -> list[Any]:
    """A column of shapes, one a key; None stays if it is optional."""
    if not isinstance(column, list) or len(column) != len(keys):
        raise ValueError("columns of different length")
    given = [shape for shape in column if shape is not None] if optional else column
    if not _are_extents(given):
        for key, shape in zip(keys, column, strict=True):
            if shape is not None or not optional:
                extents(key, shape)
    rows = [None if shape is None else tuple(shape) for shape in column]
    # Many tensors have few shapes: equal ones are one object.
    known: dict[Any, Any] = {}
    return list(map(known.setdefault, rows, rows))


def _are_extents(shapes: list[Any]) -> bool:
    """Whether all are lists of extents, which takes a look at each number but no Python for it."""
    if not {list}.issuperset(map(type, shapes)):
        return False
    numbers = [*itertools.chain.from_iterable(shapes)]
    return (
        {int}.issuperset(map(type, numbers))
        and min(numbers, default=0) >= 0
        and max(numbers, default=0) < MAX_EXTENT
        and max(map(len, shapes), default=0) <= MAX_AXES
    )


def extents(key: str, shape: Any) -> list[int]:
    """The shape of one key, checked."""
    try:
        return ints_from_json(shape)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


def optional_string(value: Any) -> str | None:
    """A string or None, checked."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"expected a string, found {value!r}")
    return value


_is_fingerprint = re.compile("[0-9a-f]{32}").fullmatch


def fingerprints_of_json(keys: Sequence[str], content: Any) -> dict[str, str]:
    """The fingerprints by key; older writers, and saves without them, have none."""
    if content is None:
        return {}
    if not isinstance(content, list) or len(content) != len(keys):
        raise ValueError("fingerprints are not a column of their own length")
    known = {key: text for key, text in zip(keys, content, strict=True) if text is not None}
    if not all(isinstance(text, str) and _is_fingerprint(text) for text in known.values()):
        raise ValueError("a fingerprint is not 32 hex digits")
    return known

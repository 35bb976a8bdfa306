"""Columns of the index as JSON, and back. What is read is checked, and wrong is a ValueError."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from dist_checkpointing.format.pieces import (
    MAX_AXES,
    MAX_EXTENT,
    Int64s,
    PieceColumns,
    Pieces,
    ints_from_json,
)


def json_text(value: object) -> str:
    """A value as short JSON."""
    return json.dumps(value, separators=(",", ":"))


def pieces_text(pieces: Pieces) -> str:
    """The pieces of a tensor as JSON."""
    columns = {"offsets": pieces.offsets, "shapes": pieces.shapes, "flat": pieces.flat}
    return f"{{{','.join(f'{json_text(name)}:{_rows_text(c)}' for name, c in columns.items())}}}"


def _rows_text(rows: Int64s) -> str:
    """Rows of ints as JSON. Flattened pieces of one box have the same offset and shape."""
    if len(rows) > 1 and (rows == rows[0]).all():
        return f"[{','.join([json_text(rows[0].tolist())] * len(rows))}]"
    return json_text(rows.tolist())


def pieces_or_dict(content: dict[str, Any]) -> Any:
    """An object of the JSON text; pieces at once, because their lists take much more memory."""
    if content.keys() == {"offsets", "shapes", "flat"}:
        return Pieces.from_lists(content["offsets"], content["shapes"], content["flat"])
    return content


def pieces_of_json(content: Any) -> PieceColumns:
    """The pieces of all tensors, of what ``pieces_or_dict`` has made."""
    if not isinstance(content, dict) or not {Pieces}.issuperset(map(type, content.values())):
        raise ValueError("expected pieces by key")
    return PieceColumns.of(content)


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

"""``dckpt diff``: shows what differs between two checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dist_checkpointing.byte_sizes import parse_bytes
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import hint
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.tools.cli.screen import (
    AsJson,
    CheckpointArgument,
    Regex,
    Trusted,
    counted,
    in_columns,
    one_line,
    painted,
    print_json,
    progress_bar,
    say,
    terminal_width,
)
from dist_checkpointing.tools.inspect.listing import name_filter, shape_text
from dist_checkpointing.tools.inspect.opening import open_tensors

if TYPE_CHECKING:
    from dist_checkpointing.tools.inspect.comparison import (
        Comparison,
        TensorComparison,
        ValueComparison,
    )

EXIT_DIFFERENT = 1
_MOST_LISTED = 50
_HEADERS = ("KEY", "MOVED BY", "DIFFERING", "MAX ABS", "MAX REL", "FIRST AT", "VALUES")
_NARROW = 106


def diff(
    first: CheckpointArgument,
    second: Annotated[
        Path, typer.Argument(parser=as_location, help="The checkpoint to compare it with.")
    ],
    pattern: Annotated[
        str | None,
        typer.Argument(help="Only these keys, as in dckpt ls: a glob or a part of the key."),
    ] = None,
    *,
    rtol: Annotated[float, typer.Option(help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(help="Absolute tolerance.")] = 0.0,
    equal_nan: Annotated[bool, typer.Option("--equal-nan", help="NaN is the same as NaN.")] = False,
    ignore_dtype: Annotated[
        bool, typer.Option("--ignore-dtype", help="Compare the values of different dtypes.")
    ] = False,
    regex: Regex = False,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that this process may take in all.")
    ] = "2GiB",
    read_all: Annotated[
        bool,
        typer.Option(
            "--read-all", help="Read also tensors that have the same fingerprint in both."
        ),
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print only the counts, in one line.")
    ] = False,
    trusted: Trusted = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing; only set the exit code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the contents of two checkpoints of any backend and sharding.

    Two numbers are the same if |a - b| <= atol + rtol * |b|. Sharded
    objects and common state are compared too. Tensors that have the same
    fingerprint in both (see --fingerprint of dckpt ls) are not read: they are
    the same bit for bit, NaN included.

    Tensors that changed most come first: MOVED BY is the L2 norm of the
    change divided by the norm before. Single numbers of an optimizer, such as
    counts of steps, are listed only if PATTERN selects them, and in --json.

    Exit code: 0 if they are the same, 1 if they differ, 2 if they cannot
    be compared. Also opens safetensors (a file or a folder), files of
    torch.save and DeepSpeed checkpoints, and compares what these can hold.

    Example: dckpt diff ckpt/1000 converted --rtol 1e-3
    """
    # These import torch.
    from dist_checkpointing.storage.options import ReadMode, StorageOptions  # noqa: PLC0415
    from dist_checkpointing.tools.convert.plan import budget_of  # noqa: PLC0415
    from dist_checkpointing.tools.inspect.comparison import (  # noqa: PLC0415
        Tolerance,
        compare_checkpoints,
    )

    wanted = name_filter(pattern, regex=regex)
    tolerance = Tolerance(rtol=rtol, atol=atol, equal_nan=equal_nan)
    a = open_tensors(first, trusted=trusted)
    b = open_tensors(second, trusted=trusted)
    if pattern is not None and not any(wanted(key) for opened in (a, b) for key in _names(opened)):
        raise LookupError(
            f"neither checkpoint has a key that matches {pattern!r}{hint(pattern, a)}"
        )
    budget = budget_of(parse_bytes(memory))
    for opened in (a, b):
        if opened.backend[0] not in ("safetensors", "torch"):
            # Pages of a mapped file would count as memory in use.
            opened.reads.options = StorageOptions(read_mode=ReadMode.PREAD)
    num_bytes = sum(tensor.num_bytes for key, tensor in a.items() if wanted(key) and key in b)
    with progress_bar("comparing", num_bytes) as bar:
        found = compare_checkpoints(
            a,
            b,
            tolerance=tolerance,
            wanted=wanted,
            ignore_dtype=ignore_dtype,
            memory_bytes=budget.buffer_bytes,
            report=bar.advance,
            read_all=read_all,
        )
    if as_json:
        print_json(_as_json(a, b, found, summary=summary))
    elif summary and not quiet:
        say(_verdict(found))
    elif not quiet:
        for line in _lines(a, b, found, with_counters=pattern is not None):
            say(line)
    if not found.is_same:
        raise typer.Exit(EXIT_DIFFERENT)


def _names(opened: Checkpoint) -> Iterator[str]:
    from dist_checkpointing.tools.inspect import plain_state  # noqa: PLC0415 - imports torch

    yield from opened
    yield from opened.objects
    yield from plain_state.entries(opened.common)


def _lines(
    a: Checkpoint, b: Checkpoint, found: Comparison, *, with_counters: bool
) -> Iterator[str]:
    for sign, opened, keys in (("-", a, found.only_first), ("+", b, found.only_second)):
        if keys:
            yield painted(f"only in {one_line(str(opened.path))}", "bold")
            for key in keys[:_MOST_LISTED]:
                facts = f"{shape_text(opened[key].shape)} {opened[key].dtype_name}"
                yield painted(f"{sign} {one_line(key)}  {facts}", "red" if sign == "-" else "green")
            yield from _more(keys)
            yield ""
    kinds = [row for row in found.differing if row.values is None or row.dtypes[0] != row.dtypes[1]]
    if kinds:
        yield painted("other shape or dtype", "bold")
        pairs = [(one_line(row.key), _kind(row, 0), _kind(row, 1)) for row in kinds[:_MOST_LISTED]]
        yield from in_columns(("KEY", "FIRST", "SECOND"), pairs)
        yield from _more(kinds)
        yield ""
    values = [row for row in found.differing if row.values and row.values.num_differing]
    shown = [row for row in values if with_counters or not row.is_counter]
    if shown:
        yield painted("other values", "bold")
        rows = [_value_row(row) for row in shown[:_MOST_LISTED]]
        headers: tuple[str, ...] = _HEADERS
        if (terminal_width() or _NARROW) < _NARROW:
            headers, rows = headers[:5], [_narrowed(row) for row in rows]
        yield from in_columns(headers, rows, right=[1, 2, 3, 4])
        yield from _more(shown)
        yield ""
    if len(shown) < len(values):
        number = counted(len(values) - len(shown), "optimizer counter")
        yield painted(f"not listed: {number} (a PATTERN or --json lists them)", "dim")
    for title, entries in (("sharded objects", found.objects), ("common state", found.common)):
        if entries:
            yield painted(title, "bold")
            for entry in entries[:_MOST_LISTED]:
                yield from _entry_lines(entry)
            yield from _more(entries)
            yield ""
    if found.left_out is not None:
        yield painted(f"not compared: {found.left_out}", "dim")
    yield _verdict(found)


def _verdict(found: Comparison) -> str:
    compared = counted(len(found.tensors), "tensor")
    if found.is_same:
        known = found.num_by_fingerprint
        compared += f" ({known:,} by fingerprint)" if known else ""
        others = "" if found.left_out else ", objects and common state"
        return painted(f"the same: {compared}{others}", "green")
    counts = [
        (len(found.differing), f"of {compared} differing"),
        (len(found.only_first), "only in the first"),
        (len(found.only_second), "only in the second"),
        (len(found.objects), "in the sharded objects"),
        (len(found.common), "in the common state"),
    ]
    text = ", ".join(f"{number:,} {what}" for number, what in counts if number)
    return painted(f"differences: {text}", "red")


def _kind(row: TensorComparison, side: int) -> str:
    return f"{shape_text(row.shapes[side])} {row.dtypes[side]}"


def _value_row(row: TensorComparison) -> tuple[str, ...]:
    values = row.values
    assert values is not None
    assert values.first_index is not None
    assert values.first_values is not None
    share = f"{values.num_differing:,} of {values.num_compared:,}"
    index = f"[{','.join(map(str, values.first_index))}]"
    pair = " ".join(_number(value) for value in values.first_values)
    return (
        one_line(row.key),
        _percent(values.relative_change),
        share,
        # If only NaN differ, there is no distance.
        f"{values.max_abs:.3g}" if values.max_abs else "nan",
        f"{values.max_rel:.3g}" if values.max_abs else "nan",
        index,
        pair,
    )


def _narrowed(row: tuple[str, ...]) -> tuple[str, ...]:
    """The columns for a narrow terminal, without the number of all elements."""
    return (*row[:2], row[2].partition(" ")[0], *row[3:5])


def _percent(share: float) -> str:
    if math.isfinite(share):
        return f"{100 * share:.3g}%"
    return "nan" if math.isnan(share) else "from 0"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _entry_lines(entry: ValueComparison) -> Iterator[str]:
    name = one_line(entry.name)
    for sign, text, style in (("-", entry.texts[0], "red"), ("+", entry.texts[1], "green")):
        if text is not None:
            yield painted(f"{sign} {name} = {one_line(text)}", style)


def _more(rows: Sequence[object]) -> Iterator[str]:
    if len(rows) > _MOST_LISTED:
        yield painted(f"... {len(rows) - _MOST_LISTED:,} more (--json lists all)", "dim")


def _as_json(a: Checkpoint, b: Checkpoint, found: Comparison, *, summary: bool) -> dict[str, Any]:
    counts = {
        "first": str(a.path),
        "second": str(b.path),
        "is_same": found.is_same,
        "num_compared": len(found.tensors),
        "num_by_fingerprint": found.num_by_fingerprint,
        "num_differing": len(found.differing),
        "num_only_first": len(found.only_first),
        "num_only_second": len(found.only_second),
        "num_objects": len(found.objects),
        "num_common": len(found.common),
        "not_compared": found.left_out,
    }
    if summary:
        return counts
    return counts | {
        "only_first": found.only_first,
        "only_second": found.only_second,
        "tensors": [dataclasses.asdict(row) for row in found.differing],
        "objects": [dataclasses.asdict(row) for row in found.objects],
        "common": [dataclasses.asdict(row) for row in found.common],
    }

"""``dckpt plan``: shows what a load would cost on many ranks, without loading."""

from __future__ import annotations

import dataclasses
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.index import Index
from dist_checkpointing.tools.cli.screen import (
    AsJson,
    CheckpointArgument,
    counted,
    facts_lines,
    in_columns,
    one_line,
    painted,
    print_json,
    same_for_all_layers,
    say,
    say_wrapped,
    terminal_width,
)
from dist_checkpointing.tools.forecast.topology import (
    KeyCut,
    Reason,
    cut_keys,
    guessed_rules,
    parse_rule,
    stacked_keys,
    stored_axis,
)
from dist_checkpointing.tools.inspect.opening import open_named

if TYPE_CHECKING:
    from dist_checkpointing.tools.forecast.forecast import Forecast, RankCost

_MOST_ROWS = 16
_WIDE = 76
_MOST_LISTED = 10
_WORTH_CUTTING = 0.1
"""If tensors that are whole on every rank have more than this share of all bytes, say so."""
_DOES_NOT_FIT = 1
"""Exit code if the load would fail."""


def plan(
    *,
    checkpoint: CheckpointArgument,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Data-parallel replicas of each.")] = 1,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks for which to call the function of --template."),
    ] = None,
    shard: Annotated[
        list[str] | None,
        typer.Option(
            "--shard",
            metavar="REGEX=AXIS",
            help="Cut the keys in which REGEX is found along this axis; 'none': not at all, "
            "'stored': as when saved. May be repeated; the first that matches counts.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="MODULE:FUNCTION",
            help="What each rank wants: function(rank, world_size) returns a sharded state dict.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            help="Load what these rules (JSON or YAML) make of the checkpoint, and show what comes "
            "from where.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a load on many ranks and show what it costs. Nothing is allocated or loaded.

    Shows for each rank the bytes that it wants and reads, the files that it
    opens and its peak memory; and what would make the load fail (then the
    exit code is 1).

    Without --shard, tensors are cut according to their names in Megatron-Core
    and Hugging Face; if no name is known, as they were when saved.

    Example: dckpt plan ckpt/1000 --tp 8 --dp 4

    Example: dckpt plan ckpt/1000 --tp 2 --shard 'experts.*=0'
    """
    rules = [parse_rule(text) for text in shard or []]
    opened = open_named(checkpoint)
    cuts: list[KeyCut] = []
    if (template is None) != (ranks is None):
        raise ValueError("--template and --ranks go together: pass both, or neither")
    if template is not None and (tp > 1 or dp > 1 or rules):
        raise ValueError("a template says how tensors are cut: leave --tp, --dp and --shard out")
    # Imported here, because forecasts import torch.
    from dist_checkpointing.planning.recipe import Recipe, derive  # noqa: PLC0415
    from dist_checkpointing.serialization.load_recipe import shapes_of  # noqa: PLC0415
    from dist_checkpointing.tools.forecast.forecast import forecast_of  # noqa: PLC0415
    from dist_checkpointing.tools.forecast.templates import (  # noqa: PLC0415
        of_function,
        of_tensor_parallel,
    )

    rows = None if recipe is None else Recipe.read(recipe)
    made, index = None, opened.index
    if template is None or ranks is None:
        if rows is not None:
            made = derive(rows, opened.index, opened.objects)
            index = made.index
        cuts = cut_keys(index, tp, [*rules, *guessed_rules(index)])
        wants = of_tensor_parallel(index, cuts, parts=tp, replicas=dp)
    else:
        wants = of_function(template, ranks)
        if rows is not None:
            leaves = [leaf for want in wants for leaf in want.tensors.values()]
            cells = {leaf.key for want in wants for leaf in want.objects}
            made = derive(rows, opened.index, opened.objects, shapes_of(leaves), cells)
    found = forecast_of(opened, wants, made)
    if as_json:
        answer = _as_json(opened, found, cuts)
        print_json(answer if made is None else {**answer, "recipe": made.as_json()})
    else:
        for line in str(made).splitlines() if made is not None else ():
            say(one_line(line))
        _show(opened, index, found, cuts, tp)
    if found.findings:
        raise typer.Exit(_DOES_NOT_FIT)


# The text that is printed.


def _show(
    opened: Checkpoint, index: Index, found: Forecast, cuts: Sequence[KeyCut], tp: int
) -> None:
    backend, version = opened.backend
    stored = sum(handle.num_bytes for handle in opened.values())
    size = f"{counted(len(opened), 'tensor')}, {bytes_text(stored)}"
    say_wrapped(f"{one_line(str(opened.path))} ({backend} {version}): {size}")
    topology = f"Load on {counted(found.num_ranks, 'rank')}"
    if cuts and found.num_ranks > 1:
        topology += f": {counted(tp, 'tensor-parallel rank')}"
        topology += f" x {found.num_ranks // tp} replicas" if found.num_ranks > tp else ""
    say_wrapped(topology)
    say()
    for line in (*_table(found.costs), "", *_totals(opened, found)):
        say(line)
    if cuts and tp > 1:
        say()
        _show_cuts(index, cuts, tp)
    if found.unasked:
        count = counted(len(found.unasked), "tensor")
        say()
        say_wrapped(f"wanted by no rank: {count}", "yellow")
        _show_keys(found.unasked)
    if found.findings:
        say(
            f"\n{painted('This load would fail', 'red')}: {counted(len(found.findings), 'finding')}"
        )
        for finding in found.findings[:_MOST_LISTED]:
            say_wrapped(f"  {one_line(str(finding))}")
        if len(found.findings) > _MOST_LISTED:
            say(f"  and {len(found.findings) - _MOST_LISTED} more (see --json)")


_COLUMNS: tuple[tuple[str, Callable[[RankCost], float], Callable[[float], str]], ...] = (
    ("tensors", lambda cost: cost.num_tensors, "{:.0f}".format),
    ("wants", lambda cost: cost.wanted_bytes, bytes_text),
    ("reads", lambda cost: cost.read_bytes, bytes_text),
    ("ratio", lambda cost: cost.amplification, "{:.2f}".format),
    ("boxes", lambda cost: cost.num_reads, "{:.0f}".format),
    ("files", lambda cost: len(cost.files), "{:.0f}".format),
    ("peak memory", lambda cost: cost.peak_bytes, bytes_text),
)


_LEFT_OUT_IF_NARROW = ("tensors", "ratio", "boxes")


def _table(costs: Sequence[RankCost]) -> Iterator[str]:
    is_narrow = (terminal_width() or _WIDE) < _WIDE
    columns = [c for c in _COLUMNS if not (is_narrow and c[0] in _LEFT_OUT_IF_NARROW)]
    if len(costs) <= _MOST_ROWS:
        rows = [
            (_ranks_text(cost.ranks), *(text(value(cost)) for _, value, text in columns))
            for cost in costs
        ]
    else:
        every = [cost for cost in costs for _ in cost.ranks]
        choices: dict[str, Callable[[list[float]], float]] = {
            "min": min,
            "median": statistics.median_low,
            "max": max,
        }
        rows = [
            (name, *(text(choose([value(cost) for cost in every])) for _, value, text in columns))
            for name, choose in choices.items()
        ]
    headers = ("rank", *(name for name, _, _ in columns))
    return in_columns(headers, rows, right=range(1, len(headers)))


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _totals(opened: Checkpoint, found: Forecast) -> Iterator[str]:
    ratio = found.read_bytes / found.wanted_bytes if found.wanted_bytes else 1.0
    wanted, read = bytes_text(found.wanted_bytes), bytes_text(found.read_bytes)
    rows = [("all ranks", f"want {wanted}, read {read} ({ratio:.2f} x)")]
    if found.shared_read_bytes != found.read_bytes:
        shared = bytes_text(found.shared_read_bytes)
        how = "(FullyParallelLoadStrategyWrapper)"
        rows.append(("", f"{shared} if replicas pass on what one of them reads {how}"))
    files = found.files
    size = sum(location.size_of(opened.folder / name) or 0 for name in files)
    rows.append(("files", f"{len(files)} opened, {bytes_text(size)} in all"))
    if not files and found.read_bytes:
        rows[-1] = ("files", "no other: the values lie with what describes the checkpoint")
    return facts_lines(rows)


def _show_cuts(index: Index, cuts: Sequence[KeyCut], tp: int) -> None:
    axes = Counter((cut.axis, cut.reason) for cut in cuts if cut.axis is not None)
    for (axis, reason), count in sorted(axes.items(), key=lambda item: item[0][0]):
        how = f", {reason.value}" if reason is Reason.STORED else ""
        say_wrapped(f"cut along axis {axis}{how}: {counted(count, 'tensor')}")
    for reason in (Reason.NO_RULE, Reason.STORED, Reason.NOT_DIVISIBLE, Reason.ASKED):
        keys = [cut.key for cut in cuts if cut.axis is None and cut.reason is reason]
        if keys:
            size = bytes_text(sum(index[key].num_bytes for key in keys))
            why = f"{reason.value} by {tp}" if reason is Reason.NOT_DIVISIBLE else reason.value
            say_wrapped(
                f"whole on every rank, {why}: {counted(len(keys), 'tensor')}, {size}",
                "yellow" if reason is Reason.NOT_DIVISIBLE else None,
            )
            _show_keys(sorted(keys, key=lambda key: -index[key].num_bytes))
        if reason is Reason.STORED and (rule := _example_rule(index, cuts, tp)):
            say(f"To cut them, say how: --shard {rule}")


def _example_rule(index: Index, cuts: Sequence[KeyCut], tp: int) -> str | None:
    """A rule that cuts the largest tensor without a rule; None if that would save little."""
    whole = {
        cut.key: index[cut.key].num_bytes
        for cut in cuts
        if cut.axis is None and cut.reason in (Reason.NO_RULE, Reason.STORED)
    }
    if sum(whole.values()) < _WORTH_CUTTING * sum(index[cut.key].num_bytes for cut in cuts):
        return None
    stacked = stacked_keys(index)
    for key in sorted(whole, key=lambda key: -whole[key]):
        stored, is_stacked = index[key], key in stacked
        extents = list(enumerate(stored.global_shape))[is_stacked:]
        fits = [axis for axis, extent in extents if extent and extent % tp == 0]
        if fits:
            own = stored_axis(stored, is_stacked=is_stacked)
            # The part after the number of the layer, which all layers share.
            name = same_for_all_layers(key).rpartition("*.")[2]
            pattern = re.escape(name).replace(r"\.", ".")
            return shlex.quote(f"{pattern}={own if own in fits else fits[0]}")
    return None


def _show_keys(keys: Sequence[str]) -> None:
    # One line for the same tensors of all layers.
    groups = Counter(map(same_for_all_layers, keys))
    for name, count in list(groups.items())[:_MOST_LISTED]:
        times = f"  ({count})" if count > 1 else ""
        say(painted(f"  {one_line(name)}{times}", "dim"))
    if len(groups) > _MOST_LISTED:
        say(painted(f"  and {len(groups) - _MOST_LISTED} more", "dim"))


def _as_json(opened: Checkpoint, found: Forecast, cuts: Sequence[KeyCut]) -> dict[str, Any]:
    return {
        "checkpoint": str(opened.path),
        "backend": list(opened.backend),
        "num_ranks": found.num_ranks,
        "wanted_bytes": found.wanted_bytes,
        "read_bytes": found.read_bytes,
        "read_bytes_if_shared": found.shared_read_bytes,
        "files": sorted(found.files),
        "ranks": [dataclasses.asdict(cost) | {"files": sorted(cost.files)} for cost in found.costs],
        "cuts": [{"key": c.key, "axis": c.axis, "reason": c.reason.value} for c in cuts],
        "unasked": list(found.unasked),
        "findings": [
            {
                "problem": finding.problem,
                "key": finding.key,
                "expected": None if finding.expected is None else str(finding.expected),
                "found": None if finding.found is None else str(finding.found),
                "ranks": list(finding.ranks),
                "path": finding.path,
            }
            for finding in found.findings
        ],
    }

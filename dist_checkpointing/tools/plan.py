"""``dckpt plan``: shows what a load would cost on many ranks, without loading."""

from __future__ import annotations

import dataclasses
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.recipe import Recipe, derive
from dist_checkpointing.serialization.load_recipe import shapes_of
from dist_checkpointing.tools.load_forecast import (
    Forecast,
    KeyCut,
    RankCost,
    Reason,
    cut_keys,
    forecast_of,
    guessed_rules,
    of_function,
    of_tensor_parallel,
    parse_rule,
    stacked_keys,
    stored_axis,
)
from dist_checkpointing.tools.opening import open_named
from dist_checkpointing.tools.report import (
    AsJson,
    Report,
    counted,
    is_narrower_than,
    print_json,
    same_for_all_layers,
)
from dist_checkpointing.tools.runs import CheckpointArgument

_MAX_ROWS = 16
_NARROW = 76
_MAX_LISTED = 10
_WORTH_CUTTING = 0.1
"""If tensors that are whole on every rank have more than this share of all bytes, say so."""
_EXIT_FAILS = 1


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
        document = _document(opened, found, cuts)
        print_json(document if made is None else {**document, "recipe": made.as_json()})
    else:
        report = Report()
        for line in str(made or "").splitlines():
            report.line(line)
        _add_forecast(report, opened, index, found, cuts, tp)
        report.print()
    if found.findings:
        raise typer.Exit(_EXIT_FAILS)


# What is printed.


def _add_forecast(
    report: Report,
    opened: Checkpoint,
    index: Index,
    found: Forecast,
    cuts: Sequence[KeyCut],
    tp: int,
) -> None:
    backend, version = opened.backend
    stored = sum(handle.num_bytes for handle in opened.values())
    size = f"{counted(len(opened), 'tensor')}, {bytes_text(stored)}"
    report.words(f"{opened.path} ({backend} {version}): {size}")
    topology = f"Load on {counted(found.num_ranks, 'rank')}"
    if cuts and found.num_ranks > 1:
        topology += f": {counted(tp, 'tensor-parallel rank')}"
        topology += f" x {found.num_ranks // tp} replicas" if found.num_ranks > tp else ""
    report.words(topology)
    report.section()
    _add_costs(report, found.costs)
    report.section()
    report.facts(_totals(opened, found))
    if cuts and tp > 1:
        report.section()
        _add_cuts(report, index, cuts, tp)
    if found.unasked:
        report.section()
        report.words(f"wanted by no rank: {counted(len(found.unasked), 'tensor')}", "yellow")
        _add_keys(report, found.unasked)
    if found.findings:
        number = counted(len(found.findings), "finding")
        report.section(f"This load would fail: {number}", "red")
        for finding in found.findings[:_MAX_LISTED]:
            report.words(f"  {finding}")
        report.more(found.findings, _MAX_LISTED, "  and {} more (see --json)")


_COLUMNS: tuple[tuple[str, Callable[[RankCost], float], Callable[[float], str]], ...] = (
    ("tensors", lambda cost: cost.num_tensors, "{:.0f}".format),
    ("wants", lambda cost: cost.wanted_bytes, bytes_text),
    ("reads", lambda cost: cost.read_bytes, bytes_text),
    ("ratio", lambda cost: cost.amplification, "{:.2f}".format),
    ("boxes", lambda cost: cost.num_reads, "{:.0f}".format),
    ("files", lambda cost: len(cost.files), "{:.0f}".format),
    ("peak memory", lambda cost: cost.peak_bytes, bytes_text),
)
_CHOICES: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "median": statistics.median_low,
    "max": max,
}
_LEFT_OUT_IF_NARROW = ("tensors", "ratio", "boxes")


def _add_costs(report: Report, costs: Sequence[RankCost]) -> None:
    is_narrow = is_narrower_than(_NARROW)
    columns = [c for c in _COLUMNS if not (is_narrow and c[0] in _LEFT_OUT_IF_NARROW)]
    groups = [(_ranks_text(cost.ranks), [cost], "min") for cost in costs]
    if len(costs) > _MAX_ROWS:
        every = [cost for cost in costs for _ in cost.ranks]
        groups = [(name, every, name) for name in _CHOICES]
    rows = [
        (name, *(text(_CHOICES[choice](list(map(value, group)))) for _, value, text in columns))
        for name, group, choice in groups
    ]
    headers = ("rank", *(name for name, _, _ in columns))
    report.table(headers, rows, right=range(1, len(headers)))


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _totals(opened: Checkpoint, found: Forecast) -> list[tuple[str, str]]:
    ratio = found.read_bytes / found.wanted_bytes if found.wanted_bytes else 1.0
    wanted, read = bytes_text(found.wanted_bytes), bytes_text(found.read_bytes)
    rows = [("all ranks", f"want {wanted}, read {read} ({ratio:.2f} x)")]
    if found.shared_read_bytes != found.read_bytes:
        shared = bytes_text(found.shared_read_bytes)
        how = "(FullyParallelLoadStrategyWrapper)"
        rows.append(("", f"{shared} if replicas pass on what one of them reads {how}"))
    size = sum(location.size_of(opened.folder / name) or 0 for name in found.files)
    text = f"{len(found.files)} opened, {bytes_text(size)} in all"
    if not found.files and found.read_bytes:
        text = "no other: the values lie with what describes the checkpoint"
    return [*rows, ("files", text)]


def _add_cuts(report: Report, index: Index, cuts: Sequence[KeyCut], tp: int) -> None:
    axes = Counter((cut.axis, cut.reason) for cut in cuts if cut.axis is not None)
    for (axis, reason), count in sorted(axes.items(), key=lambda item: item[0][0]):
        how = f", {reason.value}" if reason is Reason.STORED else ""
        report.words(f"cut along axis {axis}{how}: {counted(count, 'tensor')}")
    for reason in (Reason.NO_RULE, Reason.STORED, Reason.NOT_DIVISIBLE, Reason.ASKED):
        keys = [cut.key for cut in cuts if cut.axis is None and cut.reason is reason]
        if keys:
            size = bytes_text(sum(index[key].num_bytes for key in keys))
            indivisible = reason is Reason.NOT_DIVISIBLE
            why = f"{reason.value} by {tp}" if indivisible else reason.value
            text = f"whole on every rank, {why}: {counted(len(keys), 'tensor')}, {size}"
            report.words(text, "yellow" if indivisible else None)
            _add_keys(report, sorted(keys, key=lambda key: -index[key].num_bytes))
        if reason is Reason.STORED and (rule := _example_rule(index, cuts, tp)):
            report.line(f"To cut them, say how: --shard {rule}")


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
            axis = stored_axis(stored, is_stacked=is_stacked)
            # The part after the number of the layer, which all layers share.
            name = same_for_all_layers(key).rpartition("*.")[2]
            pattern = re.escape(name).replace(r"\.", ".")
            return shlex.quote(f"{pattern}={axis if axis in fits else fits[0]}")
    return None


def _add_keys(report: Report, keys: Sequence[str]) -> None:
    # One line for the same tensors of all layers.
    groups = Counter(map(same_for_all_layers, keys)).items()
    texts = [f"  {name}{f'  ({count})' if count > 1 else ''}" for name, count in groups]
    report.listed(texts, _MAX_LISTED, "dim", "  and {} more")


def _document(opened: Checkpoint, found: Forecast, cuts: Sequence[KeyCut]) -> dict[str, Any]:
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

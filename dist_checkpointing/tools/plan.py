"""``dckpt plan``: shows what a load would cost on many ranks, without loading."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import counted
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.file_names import WHOLE_KEY
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.recipe import Recipe, derive
from dist_checkpointing.tools.load_forecast import (
    MEGATRON_RULES,
    KeyCut,
    Reason,
    cut_keys,
    forecast_of,
    parse_rule,
)
from dist_checkpointing.tools.opening import CheckpointArgument, open_named
from dist_checkpointing.tools.report import AsJson, Report, is_narrower_than, same_for_all_layers

_MAX_ROWS = 16
_NARROW = 76
_MAX_LISTED = 10
_EXIT_FAILS = 1


def plan(
    *,
    checkpoint: CheckpointArgument,
    tp: Annotated[int, Option("--tp", min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, Option("--dp", min=1, help="Data-parallel replicas of each.")] = 1,
    shard: Annotated[
        list[str] | None,
        Option(
            "--shard",
            metavar="PATTERN=AXIS",
            help="Cut the keys that match PATTERN along this axis; 'none': not at all. May be "
            "repeated; the first that matches counts.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        Option(
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
    and Hugging Face; those with other names are whole on every rank.

    Example: dckpt plan ckpt/1000 --tp 8 --dp 4

    Example: dckpt plan ckpt/1000 --tp 2 --shard '{x*}.experts.{y*}=0'
    """
    rules = [parse_rule(text) for text in shard or []]
    opened = open_named(checkpoint)
    made, index = None, opened.index
    if recipe is not None:
        made = derive(Recipe.read(recipe), opened.index, opened.objects)
        index = made.index
    for text, rule in zip(shard or (), rules, strict=True):
        if not any(map(rule.pattern.fullmatch, index)):
            raise LookupError(f"--shard {text}: no key matches: {WHOLE_KEY}")
    cuts = cut_keys(index, tp, [*rules, *MEGATRON_RULES])
    found = forecast_of(opened, cuts, parts=tp, replicas=dp, made=made)
    found["cuts"] = [cut._asdict() for cut in cuts]
    report = Report()
    for line in str(made or "").splitlines():
        report.line(line)
    _add_forecast(report, opened, index, found, cuts, tp)
    code = _EXIT_FAILS if found["findings"] else 0
    found["findings"] = list(map(dataclasses.asdict, found["findings"]))
    if made is not None:
        found["recipe"] = made.as_json()
    report.finish(found, as_json=as_json, code=code)


# What is printed.


def _add_forecast(
    report: Report,
    opened: Checkpoint,
    index: Index,
    found: dict[str, Any],
    cuts: Sequence[KeyCut],
    tp: int,
) -> None:
    backend, version = opened.backend
    stored = sum(handle.num_bytes for handle in opened.values())
    size = f"{counted(len(opened), 'tensor')}, {bytes_text(stored)}"
    report.line(f"{opened.path} ({backend} {version}): {size}")
    num_ranks = found["num_ranks"]
    topology = f"Load on {counted(num_ranks, 'rank')}"
    if num_ranks > 1:
        topology += f": {counted(tp, 'tensor-parallel rank')}"
        topology += f" x {num_ranks // tp} replicas" if num_ranks > tp else ""
    report.line(topology)
    report.section()
    _add_costs(report, found["ranks"])
    report.section()
    report.facts(_totals(opened, found))
    if tp > 1:
        report.section()
        _add_cuts(report, index, cuts, tp)
    findings = [f"  {finding}" for finding in found["findings"]]
    report.section(f"This load would fail: {counted(len(findings), 'finding')}", "red")
    report.lines(findings, None, _MAX_LISTED)


_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("tensors", "{:.0f}".format),
    ("wants", bytes_text),
    ("reads", bytes_text),
    ("ratio", "{:.2f}".format),
    ("boxes", "{:.0f}".format),
    ("files", "{:.0f}".format),
    ("peak memory", bytes_text),
)
_CHOICES: dict[str, Callable[[Iterable[float]], float]] = {
    "min": min,
    "median": statistics.median_low,
    "max": max,
}
_LEFT_OUT_IF_NARROW = ("tensors", "ratio", "boxes")


def _numbers(cost: dict[str, Any]) -> list[float]:
    wanted, read = cost["wanted_bytes"], cost["read_bytes"]
    copies = cost["num_reads"], len(cost["files"]), cost["peak_bytes"]
    return [cost["num_tensors"], wanted, read, _ratio(read, wanted), *copies]


def _ratio(read: int, wanted: int) -> float:
    return read / wanted if wanted else 1.0


def _add_costs(report: Report, costs: Sequence[dict[str, Any]]) -> None:
    groups = [(_ranks_text(cost["ranks"]), _numbers(cost)) for cost in costs]
    if len(costs) > _MAX_ROWS:
        columns = [*zip(*(_numbers(cost) for cost in costs for _ in cost["ranks"]), strict=True)]
        groups = [(name, [*map(choose, columns)]) for name, choose in _CHOICES.items()]
    left_out = _LEFT_OUT_IF_NARROW if is_narrower_than(_NARROW) else ()
    shown = [(n, *column) for n, column in enumerate(_COLUMNS) if column[0] not in left_out]
    rows = [[name, *(text(numbers[n]) for n, _, text in shown)] for name, numbers in groups]
    report.table(["rank", *(header for _, header, _ in shown)], rows, range(1, 1 + len(shown)))


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _totals(opened: Checkpoint, found: dict[str, Any]) -> list[tuple[str, str]]:
    wanted, read, shared = (
        found[name] for name in ("wanted_bytes", "read_bytes", "read_bytes_if_shared")
    )
    ratio = f"{_ratio(read, wanted):.2f} x"
    rows = [("all ranks", f"want {bytes_text(wanted)}, read {bytes_text(read)} ({ratio})")]
    if shared != read:
        how = "(FullyParallelLoadStrategyWrapper)"
        rows.append(("", f"{bytes_text(shared)} if replicas pass on what one of them reads {how}"))
    size = sum(location.size_of(opened.folder / name) or 0 for name in found["files"])
    text = f"{len(found['files'])} opened, {bytes_text(size)} in all"
    if not found["files"] and read:
        text = "no other: the values lie with what describes the checkpoint"
    return [*rows, ("files", text)]


def _add_cuts(report: Report, index: Index, cuts: Sequence[KeyCut], tp: int) -> None:
    axes = Counter(cut.axis for cut in cuts if cut.axis is not None)
    for axis, count in sorted(axes.items()):
        report.line(f"cut along axis {axis}: {counted(count, 'tensor')}")
    for reason in (Reason.NO_RULE, Reason.NOT_DIVISIBLE, Reason.ASKED):
        keys = [cut.key for cut in cuts if cut.axis is None and cut.reason is reason]
        if keys:
            size = bytes_text(sum(index[key].num_bytes for key in keys))
            indivisible = reason is Reason.NOT_DIVISIBLE
            why = f"{reason} by {tp}" if indivisible else reason
            text = f"whole on every rank, {why}: {counted(len(keys), 'tensor')}, {size}"
            report.line(text, "yellow" if indivisible else None)
            _add_keys(report, sorted(keys, key=lambda key: -index[key].num_bytes))
            if reason is Reason.NO_RULE:
                report.line("To cut them, say how: --shard PATTERN=AXIS")


def _add_keys(report: Report, keys: Sequence[str]) -> None:
    # One line for the same tensors of all layers.
    groups = Counter(map(same_for_all_layers, keys)).items()
    texts = [f"  {name}{f'  ({count})' if count > 1 else ''}" for name, count in groups]
    report.lines(texts, "dim", _MAX_LISTED)

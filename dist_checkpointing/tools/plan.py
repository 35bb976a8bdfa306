"""``dckpt plan``: shows what a load would cost on many ranks. Nothing is read but the index."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import Finding, counted, merge_findings
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.ranged_reads import StoreFile
from dist_checkpointing.format.file_names import WHOLE_KEY, key_pattern
from dist_checkpointing.format.geometry import Box, Window
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning import MetadataIndex, ReadItem
from dist_checkpointing.planning.recipe import Derivation, Recipe, derive
from dist_checkpointing.planning.resharding import plan_load
from dist_checkpointing.planning.shard_table import describe
from dist_checkpointing.serialization.recipes import source_leaves
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.strategies.chunk_reads import axes_apart, span_bytes
from dist_checkpointing.tools.opening import CheckpointArgument, open_named
from dist_checkpointing.tools.report import AsJson, Report, is_narrower_than, same_for_all_layers

_MAX_ROWS = 16
_NARROW = 76
_MAX_LISTED = 10
_SCRATCH_BYTES = 2**22
"""Small neighbours are read together into a buffer of at most this size."""
_COLUMN_PARALLEL = (
    "word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1|query_key_value|"
    "dense_h_to_4h|embed_tokens|lm_head|q_proj|k_proj|v_proj|gate_proj|up_proj"
)
_ROW_PARALLEL = "linear_proj|linear_fc2|dense_4h_to_h|o_proj|down_proj"


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
            help="Shard the keys that match PATTERN along this axis; 'none': not at all. May be "
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

    Without --shard, tensors are sharded according to their names in Megatron-Core
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
    would_fail = bool(found["findings"])
    found["findings"] = list(map(dataclasses.asdict, found["findings"]))
    if made is not None:
        found["recipe"] = made.as_json()
    report.finish(found, as_json=as_json, code=int(would_fail))


# How a model would be cut.


class AxisRule(NamedTuple):
    """Which axis the tensors of some keys are cut along; None leaves them whole.

    Counted from the end if negative, so that stacked layers do not matter.
    """

    pattern: re.Pattern[str]
    axis: int | None


MEGATRON_RULES = (
    AxisRule(re.compile(rf"(.*\.)?({_COLUMN_PARALLEL})\.weight\d*"), -2),
    AxisRule(re.compile(rf"(.*\.)?({_COLUMN_PARALLEL})\.bias\d*"), -1),
    AxisRule(re.compile(rf"(.*\.)?({_ROW_PARALLEL})\.weight\d*"), -1),
)
"""The layers of Megatron-Core, and of the usual Hugging Face models, by name."""


class Reason(StrEnum):
    RULE = "a rule matches"
    ASKED = "a rule says so"
    NO_RULE = "no rule matches"
    NOT_DIVISIBLE = "not divisible"


class KeyCut(NamedTuple):
    """How one tensor is spread over the tensor-parallel ranks: cut along an axis, or whole."""

    key: str
    axis: int | None
    reason: Reason


def parse_rule(text: str) -> AxisRule:
    """``PATTERN=axis`` or ``PATTERN=none``."""
    pattern, _, axis = text.rpartition("=")
    if not pattern:
        raise ValueError(f"{text!r} is not of the form PATTERN=axis, such as 'lm_head.weight=0'")
    wanted = key_pattern(pattern)
    try:
        return AxisRule(wanted, None if axis.strip().lower() == "none" else int(axis))
    except ValueError:
        problem = "is no axis; write a number or 'none'"
        raise ValueError(f"{axis!r} in {text!r} {problem}") from None


def cut_keys(index: Index, parts: int, rules: Sequence[AxisRule]) -> list[KeyCut]:
    """How every tensor is cut into ``parts``; the first rule that matches counts."""
    return [_cut(index[key], parts, rules) for key in index]


def _cut(stored: StoredTensor, parts: int, rules: Iterable[AxisRule]) -> KeyCut:
    rule = next((rule for rule in rules if rule.pattern.fullmatch(stored.key)), None)
    if rule is None:
        return KeyCut(stored.key, None, Reason.NO_RULE)
    if rule.axis is None:
        return KeyCut(stored.key, None, Reason.ASKED)
    ndim = len(stored.global_shape)
    if not -ndim <= rule.axis < ndim:
        if rule in MEGATRON_RULES:  # a guess that does not fit is not used
            return KeyCut(stored.key, None, Reason.NO_RULE)
        raise ValueError(
            f"{stored.key!r} of shape {stored.global_shape} has no axis {rule.axis}, "
            f"which {rule.pattern.pattern!r} cuts"
        )
    axis = rule.axis % ndim
    if stored.global_shape[axis] % parts:
        return KeyCut(stored.key, None, Reason.NOT_DIVISIBLE)
    return KeyCut(stored.key, axis, Reason.RULE)


def part_of(stored: StoredTensor, cut: KeyCut, part: int, parts: int) -> Box:
    shape = list(stored.global_shape)
    offset = [0] * len(shape)
    if cut.axis is not None:
        shape[cut.axis] //= parts
        offset[cut.axis] = part * shape[cut.axis]
    return Box(tuple(offset), tuple(shape))


# What it costs.


def forecast_of(
    checkpoint: Checkpoint,
    cuts: Sequence[KeyCut],
    *,
    parts: int,
    replicas: int,
    made: Derivation | None = None,
) -> dict[str, Any]:
    """Plan the load of every rank, perhaps of what a recipe has made, and add up what it takes.

    Ranks hold ``parts`` of every tensor, each part ``replicas`` times. Rank ``r`` holds part ``r %
    parts``, as in Megatron, where tensor-parallel ranks are neighbours.

    The document of ``--json``, but for the findings, which are not yet rows, and the cuts.
    ``read_bytes_if_shared`` are read if ranks that want the same read it once and pass it on. Of
    ranks that want the same: ``read_bytes`` are what storage has to deliver to each, see
    ``bytes_read``, ``num_reads`` is the number of boxes to copy, and ``peak_bytes`` the memory for
    the shards and for what is read on the way to them.
    """
    reader = checkpoint.reads.set_up_reader(checkpoint.index)
    index = checkpoint.reads.index_for(checkpoint.index)
    stored = index if made is None else made.index
    findings: list[Finding] = []
    rows: list[dict[str, Any]] = []
    for part in range(parts):
        leaves = [
            ShardedTensor.of_box(stored[cut.key], part_of(stored[cut.key], cut, part, parts))
            for cut in cuts
        ]
        wanted_bytes = int(describe(leaves, 0).num_bytes.sum())
        if made is not None:
            leaves = [source for leaf in leaves for source in source_leaves(made, leaf, [])]
        items, uncovered = plan_load(index, leaves)
        ranks = tuple(range(part, parts * replicas, parts))
        findings += [replace(finding, ranks=ranks) for finding in uncovered]
        cost = _cost(items.items(), index, reader, wanted_bytes)
        rows.append({"ranks": ranks, "num_tensors": len(cuts), **cost})
    files = sorted({name for row in rows for name in row["files"]})
    lost = [
        Finding("a file that would be read is missing", path=f"{reader.checkpoint_dir}/{name}")
        for name in files
        if reader.files.size_of(name) is None
    ]
    return {
        "checkpoint": str(checkpoint.path),
        "backend": checkpoint.backend,
        "num_ranks": parts * replicas,
        "wanted_bytes": sum(row["wanted_bytes"] * replicas for row in rows),
        "read_bytes": sum(row["read_bytes"] * replicas for row in rows),
        "read_bytes_if_shared": sum(row["read_bytes"] for row in rows),
        "files": files,
        "ranks": rows,
        "findings": [*merge_findings(findings), *lost],
    }


def _cost(
    items: Iterable[ReadItem], index: Index, reader: StorageReader, wanted_bytes: int
) -> dict[str, Any]:
    """What the reads of a rank take: each shard reads of each chunk all, or a window at a time."""
    by_chunk: defaultdict[tuple[MetadataIndex, MetadataIndex], list[Window]] = defaultdict(list)
    for item in items:
        by_chunk[item.storage_index, item.dest_index].append(item.storage)
    chunks = [*dict.fromkeys(chunk for chunk, _ in by_chunk)]
    places = dict(zip(chunks, reader.places(chunks), strict=True))
    read_bytes, decoded, buffers = 0, list[int](), list[int]()
    for (chunk, _), windows in by_chunk.items():
        place, itemsize = places[chunk], index[chunk.fqn].dtype.itemsize
        if place is not None and place.is_read_whole:
            size = max(window.start + window.array_size for window in windows) * itemsize
            read_bytes += place.num_bytes
            decoded.append(place.num_bytes + size)
            continue
        for window in windows:
            gap = None if isinstance(reader.files.folder, Path) else StoreFile.most_gap
            num_bytes, buffer = bytes_read(window, itemsize, gap, is_mapped=reader.files.maps_files)
            read_bytes += num_bytes
            buffers.append(buffer)
    options = reader.options
    at_once, copied = (sum(nlargest(options.threads, sizes)) for sizes in (decoded, buffers))
    on_the_way = max(at_once, min(options.buffer_bytes, copied), min(_SCRATCH_BYTES, wanted_bytes))
    return {
        "wanted_bytes": wanted_bytes,
        "read_bytes": read_bytes,
        "num_reads": sum(map(len, by_chunk.values())),
        "files": sorted({place.file for place in places.values() if place and place.file}),
        "peak_bytes": wanted_bytes + on_the_way,
    }


def bytes_read(
    window: Window, itemsize: int, gap: int | None, *, is_mapped: bool
) -> tuple[int, int]:
    """Bytes that a window takes of storage, and of a buffer, 0 if it is read in place.

    It is of a chunk that can be read in part. A window that is one run is read as it is. Others are
    read in parts, each from its first element to its last.
    """
    if window.contiguous_range() is not None:
        return window.box.num_elements * itemsize, 0
    axes = axes_apart(window, itemsize, maps_files=is_mapped, most_gap=gap)
    span = span_bytes(window, axes, itemsize)
    return math.prod(window.box.shape[:axes]) * span, 0 if is_mapped else span


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
        report.line(f"sharded along axis {axis}: {counted(count, 'tensor')}")
    for reason in (Reason.NO_RULE, Reason.NOT_DIVISIBLE, Reason.ASKED):
        keys = [cut.key for cut in cuts if cut.axis is None and cut.reason is reason]
        if keys:
            size = bytes_text(sum(index[key].num_bytes for key in keys))
            indivisible = reason is Reason.NOT_DIVISIBLE
            why = f"{reason} by {tp}" if indivisible else reason
            text = f"whole on every rank, {why}: {counted(len(keys), 'tensor')}, {size}"
            report.line(text, "yellow" if indivisible else None)
            keys.sort(key=lambda key: -index[key].num_bytes)
            # One line for the same tensors of all layers.
            groups = Counter(map(same_for_all_layers, keys)).items()
            texts = [f"  {name}{f'  ({count})' if count > 1 else ''}" for name, count in groups]
            report.lines(texts, "dim", _MAX_LISTED)
            if reason is Reason.NO_RULE:
                report.line("To shard them, say how: --shard PATTERN=AXIS")

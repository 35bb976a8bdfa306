"""What a load on many ranks would cost, from the index and the plans alone: nothing is read."""

from __future__ import annotations

import math
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from heapq import nlargest
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import Finding, StateMismatchError
from dist_checkpointing.filesystem.ranged_reads import StoreFile
from dist_checkpointing.format.file_names import key_pattern
from dist_checkpointing.format.geometry import Box, Window
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import DictKey, Path as TreePath
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning import MetadataIndex, ReadItem
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.planning.recipe import Derivation
from dist_checkpointing.planning.resharding import plan_load
from dist_checkpointing.serialization.load_recipe import source_leaves
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.strategies.chunk_reads import axes_apart, span_bytes
from dist_checkpointing.validation.load_errors import compare

_PAGE_BYTES = 4096
_SCRATCH_BYTES = 2**22
"""Small neighbours are read together into a buffer of at most this size."""
_COLUMN_PARALLEL = (
    "word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1|query_key_value|"
    "dense_h_to_4h|embed_tokens|lm_head|q_proj|k_proj|v_proj|gate_proj|up_proj"
)
_ROW_PARALLEL = "linear_proj|linear_fc2|dense_4h_to_h|o_proj|down_proj"
# How a model would be cut.
AS_STORED: Final = "stored"
Axis = int | Literal["stored"] | None


class AxisRule(NamedTuple):
    """Which axis the tensors of some keys are cut along; None leaves them whole.

    Counted from the end if negative, so that stacked layers do not matter; ``AS_STORED`` is the
    axis along which each was cut when it was saved.
    """

    pattern: re.Pattern[str]
    axis: Axis


MEGATRON_RULES = (
    AxisRule(re.compile(rf"(^|\.)({_COLUMN_PARALLEL})\.weight\d*$"), -2),
    AxisRule(re.compile(rf"(^|\.)({_COLUMN_PARALLEL})\.bias\d*$"), -1),
    AxisRule(re.compile(rf"(^|\.)({_ROW_PARALLEL})\.weight\d*$"), -1),
)
"""The layers of Megatron-Core, and of the usual Hugging Face models, by name."""


class Reason(StrEnum):
    """Why a tensor is cut, or is not."""

    RULE = "a rule matches"
    ASKED = "a rule says so"
    STORED = "as it was when saved"
    NO_RULE = "no rule matches"
    NOT_DIVISIBLE = "not divisible"


class KeyCut(NamedTuple):
    """How one tensor is spread over the tensor-parallel ranks: cut along an axis, or whole."""

    key: str
    axis: int | None
    reason: Reason


def parse_rule(text: str) -> AxisRule:
    """``PATTERN=axis``, ``PATTERN=none`` or ``PATTERN=stored``."""
    pattern, _, axis = text.rpartition("=")
    if not pattern:
        raise ValueError(f"{text!r} is not of the form PATTERN=axis, such as 'lm_head=0'")
    words: dict[str, Axis] = {"none": None, AS_STORED: AS_STORED}
    word = axis.strip().lower()
    wanted = key_pattern(pattern)
    try:
        return AxisRule(wanted, words[word] if word in words else int(axis))
    except ValueError:
        problem = "is no axis; write a number, 'none' or 'stored'"
        raise ValueError(f"{axis!r} in {text!r} {problem}") from None


def guessed_rules(index: Index) -> tuple[AxisRule, ...]:
    """By name; of a model in which no name is known, as every tensor was cut when it was saved."""
    by_name = any(rule.pattern.search(key) for key in index for rule in MEGATRON_RULES)
    return MEGATRON_RULES if by_name else (AxisRule(re.compile(""), AS_STORED),)


def stored_axis(stored: StoredTensor, *, is_stacked: bool = False) -> int | None:
    """The last axis along which a tensor was cut when it was saved; None if it was not.

    The last, because stages of a pipeline cut stacked layers along the first, which does not count
    in a tensor that ``is_stacked``.
    """
    axes = (axis for axis, count in enumerate(_counts(stored)) if count > 1)
    return max((axis for axis in axes if axis or not is_stacked), default=None)


def _counts(stored: StoredTensor) -> list[int]:
    """In how many parts a tensor is cut along each axis."""
    if stored.pieces is None:
        return list(stored.grid.counts)
    return [len(set(column.tolist())) for column in stored.pieces.offsets.T]


def stacked_keys(index: Index) -> frozenset[str]:
    """The tensors whose first axis counts layers: how the layers of a model become one tensor.

    They are stored layer by layer, and all tensors below a prefix have that axis: weights of three
    axes, and norms or biases of two.
    """
    below: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for key in index:
        for prefix in accumulate(key.split(".")[:-1], "{}.{}".format):
            below[prefix].append(index[key])
    found: set[str] = set()
    for tensors in below.values():
        ndims = {len(stored.global_shape) for stored in tensors}
        if min(ndims) < 2 or max(ndims) < 3:
            continue
        layers = {stored.global_shape[0] for stored in tensors}
        if len(layers) == 1 and all(_counts(stored)[0] in layers for stored in tensors):
            found.update(stored.key for stored in tensors)
    return frozenset(found)


def cut_keys(index: Index, parts: int, rules: Sequence[AxisRule]) -> list[KeyCut]:
    """How every tensor is cut into ``parts``; the first rule that matches counts."""
    stacked = stacked_keys(index)
    return [_cut(index[key], parts, rules, is_stacked=key in stacked) for key in index]


def _cut(
    stored: StoredTensor, parts: int, rules: Iterable[AxisRule], *, is_stacked: bool
) -> KeyCut:
    rule = next((rule for rule in rules if rule.pattern.search(stored.key)), None)
    if rule is None:
        return KeyCut(stored.key, None, Reason.NO_RULE)
    if rule.axis is None:
        return KeyCut(stored.key, None, Reason.ASKED)
    if rule.axis == AS_STORED:
        axis, reason = stored_axis(stored, is_stacked=is_stacked), Reason.STORED
    else:
        ndim = len(stored.global_shape)
        if not -ndim <= rule.axis < ndim:
            if rule in MEGATRON_RULES:  # a guess that does not fit is not used
                return KeyCut(stored.key, None, Reason.NO_RULE)
            raise ValueError(
                f"{stored.key!r} of shape {stored.global_shape} has no axis {rule.axis}, "
                f"which {rule.pattern.pattern!r} cuts"
            )
        axis, reason = rule.axis % ndim, Reason.RULE
    if axis is not None and stored.global_shape[axis] % parts:
        return KeyCut(stored.key, None, Reason.NOT_DIVISIBLE)
    return KeyCut(stored.key, axis, reason)


def part_of(stored: StoredTensor, cut: KeyCut, part: int, parts: int) -> Box:
    """The box that one of the tensor-parallel ranks holds."""
    shape = list(stored.global_shape)
    offset = [0] * len(shape)
    if cut.axis is not None:
        shape[cut.axis] //= parts
        offset[cut.axis] = part * shape[cut.axis]
    return Box(tuple(offset), tuple(shape))


# What each rank wants.


class RankWants(NamedTuple):
    """What some ranks want, all of them the same: shards without data, and cells of objects."""

    ranks: tuple[int, ...]
    tensors: dict[TreePath, ShardedTensor]
    objects: tuple[ShardedObject, ...] = ()


def of_tensor_parallel(
    index: Index, cuts: Sequence[KeyCut], *, parts: int, replicas: int
) -> list[RankWants]:
    """Ranks that hold ``parts`` of every tensor, each part ``replicas`` times.

    Rank ``r`` holds part ``r % parts``, as in Megatron, where tensor-parallel ranks are neighbours.
    """
    wants = []
    for part in range(parts):
        boxes = ((index[cut.key], part_of(index[cut.key], cut, part, parts)) for cut in cuts)
        tensors: dict[TreePath, ShardedTensor] = {
            (DictKey(row.key),): ShardedTensor.of_box(row, box) for row, box in boxes
        }
        wants.append(RankWants(tuple(range(part, parts * replicas, parts)), tensors))
    return wants


def of_function(name: str, world_size: int) -> list[RankWants]:
    """The ranks whose sharded state dicts ``module:function(rank, world_size)`` returns.

    The default device is then "meta", so that the tensors it makes take no memory.
    """
    if ":" not in name:
        raise ValueError(f"{name!r} is not of the form MODULE:FUNCTION")
    # As `python -m` does it: what lies in the current folder can be imported.
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        with _telling(f"cannot import {name!r}"):
            function = pkgutil.resolve_name(name)
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise ValueError(f"{name!r} is not a function")  # noqa: TRY004 - a text
    wants = []
    for rank in range(world_size):
        with _telling(f"{name}({rank}, {world_size}) failed"), torch.device("meta"):
            parts = StateDictParts.of(function(rank, world_size))
        tensors = {path: leaf.without_data() for path, leaf in parts.tensors.items()}
        wants.append(RankWants((rank,), tensors, tuple(parts.objects.values())))
    return wants


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Say of any error of the user's code what was done."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


# What it costs.


def forecast_of(
    checkpoint: Checkpoint, wants: Sequence[RankWants], made: Derivation | None = None
) -> dict[str, Any]:
    """Plan the load of every rank, perhaps of what a recipe has made, and add up what it takes.

    The document of ``--json``, but for the findings, which are not yet rows, and the cuts.
    ``read_bytes_if_shared`` are read if ranks that want the same read it once and pass it on;
    ``unasked`` are the keys that no rank wants. Of ranks that want the same: ``read_bytes`` are
    what storage has to deliver to each, see ``bytes_read``, ``num_reads`` is the number of boxes to
    copy, and ``peak_bytes`` the memory for the shards and for what is read on the way to them.
    """
    reader = checkpoint.reads.set_up_reader(checkpoint.index)
    index = checkpoint.reads.index_for(checkpoint.index)
    stored = index if made is None else made.index
    objects: Container[str] = ()
    if any(want.objects for want in wants):
        objects = checkpoint.objects if made is None else {*made.objects, *made.kept_objects}
    # By problem and key, with all ranks that meet it.
    findings: dict[tuple[str, str | None], Finding] = {}
    rows: list[dict[str, Any]] = []
    for want in wants:
        misfits: list[Finding] = []
        try:
            compare(WantedTable(want.tensors), stored, "error", planner_knows_keys=False)
        except StateMismatchError as error:
            misfits += error.findings
        unfit = {finding.key for finding in misfits if finding.problem != "dtype differs"}
        leaves = [leaf for leaf in want.tensors.values() if leaf.key not in unfit]
        sizes = [leaf.flat_range or (0, leaf.box.num_elements) for leaf in leaves]
        wanted_bytes = sum(
            (stop - start) * leaf.dtype.itemsize
            for leaf, (start, stop) in zip(leaves, sizes, strict=True)
        )
        if made is not None:
            leaves = [source for leaf in leaves for source in source_leaves(made, leaf, [])]
        items, uncovered = plan_load(index, leaves)
        misfits += uncovered
        misfits += [
            Finding("object not in the checkpoint", leaf.unique_key)
            for leaf in want.objects
            if leaf.key not in objects
        ]
        for finding in misfits:
            known = findings.setdefault((finding.problem, finding.key), finding)
            ranks = tuple(sorted({*known.ranks, *want.ranks}))
            findings[finding.problem, finding.key] = replace(known, ranks=ranks)
        cost = _cost(items.items(), index, reader, wanted_bytes)
        rows.append({"ranks": want.ranks, "num_tensors": len(want.tensors), **cost})
    files = sorted({name for row in rows for name in row["files"]})
    lost = [
        Finding("a file that would be read is missing", path=f"{reader.checkpoint_dir}/{name}")
        for name in files
        if reader.files.size_of(name) is None
    ]
    asked = {leaf.key for want in wants for leaf in want.tensors.values()}
    return {
        "checkpoint": str(checkpoint.path),
        "backend": checkpoint.backend,
        "num_ranks": sum(len(row["ranks"]) for row in rows),
        "wanted_bytes": sum(row["wanted_bytes"] * len(row["ranks"]) for row in rows),
        "read_bytes": sum(row["read_bytes"] * len(row["ranks"]) for row in rows),
        "read_bytes_if_shared": sum(row["read_bytes"] for row in rows),
        "files": files,
        "ranks": rows,
        "cuts": [],
        "unasked": [key for key in (index if made is None else made.tensors) if key not in asked],
        "findings": [*findings.values(), *lost],
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
            is_mapped = reader.files.maps_files
            num_bytes, buffer = bytes_read(window, itemsize, gap, is_mapped=is_mapped)
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

    It is of a chunk that can be read in part. A window that is one run is read as it is. Of others
    a mapped file delivers whole pages of 4 KiB (the read-ahead of the system not counted), and a
    file that is read into buffers delivers parts, each from its first element to its last.
    """
    wanted = window.box.num_elements * itemsize
    if window.contiguous_range() is not None:
        return wanted, 0
    if not is_mapped:
        axes = axes_apart(window, itemsize, maps_files=False, most_gap=gap)
        span = span_bytes(window, axes, itemsize)
        return math.prod(window.box.shape[:axes]) * span, span
    span = span_bytes(window, 0, itemsize)
    run = 1
    skipped = 0
    for extent, full in zip(reversed(window.box.shape), reversed(window.shape), strict=True):
        skipped = run * (full - extent)
        run *= extent
        if extent != full:
            break
    if skipped * itemsize < _PAGE_BYTES:
        return span, 0
    runs = window.box.num_elements // run
    # A run begins anywhere in a page, and so touches one more than it fills.
    return min(span, wanted + runs * _PAGE_BYTES), 0

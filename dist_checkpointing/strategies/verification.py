"""Reads stored parts once more and compares their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dist_checkpointing import dtypes
from dist_checkpointing.checksums import CHECKSUMS_NAME, StoredPart, checksum, read_checksums
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.geometry import Box
from dist_checkpointing.index import Index
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning import MetadataIndex
from dist_checkpointing.progress import Meter
from dist_checkpointing.strategies.base import LoadShardedStrategy, PlannedLoadStrategy
from dist_checkpointing.tree import DictKey
from dist_checkpointing.tree import Path as TreePath

_ALIGNMENT_BYTES = 64


def verify_parts(
    wanted: Sequence[ShardedTensor],
    strategy: LoadShardedStrategy,
    checkpoint_dir: Path,
    index: Index | None,
    meter: Meter,
) -> None:
    """Verify every stored part that meets a wanted shard. Not collective.

    Raises:
        UnsupportedFormatError: if the checkpoint has no checksums.
        CorruptCheckpointError: with key, part and place of everything that is damaged.
    """
    parts = read_checksums(checkpoint_dir)
    if index is None or not isinstance(strategy, PlannedLoadStrategy) or not parts:
        finding = Finding(
            "no checksums were kept when it was saved", path=str(checkpoint_dir / CHECKSUMS_NAME)
        )
        raise UnsupportedFormatError("the checkpoint cannot be verified", [finding])
    boxes: dict[str, list[Box]] = {}
    for leaf in wanted:
        boxes.setdefault(leaf.key, []).append(leaf.box)
    touched = [
        part
        for part in parts
        if part.key in index
        and any(part.box.intersect(box) is not None for box in boxes.get(part.key, ()))
    ]
    findings = damage_of(touched, strategy, checkpoint_dir, index, meter)
    if findings:
        raise CorruptCheckpointError("stored data is not what was saved", findings)


def damage_of(
    parts: Sequence[StoredPart],
    strategy: PlannedLoadStrategy,
    checkpoint_dir: Path,
    index: Index,
    meter: Meter,
) -> list[Finding]:
    """Read stored parts, compare those that have a checksum, and say what is wrong with which.

    Not collective.
    """
    meter.expect(sum(_num_bytes(part, index) for part in parts))
    most = strategy.options.buffer_bytes // 2
    # One piece of memory for all batches: an allocator would keep what each of them gave back.
    largest = max((_padded_bytes(part, index) for part in parts), default=0)
    total = sum(_padded_bytes(part, index) for part in parts)
    memory = torch.empty(max(min(most, total), largest), dtype=torch.uint8)
    findings = []
    for batch in _batches(parts, index, len(memory)):
        findings += _verify(batch, strategy, checkpoint_dir, index, memory)
        meter.add(sum(_num_bytes(part, index) for part in batch))
    return findings


def _num_bytes(part: StoredPart, index: Index) -> int:
    return part.num_elements * index[part.key].dtype.itemsize


def _padded_bytes(part: StoredPart, index: Index) -> int:
    """Bytes of memory for a part, so that the next one begins where any dtype may."""
    return -(-_num_bytes(part, index) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _batches(
    parts: Sequence[StoredPart], index: Index, most_bytes: int
) -> Iterator[list[StoredPart]]:
    batch: list[StoredPart] = []
    size = 0
    for part in parts:
        if batch and size + _padded_bytes(part, index) > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += _padded_bytes(part, index)
    if batch:
        yield batch


def _verify(
    batch: Sequence[StoredPart],
    strategy: PlannedLoadStrategy,
    checkpoint_dir: Path,
    index: Index,
    memory: torch.Tensor,
) -> list[Finding]:
    leaves: dict[TreePath, ShardedTensor] = {}
    start = 0
    for number, part in enumerate(batch):
        leaf = _leaf(part, index)
        own = memory[start : start + _num_bytes(part, index)].view(leaf.dtype)
        leaf.data = own.view(part.box.shape if part.flat_range is None else -1)
        leaves[DictKey(number),] = leaf
        start += _padded_bytes(part, index)
    reader = strategy.make_reader(checkpoint_dir)
    try:
        strategy.read(leaves, index, reader, SingleProcess())
    except (CorruptCheckpointError, StateMismatchError, RankFailedError) as error:
        if len(batch) == 1:
            return _unreadable(batch[0], error)
        # Some of them cannot even be read: find them by halves.
        middle = len(batch) // 2
        return [
            finding
            for half in (batch[:middle], batch[middle:])
            for finding in _verify(half, strategy, checkpoint_dir, index, memory)
        ]
    return [
        Finding(
            "checksum differs: bits were flipped after it was saved",
            part.key,
            expected=f"{part.digest or 0:016x}",
            found=f"{found:016x} in {part.box.offset} .. {part.box.stop}",
            path=reader.location(_stored_chunk(part, index)),
        )
        for part, found in zip(batch, _digests(leaves), strict=True)
        if part.digest is not None and found != part.digest
    ]


def in_words(error: CheckpointingException) -> list[Finding]:
    """The findings of an error, without ranks; what is about no key says what was being done."""
    return [
        replace(
            finding,
            problem=finding.problem
            if finding.key is not None
            else f"{error.message}: {finding.problem}",
            ranks=(),
        )
        for finding in error.findings
    ]


def _unreadable(part: StoredPart, error: CheckpointingException) -> list[Finding]:
    """What is wrong with a part that cannot be read; every finding names its key and place."""
    where = f"{part.box.offset} .. {part.box.stop}"
    return [
        replace(
            finding,
            key=part.key if finding.key is None else finding.key,
            found=where if finding.found is None else f"{finding.found} in {where}",
        )
        for finding in in_words(error) or [Finding(str(error), part.key)]
    ]


def _leaf(part: StoredPart, index: Index) -> ShardedTensor:
    tensor = index[part.key]
    flat = None if part.flat_range is None else slice(*part.flat_range)
    return ShardedTensor(
        part.key,
        None,
        tensor.dtype.torch,
        part.box.shape,
        tensor.global_shape,
        part.box.offset,
        None,
        flattened_range=flat,
    )


def _digests(leaves: Mapping[TreePath, ShardedTensor]) -> list[int]:
    found = []
    for leaf in leaves.values():
        assert leaf.data is not None
        found.append(checksum(dtypes.as_numpy(leaf.data)))
    return found


def _stored_chunk(part: StoredPart, index: Index) -> MetadataIndex:
    tensor = index[part.key]
    if tensor.pieces is None:
        return MetadataIndex(part.key, part.box.offset)
    start = -1 if part.flat_range is None else part.flat_range[0]
    same = (tensor.pieces.offsets == part.box.offset).all(axis=1)
    rows = np.flatnonzero(same & (tensor.pieces.flat[:, 0] == start))
    if not len(rows):
        # A format may cut what it is given into smaller boxes: any of them says where to look.
        pieces, stop = tensor.pieces, np.array(part.box.stop)
        meets = (pieces.offsets < stop) & (pieces.offsets + pieces.shapes > part.box.offset)
        rows = np.flatnonzero(meets.all(axis=1))
    return MetadataIndex(part.key, part.box.offset, int(rows[0]))

"""Compares what a load has put into memory with the checksums of the save, without another read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.threads import in_threads
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.checksums import StoredPart, checksum_of
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Box, Window, split_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.filled_rows import FilledRows
from dist_checkpointing.strategies.raw_chunks import SMALL_BYTES

_BLOCK_BYTES: Final = 2**22
"""At most so much of what does not lie in one run of CPU memory is copied at a time."""


FilledPart = tuple[StoredPart, torch.Tensor]
"""A part, with its checksum, that a load puts whole and as it is into the memory of one leaf."""


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """What a load puts into memory as it is, to be compared afterwards; small parts as rows."""

    parts: Sequence[FilledPart] = ()
    rows: Sequence[FilledRows] = ()


def split_filled(
    parts: Mapping[str, Sequence[StoredPart]], leaves: Sequence[ShardedTensor], index: Index
) -> tuple[list[FilledPart], list[StoredPart]]:
    """The stored parts that leaves get whole, and the other ones that leaves get something of."""
    wanted: dict[str, list[ShardedTensor]] = {}
    for leaf in leaves:
        wanted.setdefault(leaf.key, []).append(leaf)
    filled, others = [], []
    for key, known in parts.items():
        dtype = index.dtype_of(key).torch
        for part in known:
            values = None
            if part.digest is not None:
                found = (values_of(leaf, part, dtype) for leaf in wanted[key])
                values = next((memory for memory in found if memory is not None), None)
            if values is not None:
                filled.append((part, values))
            elif any(part.box.intersect(leaf.box) is not None for leaf in wanted[key]):
                others.append(part)
    return filled, others


def values_of(leaf: ShardedTensor, part: StoredPart, dtype: torch.dtype) -> torch.Tensor | None:
    """The memory of a leaf that holds a stored part; None if it does not hold all of it as is."""
    data, box, own, stored = leaf.data, leaf.box, leaf.flat_range, part.flat_range
    is_whole = own == stored and part.box == box and not leaf.prepend_axis_num
    if data is None or data.dtype is not dtype or not (is_whole or box.contains(part.box)):
        return None
    if is_whole:
        return data
    if own is None and stored is None:
        whole = data[(None,) * leaf.prepend_axis_num] if leaf.prepend_axis_num else data
        return whole[part.box.relative_to(box.offset).slices()]
    run = Window(0, box.shape, part.box.relative_to(box.offset)).contiguous_range()
    if run is None:
        return None
    start, stop = run if stored is None else (run[0] + stored[0], run[0] + stored[1])
    if own is not None:
        return data[start - own[0] : stop - own[0]] if own[0] <= start <= stop <= own[1] else None
    return data.view(-1)[start:stop] if data.is_contiguous() else None


def verify_filled(filled: Filled, options: StorageOptions, meter: Meter) -> None:
    """Compare the memory of filled parts with their checksums. Not collective.

    Raises:
        CheckpointingException: with key and box of every part that differs. The stored data may
            be good nevertheless: another read tells.
    """
    of_parts = sum(values.nbytes for _, values in filled.parts)
    meter.expect(of_parts + sum(int(own.num_bytes.sum()) for own in filled.rows))
    small = [own for own in filled.parts if own[1].nbytes <= SMALL_BYTES]
    large = [own for own in filled.parts if own[1].nbytes > SMALL_BYTES]

    def compare(own: FilledPart) -> tuple[StoredPart, int]:
        part, values = own
        found = checksum_of(_blocks(values))
        meter.add(values.nbytes)
        return part, found

    # Many small parts are work for the interpreter: threads would only take turns.
    with paused_collector():
        digests = [found for own in filled.rows for found in own.differing(meter.add)]
        digests += [compare(own) for own in small]
    digests += in_threads(compare, large, options.threads)
    findings = [
        Finding(
            "memory does not hold what was saved, though another read of it does",
            part.key,
            expected=f"{part.digest or 0:016x}",
            found=f"{found:016x} in {part.box}",
            remedy="Give each leaf memory of its own. If it has, memory or the file system of this"
            " machine changes what is read.",
        )
        for part, found in digests
        if found != part.digest
    ]
    if findings:
        raise CheckpointingException("what was loaded is not what is stored", findings)


def _blocks(values: torch.Tensor) -> Iterator[npt.NDArray[Any]]:
    """The values of a tensor on any device, as contiguous arrays in C order."""
    values = values.detach()
    if dtypes.is_plain_memory(values):
        yield dtypes.as_numpy(values)
        return
    for block in split_rows(Box.whole(tuple(values.shape)), _BLOCK_BYTES // values.itemsize):
        yield np.ascontiguousarray(dtypes.as_numpy(values[block.slices()].cpu()))

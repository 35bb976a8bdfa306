"""The values of a rank that are compared with those of other ranks, their digests and pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from dist_checkpointing.format import dtypes
from dist_checkpointing.format.checksums import bytes_of
from dist_checkpointing.format.geometry import Box, ravel_offset
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning.copies import Copies

SAMPLES: Final = 16
"""Saves after which ``ReplicaCheck.SAMPLE`` has looked at everything."""
_WHOLE_BYTES: Final = 1 << 20
"""A smaller copy is looked at as a whole, in one of the saves."""
_BLOCK_BYTES: Final = 1 << 24
_SEARCHED: Final = 4096
"""Pieces, and at least so many bytes a piece, in which the first difference is looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnValues:
    """Values that are compared with those of others: a shard, or a box of its global tensor."""

    unit: int
    leaf: ShardedTensor
    box: Box | None


def owned_values(copies: Copies, held: Sequence[ShardedTensor], rank: int) -> Iterator[OwnValues]:
    """What a rank compares: its copies, and the boxes of crossings for which it is asked."""
    has_copies, parts = copies.has_copies.tolist(), copies.own.tolist()
    leaves: dict[int, ShardedTensor] = {}
    for leaf, part in zip(held, parts, strict=True):
        leaves.setdefault(part, leaf)
        if has_copies[part]:
            yield OwnValues(part, leaf, None)
    first_ranks = copies.parts.ranks
    for unit, crossing in enumerate(copies.crossings, len(copies.parts)):
        for part in (crossing.main, crossing.part):
            if first_ranks[part] == rank:
                yield OwnValues(unit, leaves[part], crossing.box)


def flat_values(own: OwnValues) -> torch.Tensor:
    """The values of a unit in C order, on any device."""
    leaf, box = own.leaf, own.box
    assert leaf.data is not None
    data = leaf.data.detach()
    if box is None:
        return data.reshape(-1)
    inside = box.relative_to(leaf.box.offset)
    if leaf.flat_range is None:
        return data[(None,) * leaf.prepend_axis_num][inside.slices()].reshape(-1)
    # The box has no element outside of the range, so that its strides stay in the memory.
    start = ravel_offset(inside.offset, leaf.box.shape) - leaf.flat_range[0]
    strides = torch.empty(leaf.box.shape, device="meta").stride()
    step = data.stride(0)
    begin = data.storage_offset() + start * step
    return data.as_strided(box.shape, [step * own for own in strides], begin).reshape(-1)


def looked_at(values: torch.Tensor, unit: int, sample: int | None) -> tuple[int, torch.Tensor]:
    """The values that are looked at, and the position of the first; all if there is no sample."""
    begin, end = 0, len(values)
    if sample is not None and values.nbytes < _WHOLE_BYTES:
        end = end if unit % SAMPLES == sample else 0
    elif sample is not None:
        begin, end = len(values) * sample // SAMPLES, len(values) * (sample + 1) // SAMPLES
    return begin, values[begin:end]


def digest_of_values(values: torch.Tensor) -> bytes:
    """128 bits that stand for 1-D values on any device."""
    digest = xxhash.xxh3_128()
    # Of a tensor on a GPU no more than a piece is in memory at a time.
    step = len(values) if values.is_cpu else _BLOCK_BYTES // values.itemsize
    for start in range(0, len(values), step):
        digest.update(host_bytes(values[start : start + step]))
    return digest.digest()


def host_bytes(values: torch.Tensor) -> memoryview:
    return bytes_of(dtypes.as_numpy(values.cpu().contiguous()))


def piece_step(values: torch.Tensor) -> int:
    """Elements of a piece in which a difference is looked for."""
    return max(_SEARCHED // values.itemsize, -(-len(values) // _SEARCHED))


def piece_digests(values: torch.Tensor) -> list[bytes]:
    step = piece_step(values)
    starts = range(0, len(values), step)
    return [xxhash.xxh3_128_digest(host_bytes(values[start : start + step])) for start in starts]


def text_of(raw: bytes, dtype: torch.dtype) -> str:
    value = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)
    return repr(value[0].item())

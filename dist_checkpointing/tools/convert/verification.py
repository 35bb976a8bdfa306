"""Compares what a conversion reads with the checksums that its source keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import StoredPart, checksum_of, read_checksums
from dist_checkpointing.format.geometry import Box, boxes_of_part, split_rows
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.strategies.verification import not_covered

KeyBoxes = Sequence[tuple[str, Box]]
ReadBoxes = Callable[[KeyBoxes], list[torch.Tensor]]
PartLocation = Callable[[StoredPart], str]

_HASHED_BYTES = 4 * 2**20
"""Values that do not lie in one run are copied so many at a time to be hashed."""

_REMEDY = "Convert another checkpoint, or take it as it is: --no-verify (verify=False)."


class PartChecks:
    """The checksums of some tensors. Every part is compared once, when it is first read.

    A part that is read as a whole is compared as it was read. Of one that is not, all of it is read
    once more, a block at a time: so memory stays bounded, however large a part is.

    Attributes:
        most_bytes: Size of a block.
        num_bytes: Bytes that have been compared.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[StoredPart]], tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.most_bytes = _HASHED_BYTES
        self.num_bytes = 0
        self._parts = dict(parts)
        self._itemsizes = {key: tensors[key].dtype.itemsize for key in parts}
        self._waiting: dict[str, _Waiting] = {}
        self._lock = threading.Lock()

    def compare(
        self,
        wanted: KeyBoxes,
        values: Sequence[torch.Tensor],
        read: ReadBoxes,
        location: PartLocation,
    ) -> None:
        """Compare every part that meets what was read, unless that was done. From any thread.

        Raises:
            CorruptCheckpointError: for parts that are not what was saved.
        """
        findings = []
        for (key, box), tensor in zip(wanted, values, strict=True):
            for part in self._claim(key, box):
                itemsize = self._itemsizes[key]
                if box.contains(part.box):
                    own = tensor[part.box.relative_to(box.offset).slices()]
                    blocks = _blocks(own, part, _HASHED_BYTES // itemsize)
                else:
                    blocks = _read_blocks(part, read, self.most_bytes // itemsize)
                found = checksum_of(map(_elements, blocks))
                if found != part.digest:
                    findings.append(_damage(part, found, location(part)))
                with self._lock:
                    self.num_bytes += part.num_elements * itemsize
        if findings:
            raise CorruptCheckpointError("the source is not what was saved", findings)

    def _claim(self, key: str, box: Box) -> list[StoredPart]:
        """The parts that meet a box and that nobody has claimed."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                parts = self._parts.pop(key, None)
                if parts is None:
                    return []
                waiting = self._waiting[key] = _Waiting(parts)
            return waiting.take(box)


class _Waiting:
    """The parts of one tensor that have not been compared."""

    def __init__(self, parts: Sequence[StoredPart]) -> None:
        self._parts: Sequence[StoredPart] = parts
        self._offsets = _column([part.box.offset for part in parts])
        self._stops = _column([part.box.stop for part in parts])

    def take(self, box: Box) -> list[StoredPart]:
        """Those that meet a box; it has them no longer."""
        if not self._parts:
            return []
        start, stop = np.array(box.offset), np.array(box.stop)
        meets = ((self._offsets < stop) & (self._stops > start)).all(axis=1)
        taken = [self._parts[row] for row in np.flatnonzero(meets).tolist()]
        if taken:
            self._parts = [self._parts[row] for row in np.flatnonzero(~meets).tolist()]
            self._offsets, self._stops = self._offsets[~meets], self._stops[~meets]
        return taken


def checks_of(
    folder: Location, tensors: Mapping[str, StoredTensor], keys: Collection[str]
) -> PartChecks | None:
    """What the checksums of a checkpoint say about some of its tensors; None if it has no
    checksums.

    Raises:
        CorruptCheckpointError: if the checksums cannot be read, or do not speak of all there is.
    """
    parts: dict[str, list[StoredPart]] = {}
    any_kept = False
    for part in read_checksums(folder):
        any_kept = True
        if part.key in keys and part.key in tensors and part.digest is not None:
            parts.setdefault(part.key, []).append(part)
    if not any_kept:
        return None
    findings = []
    for key in sorted(keys):
        own = parts.get(key, ())
        if all(part.lies_in(tensors[key].global_shape) for part in own):
            findings += not_covered(tensors[key], own)
        else:
            findings.append(Finding("a checksum of what is no part of the tensor", key))
    if findings:
        findings = [replace(finding, remedy=_REMEDY) for finding in findings]
        raise CorruptCheckpointError("the source cannot be verified", findings)
    return PartChecks(parts, tensors)


def _blocks(own: torch.Tensor, part: StoredPart, most: int) -> Iterator[torch.Tensor]:
    """The values of a part in C order; all of its box was read."""
    if part.flat_range is None and own.is_contiguous():
        yield own
        return
    for run in boxes_of_part(Box.whole(part.box.shape), part.flat_range):
        for block in split_rows(run, most):
            yield own[block.slices()]


def _read_blocks(part: StoredPart, read: ReadBoxes, most: int) -> Iterator[torch.Tensor]:
    """The values of a part, read for it, in C order."""
    for run in boxes_of_part(part.box, part.flat_range):
        for block in split_rows(run, most):
            yield from read([(part.key, block)])


def _elements(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    return np.ascontiguousarray(tensor_memory.as_numpy(tensor))


def _column(rows: Sequence[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)


def _damage(part: StoredPart, found: int, where: str) -> Finding:
    return Finding(
        "checksum differs: bits were flipped after it was saved",
        part.key,
        expected=f"{part.digest or 0:016x}",
        found=f"{found:016x} in {part.box.offset} .. {part.box.stop}",
        path=where,
        remedy=_REMEDY,
    )

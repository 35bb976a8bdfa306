"""What is converted: a checkpoint, as a recipe changes it, compared with its checksums."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.checkpoint.checkpoint import Checkpoint, ObjectHandle
from dist_checkpointing.checkpoint.verify_checkpoint import stored_objects_damage
from dist_checkpointing.errors import CorruptCheckpointError, Finding, StateMismatchError
from dist_checkpointing.format.checksums import StoredPart, checksum_of, read_tables
from dist_checkpointing.format.geometry import Box, boxes_of_part, split_rows
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.seal import check_config, check_files, read_seal
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.planning.recipe import Derivation, Recipe, derive
from dist_checkpointing.planning.shard_table import Bools
from dist_checkpointing.serialization.recipes import source_leaves
from dist_checkpointing.storage.options import ReadMode, StorageOptions
from dist_checkpointing.strategies.safetensors.model_files import quantized_as
from dist_checkpointing.strategies.verification import FLIPPED, other_digest, parts_of, stored_chunk
from dist_checkpointing.tools.values import Budget, ReusedMemory

KeyBoxes = Sequence[tuple[str, Box]]

_STRIDED_BLOCK_BYTES = 16 * 2**20
_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 512
_HASHED_BYTES = 4 * 2**20
"""Values that do not lie in one run are copied so many at a time to be hashed."""

_REMEDY = "Convert another checkpoint, or take it as it is: --no-verify (verify=False)."


class Source:
    """Tensors and objects to convert, as a recipe makes them, read from any thread.

    ``made`` is what the recipe makes. What is read is compared with the checksums in ``checks``.

    Raises:
        StateMismatchError: naming the rule that does not fit.
    """

    def __init__(self, opened: Checkpoint, recipe: Recipe) -> None:
        self.opened = opened
        # Threads are the caller's, and pages of a mapped file would count as memory in use.
        opened.reads.options = StorageOptions(
            threads=1, buffer_bytes=_STRIDED_BLOCK_BYTES, read_mode=ReadMode.PREAD
        )
        opened.reads.memory = self._memory = ReusedMemory()
        self.checks: PartChecks = PartChecks({}, opened.index, opened.read, self._location)
        self.made: Derivation = derive(recipe, opened.index, opened.objects)
        findings = [
            Finding("no template says what fills it", key, remedy="Fill with zeros.")
            for key, tensor in self.made.tensors.items()
            if any(p.key is None and p.fill == "template" for p in tensor.pieces)
        ]
        StateMismatchError.raise_if(findings, "the recipe needs a template")
        self.index: Index = self.made.index
        self.objects: Mapping[str, ObjectHandle] = {
            new: opened.objects[old] for new, old in self.made.objects.items()
        }

    def common(self) -> dict[Any, Any]:
        """The common state to write: the configuration of a model says how it is quantized now."""
        return quantized_as(self.opened.common, self.opened.path, self.made.tensors)

    def limit(self, budget: Budget) -> None:
        """Let checks take no more memory than the budget allows."""
        self.checks.most_bytes = budget.box_bytes
        self._memory.most_bytes = budget.threads * budget.box_bytes

    def find_checksums(self) -> bool:
        """Compare what is read from now on; False if the source keeps no checksums.

        Common state, objects, and all that describes the tensors are compared here. It is an error
        if the checksums do not speak of all there is.
        """
        opened = self.opened
        keys = {stored for tensor in self.made.tensors.values() for stored in tensor.sources}
        seal, tables = read_seal(opened.folder), read_tables(opened.folder)
        if seal is not None and not seal.is_open:
            names = [file.name for file in seal.files.values() if file.digest is not None]
            _refuse([*check_config(seal, opened.folder), *check_files(seal, opened.folder, names)])
            cells = [cell for table in tables for cell in table.objects()]
            _refuse(stored_objects_damage(opened, cells))
        has_checksums = any((table.is_object == 0).any() for table in tables)
        if has_checksums:
            parts, findings = parts_of(tables, sorted(keys), opened.index)
            _refuse([replace(f, remedy=_REMEDY) for f in findings], "the source cannot be verified")
            self.checks = PartChecks(parts, opened.index, opened.read, self._location)
        return has_checksums

    def read(self, wanted: KeyBoxes) -> list[torch.Tensor]:
        """A new contiguous CPU tensor for each box of a tensor."""
        made = self.made
        if not made.counts:
            return self.checks.read(wanted)
        leaves = [ShardedTensor.of_box(self.index[key], box) for key, box in wanted]
        for leaf in leaves:
            # Takes no room until it is written: what is stored as it is wanted replaces it.
            leaf.init_data("cpu")
        whole = {id(leaf.data) for leaf in leaves}
        steps: list[Callable[[], None]] = []
        parts = (part for leaf in leaves for part in source_leaves(made, leaf, steps))
        sized = ((part, part.box.num_elements * made.stored[part.key].dtype.itemsize)
                 for part in parts)  # fmt: skip
        for batch in itertools.chain(in_batches(sized, _TOGETHER_BYTES, _MOST_TOGETHER), [[]]):
            stored = self.checks.read([(part.key, part.box) for part in batch])
            for part, values in zip(batch, stored, strict=True):
                assert part.data is not None
                if id(part.data) in whole and part.data.dtype == values.dtype:
                    part.data.data = values
                else:
                    part.data.copy_(values)
            while steps:  # what they need was read, and is given back before more is
                steps.pop(0)()
        return [leaf.data for leaf in leaves if leaf.data is not None]

    def _location(self, part: StoredPart) -> str:
        number = stored_chunk(part, self.opened.index).index or 0
        return self.opened.reads.location(self.opened.index, part.key, part.box, number)


class PartChecks:
    """The checksums of some tensors. Every part is compared once, when it is first read.

    A part that is read as a whole is compared as it was read. Of one that is not, all of it is read
    once more by ``read``, a block of ``most_bytes`` at a time: so memory stays bounded, however
    large a part is. ``num_bytes`` have been compared.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[StoredPart]],
        tensors: Mapping[str, StoredTensor],
        read: Callable[[KeyBoxes], list[torch.Tensor]],
        location: Callable[[StoredPart], str],
    ) -> None:
        self.most_bytes = _HASHED_BYTES
        self.num_bytes: int = 0
        # The first and last corners of the boxes: [part, 2, axis].
        self._left: dict[str, tuple[Sequence[StoredPart], npt.NDArray[np.int64]]] = {
            key: (own, np.array([(part.box.offset, part.box.stop) for part in own], np.int64))
            for key, own in parts.items()
            if own
        }
        self._tensors = tensors
        self._read, self._location = read, location
        self._lock = threading.Lock()

    def read(self, wanted: KeyBoxes) -> list[torch.Tensor]:
        """Read boxes, and compare every part that meets one, unless that was done. From any
        thread.
        """
        values = self._read(wanted)
        findings = []
        for (key, box), tensor in zip(wanted, values, strict=True):
            for part in self._claim(key, box):
                found = checksum_of(
                    np.ascontiguousarray(tensor_memory.as_numpy(block))
                    for block in self._blocks(part, box, tensor)
                )
                if found != part.digest:
                    details = {"path": self._location(part), "remedy": _REMEDY}
                    findings.append(other_digest(FLIPPED, part, found, **details))
                with self._lock:
                    self.num_bytes += part.num_elements * self._tensors[key].dtype.itemsize
        _refuse(findings)
        return values

    def _claim(self, key: str, box: Box) -> list[StoredPart]:
        """The parts that meet a box and that nobody has claimed."""
        with self._lock:
            if key not in self._left:
                return []
            parts, corners = self._left.pop(key)
            begins, ends = corners[:, 0], corners[:, 1]
            meets: Bools = np.all((begins < box.stop) & (ends > box.offset), axis=1)
            if not meets.all():
                self._left[key] = [*itertools.compress(parts, ~meets)], corners[~meets]
            return [*itertools.compress(parts, meets)]

    def _blocks(self, part: StoredPart, box: Box, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The values of a part in C order: of the box that was read, or read for it."""
        is_read = box.contains(part.box)
        most = _HASHED_BYTES if is_read else self.most_bytes
        most //= self._tensors[part.key].dtype.itemsize
        for run in boxes_of_part(part.box, part.flat_range):
            for block in split_rows(run, most):
                if is_read:
                    yield tensor[block.relative_to(box.offset).slices()]
                else:
                    yield from self._read([(part.key, block)])


def _refuse(findings: Sequence[Finding], message: str = "the source is not what was saved") -> None:
    CorruptCheckpointError.raise_if(findings, message)

"""What a recipe makes of a source: converted like a source of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import Finding, StateMismatchError
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.derived_tensors import Piece
from dist_checkpointing.planning.recipe import Recipe, derive
from dist_checkpointing.tools.convert.sources import Source
from dist_checkpointing.tools.convert.verification import PartChecks

_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 512


class RecipeSource(Source):
    """Tensors that a recipe makes of another source, read box by box.

    Args:
        source: where they come from.
        recipe: rules.

    Attributes:
        made: What the recipe makes of it.

    Raises:
        StateMismatchError: naming the rule that does not fit.
    """

    def __init__(self, source: Source, recipe: Recipe) -> None:
        super().__init__(source.path)
        self._source = source
        self.made = derive(recipe, source.index, source.objects)
        findings = [
            Finding("no template says what fills it", key, remedy="Fill with zeros.")
            for key, tensor in self.made.tensors.items()
            if any(piece.key is None and piece.fill == "template" for piece in tensor.pieces)
        ]
        if findings:
            raise StateMismatchError("the recipe needs a template", findings)

    @property
    def kind(self) -> str:
        return self._source.kind

    @property
    def index(self) -> Index:
        return self.made.index

    @cached_property
    def objects(self) -> Mapping[str, Ints]:
        return {new: self._source.objects[old] for new, old in self.made.objects.items()}

    @property
    def common(self) -> dict[Any, Any]:
        return self._source.common

    def object_cell(self, key: str, cell: Ints) -> Any:
        return self._source.object_cell(self.made.objects[key], cell)

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        # Empty memory takes no room until it is written: what comes as it is replaces it.
        found = [
            torch.empty(box.shape, dtype=self.made.tensors[key].dtype.torch) for key, box in wanted
        ]
        for batch in in_batches(self._pieces(wanted), _TOGETHER_BYTES, _MOST_TOGETHER):
            stored = [(piece.key or "", piece.source_box) for _, piece in batch]
            for (number, piece), values in zip(batch, self._source.read(stored), strict=True):
                own, box = found[number], wanted[number][1]
                is_whole = piece.box == box and piece.axes == tuple(range(own.ndim))
                if is_whole and values.shape == own.shape:
                    found[number] = values.to(own.dtype)
                else:
                    target = own[piece.box.relative_to(box.offset).slices()]
                    piece.as_source(target).copy_(values)
        for own, (key, box) in zip(found, wanted, strict=True):
            for piece in self.made.tensors[key].parts(box):
                if piece.key is None:
                    own[piece.box.relative_to(box.offset).slices()] = 0
        return found

    def _pieces(self, wanted: Sequence[tuple[str, Box]]) -> Iterator[tuple[tuple[int, Piece], int]]:
        """What is stored of each wanted box, and the bytes that it takes."""
        for number, (key, box) in enumerate(wanted):
            for piece in self.made.tensors[key].parts(box):
                if piece.key is not None:
                    itemsize = self.made.stored[piece.key].dtype.itemsize
                    yield (number, piece), piece.box.num_elements * itemsize

    def checksums(self, keys: Collection[str]) -> PartChecks | None:
        tensors = self.made.tensors
        return self._source.checksums({own for key in keys for own in tensors[key].sources})

    def verify_with(self, checks: PartChecks) -> None:
        self._source.verify_with(checks)

    def limit_mapped(self, most_bytes: int) -> None:
        self._source.limit_mapped(most_bytes)

    def files(self) -> tuple[Location, ...]:
        return self._source.files()

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

"""What a recipe changes in a save: the parts of new tensors that the shards of a rank fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, StateMismatchError
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import ShardedBase, ShardedTensor, tensor_memory
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.mapping.state_dict_parts import StateDictParts, with_leaves
from dist_checkpointing.planning.derived_tensors import DerivedTensor, Piece
from dist_checkpointing.planning.recipe import Derivation, Recipe, derive, require_recipe
from dist_checkpointing.serialization.load_recipe import boxes_of, shapes_of
from dist_checkpointing.threads import paused_collector

Shapes = Mapping[str, tuple[Ints, tensor_memory.DType]]

_REMEDY = "Dequantize on load; save without Quantize, and convert with it afterwards."


def changed_state(recipe: Recipe, state_dict: Mapping[Any, Any], comm: Comm) -> dict[Any, Any]:
    """A state dict with what a recipe makes of the sharded leaves of all ranks. Collective.

    New tensors are views of the given ones; what is cast is so when it is written, see ``cast_by``.

    Raises:
        TypeError: if ``recipe`` is no Recipe.
        InvalidShardingError: if ranks have tensors of other shapes or dtypes under one key, or a
            shard holds a part of a block that would be quantized.
        StateMismatchError: naming the first rule that does not fit, or what it would dequantize.
    """
    require_recipe(recipe)
    with comm.agreed("describing what the recipe changes"):
        parts = StateDictParts.of(state_dict)
        shapes = shapes_of(parts.tensors.values())
        objects = [leaf.key for leaf in parts.objects.values()]
    of_ranks = comm.all_gather((shapes, objects))
    with comm.agreed("applying the recipe"), paused_collector():
        index = _index_of([shapes for shapes, _ in of_ranks])
        made = derive(recipe, index, dict.fromkeys(key for _, keys in of_ranks for key in keys))
        findings = [
            Finding("a save neither quantizes nor dequantizes", key, remedy=_REMEDY)
            for key, tensor in made.tensors.items()
            if any(piece.quantization for piece in tensor.pieces)
        ]
        if findings:
            raise StateMismatchError("the recipe is for loads and conversions", findings)
        leaves: list[ShardedBase] = [*_tensors(made, parts.tensors.values(), comm.rank)]
        new_names = defaultdict[str, list[str]](list)
        for new, old in made.objects.items():
            new_names[old].append(new)
        leaves += [
            replace(leaf, key=new) for leaf in parts.objects.values() for new in new_names[leaf.key]
        ]
    return with_leaves(parts.common, leaves)


def _index_of(of_ranks: Iterable[Shapes]) -> Index:
    found: dict[str, tuple[Ints, tensor_memory.DType]] = {}
    findings = []
    for rank, shapes in enumerate(of_ranks):
        for key, (shape, dtype) in shapes.items():
            expected = found.setdefault(key, (shape, dtype))
            if expected != (shape, dtype):
                first, own = (f"{d.name}{list(s)}" for s, d in (expected, (shape, dtype)))
                findings.append(
                    Finding("other ranks have another tensor", key, first, own, (rank,))
                )
    if findings:
        raise InvalidShardingError("the recipe cannot be applied", findings)
    return Index.of(StoredTensor.undivided(key, dtype, s) for key, (s, dtype) in found.items())


def _tensors(
    made: Derivation, leaves: Iterable[ShardedTensor], rank: int
) -> Iterator[ShardedTensor]:
    """The parts of new tensors that the leaves of a rank fill; rank 0 adds what nothing fills."""
    users = defaultdict[str, list[tuple[str, DerivedTensor, Piece]]](list)
    for key, tensor in made.tensors.items():
        for piece in tensor.pieces:
            if piece.key is not None:
                users[piece.key].append((key, tensor, piece))
            elif rank == 0:
                zeros = torch.zeros((), dtype=tensor.dtype.torch).expand(piece.box.shape)
                yield _part(key, tensor, piece.box, zeros)
        if rank == 0 and not tensor.pieces:
            yield _part(key, tensor, Box.whole(tensor.shape), torch.empty(tensor.shape))
    for leaf in leaves:
        for key, tensor, piece in users[leaf.key]:
            if made.stored_as(tensor) is not None:
                yield _renamed(leaf, key, tensor)
                continue
            for box, values in boxes_of(leaf):
                part = piece.filled_by(box)
                if part is None:
                    continue
                place = part.source_box.relative_to(box.offset).slices()
                own = None if values is None else part.from_source(values[place])
                new = _part(key, tensor, part.box, own)
                new.replica_id = leaf.replica_id
                yield new


def _renamed(leaf: ShardedTensor, key: str, tensor: DerivedTensor) -> ShardedTensor:
    renamed = shallow_copy(leaf)
    renamed.key, renamed.dtype, renamed.cast_by = key, tensor.dtype.torch, "planner"
    return renamed


def _part(key: str, tensor: DerivedTensor, box: Box, values: torch.Tensor | None) -> ShardedTensor:
    whole = StoredTensor.undivided(key, tensor.dtype, tensor.shape)
    part = ShardedTensor.of_box(whole, box)
    part.data, part.cast_by = values, "planner"
    return part

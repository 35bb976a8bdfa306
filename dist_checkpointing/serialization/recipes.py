"""What a recipe changes: which boxes of stored tensors fill what a load wants, and which parts of
new tensors the shards of a save fill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from os import PathLike
from typing import Any

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, StateMismatchError, near_names
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.format.geometry import Box, Ints, boxes_of_part, values_of_part
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StoredState,
    tensor_memory,
)
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.mapping.state_dict_parts import StateDictParts, with_leaves
from dist_checkpointing.planning.derived_tensors import DerivedTensor, Piece
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.planning.recipe import Derivation, Recipe, derive, require_recipe
from dist_checkpointing.strategies.selection import OpenedCheckpoint, open_checkpoint
from dist_checkpointing.threads import paused_collector

Steps = list[Callable[[], None]]
"""What makes values of what was read, in memory."""

_REMEDY_OF_OBJECTS = (
    "Remove it from the template, or keep the template's by the rule missing with fill='template'."
)


def preview_recipe(
    recipe: Recipe,
    checkpoint_dir: str | PathLike[str],
    template: ShardedStateDict | None = None,
) -> Derivation:
    """What a recipe makes of a checkpoint; ``str()`` of it says what comes from where.

    Not collective. No tensor is read.

    Args:
        recipe: rules.
        checkpoint_dir: a committed checkpoint.
        template: what this process would load, if rules depend on it.

    Raises:
        StateMismatchError: naming the rule that does not fit.

    Example:
        >>> from dist_checkpointing.planning import Recipe, Rename
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> made = preview_recipe(Recipe(Rename("w", to="weight")), "ckpt")
        >>> for line in str(made).splitlines()[:2]:
        ...     print(line)
        rule 1: rename 'w', to='weight': 1 matched
        weight  float32[4] <- w
    """
    folder = as_local_folder(checkpoint_dir)
    strategies = open_checkpoint(folder)
    index = strategies.sharded.make_reader(folder).read_metadata()
    parts = None if template is None else StateDictParts.of(template)
    objects = {leaf.key for leaf in strategies.objects(folder).values()}
    return _derived(recipe, index, objects, parts)


def _derived(
    recipe: Recipe, index: Index, objects: Iterable[str], parts: StateDictParts | None
) -> Derivation:
    if parts is None:
        return derive(recipe, index, objects)
    wanted_objects = [leaf.key for leaf in parts.objects.values()]
    return derive(recipe, index, objects, shapes_of(parts.tensors.values()), wanted_objects)


def shapes_of(leaves: Iterable[ShardedTensor]) -> dict[str, tuple[Ints, tensor_memory.DType]]:
    """Global shape and dtype of what a template wants, by key."""
    return {
        leaf.key: (
            tuple(leaf.global_shape),
            tensor_memory.from_torch(
                leaf.dtype if leaf.data is None else leaf.data.dtype, key=leaf.key
            ),
        )
        for leaf in leaves
    }


def derived_index(made: Derivation) -> Index:
    """The tensors that a recipe makes, as if each was stored as one chunk."""
    shapes = [tensor.shape for tensor in made.tensors.values()]
    dtypes = [tensor.dtype.name for tensor in made.tensors.values()]
    return Index([*made.tensors], dtypes, shapes, shapes, {}, {})


def derived_state(recipe: Recipe | None, stored: StoredState) -> StoredState:
    """What a recipe makes of what is stored, for an object that makes its template of that."""
    if recipe is None:
        return stored
    index = Index.of(
        StoredTensor.undivided(key, tensor_memory.from_torch(dtype, key=key), shape)
        for key, (shape, dtype) in stored.tensors.items()
    )
    made = derive(recipe, index)
    sources = {key: tensor.sources for key, tensor in made.tensors.items()}
    tensors = {key: (tensor.shape, tensor.dtype.torch) for key, tensor in made.tensors.items()}
    return replace(stored, tensors=tensors, sources=sources)


def apply_recipe(recipe: Recipe, opened: OpenedCheckpoint, parts: StateDictParts) -> Derivation:
    """Apply a recipe to what is stored, for a template that was taken apart. Collective."""
    stored_objects = opened.object_keys()
    with opened.comm.agreed("applying the recipe"), paused_collector():
        return _derived(recipe, opened.index, stored_objects, parts)


@contextmanager
def explaining(
    made: Derivation, tensors: Iterable[ShardedTensor], objects: Iterable[ShardedObject]
) -> Iterator[None]:
    """Let the body compare a template with what a recipe makes; say more if it does not fit."""
    findings = [
        Finding("not in the checkpoint", leaf.key, remedy=_REMEDY_OF_OBJECTS)
        for leaf in objects
        if leaf.key not in made.objects and leaf.key not in made.kept_objects
    ]
    findings += [
        Finding(
            "the template has no values to keep",
            leaf.key,
            remedy="Give it data, or fill with zeros.",
        )
        for leaf in tensors
        if leaf.data is None and leaf.key in made.tensors and keeps_values(made, leaf)
    ]
    try:
        yield
    except StateMismatchError as error:
        findings = [*(_explained(made, finding) for finding in error.findings), *findings]
    if findings:
        findings += made.unused
        message = "the template does not fit what the recipe makes of the checkpoint"
        raise StateMismatchError(message, findings)


def keeps_values(made: Derivation | None, leaf: ShardedTensor) -> bool:
    """Whether a wanted tensor keeps values of the template, by the rules of a recipe."""
    pieces = () if made is None else made.tensors[leaf.key].parts(leaf.box)
    return any(piece.key is None and piece.fill == "template" for piece in pieces)


def _explained(made: Derivation, finding: Finding) -> Finding:
    """With what the recipe makes of what is stored under nearly that name."""
    key, stored, derived = finding.key, made.stored, made.tensors
    if key is None or not finding.problem.startswith("not in the checkpoint"):
        return finding
    remedy = "Remove it from the template, or say with a rule (missing) what fills it."
    for known in [key] if key in stored else near_names(key, stored, 1):
        users = [new for new, tensor in derived.items() if known in tensor.sources]
        if users != [known]:
            texts = ", ".join(map(repr, users[:3])) + (", ..." if len(users) > 3 else "")
            remedy = f"Stored is {known!r}, of which the recipe makes {texts or 'nothing'}."
    return replace(finding, remedy=remedy)


def sources_of(
    made: Derivation, wanted: WantedTable, objects: Mapping[TreePath, ShardedObject], comm: Comm
) -> tuple[WantedTable, Mapping[TreePath, ShardedObject], Steps]:
    """What is read into parts of the memory of wanted tensors, and for wanted objects; and what is
    left to do after it. Collective.

    What nothing stored fills becomes zero, unless it stays as it is.
    """
    steps: Steps = []
    with comm.agreed("applying the recipe"), paused_collector():
        sources = (source_leaves(made, leaf, steps) for leaf in wanted.tensors)
        table = WantedTable.of(chain.from_iterable(sources))
        cells = {
            path: replace(leaf, key=made.objects[leaf.key])
            for path, leaf in objects.items()
            if leaf.key in made.objects
        }
    return table, cells, steps


def kept_values(
    made: Derivation | None, template: Mapping[TreePath, ShardedObject]
) -> dict[TreePath, object]:
    """Values of sharded objects that stay as they are in the template, by the rules of a recipe."""
    if made is None:
        return {}
    return {path: leaf.data for path, leaf in template.items() if leaf.key in made.kept_objects}


def boxes_of(leaf: ShardedTensor) -> Iterable[tuple[Box, torch.Tensor | None]]:
    """The boxes that make up a shard, and the memory of each, if there is any."""
    if leaf.data is None:
        return zip(boxes_of_part(leaf.box, leaf.flat_range), repeat(None))
    prepended = 0 if leaf.flat_range else leaf.prepend_axis_num
    data = leaf.data.detach()[(None,) * prepended]
    return values_of_part(leaf.box, leaf.flat_range, data)


def source_leaves(
    derivation: Derivation, leaf: ShardedTensor, steps: Steps
) -> Iterator[ShardedTensor]:
    """The boxes of stored tensors that fill a wanted shard.

    Each has a view of the memory of the shard, if that has memory; then parts that nothing stored
    fills are set to zero on the way. What is left to do is added to ``steps`` in its order, each
    once all that it needs was given out.
    """
    tensor = derivation.tensors[leaf.key]
    stored = derivation.stored_as(tensor)
    if stored is not None:
        renamed = shallow_copy(leaf)
        renamed.key = stored.key
        yield renamed
        return
    for box, memory in boxes_of(leaf):
        yield from _leaves_of_box(derivation, leaf, tensor, box, memory, steps)


def _leaves_of_box(
    made: Derivation,
    leaf: ShardedTensor,
    tensor: DerivedTensor,
    box: Box,
    memory: torch.Tensor | None,
    steps: Steps,
) -> Iterator[ShardedTensor]:
    for piece in tensor.parts(box):
        values = None if memory is None else memory[piece.box.relative_to(box.offset).slices()]
        if piece.key is None:
            if values is not None and piece.fill == "zeros":
                values.zero_()
            continue
        values = None if values is None else piece.as_source(values)
        if piece.quantization is None:
            source = ShardedTensor.of_box(made.stored[piece.key], piece.source_box)
            if values is not None:
                source.data, source.dtype = values, values.dtype
            yield source
            continue
        # Only tensors that keep values may still share memory, where codes would be taken twice.
        is_shared = values is not None and keeps_values(made, leaf)
        for task in piece.quantization.tasks(piece.source_box, values, is_shared):
            for read in task.reads:
                yield from _leaves_of_box(made, leaf, *read, steps)
            if task.step is not None:
                steps.append(task.step)


# In a save.

Shapes = Mapping[str, tuple[Ints, tensor_memory.DType]]

_REMEDY_OF_QUANTIZED = "Dequantize on load; save without Quantize, and convert with it afterwards."


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
            Finding("a save neither quantizes nor dequantizes", key, remedy=_REMEDY_OF_QUANTIZED)
            for key, tensor in made.tensors.items()
            if any(piece.quantization for piece in tensor.pieces)
        ]
        StateMismatchError.raise_if(findings, "the recipe is for loads and conversions")
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
                problem = "other ranks have another tensor"
                findings.append(Finding(problem, key, first, own, (rank,)))
    InvalidShardingError.raise_if(findings, "the recipe cannot be applied")
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
    part = ShardedTensor.of_box(StoredTensor.undivided(key, tensor.dtype, tensor.shape), box)
    part.data, part.cast_by = values, "planner"
    return part

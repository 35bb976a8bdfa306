"""What a recipe changes in a load: which boxes of which stored tensors fill what is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    Finding,
    StateMismatchError,
    UnsupportedFormatError,
    near_names,
)
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints, boxes_of_part
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
from dist_checkpointing.mapping.nested_dicts import Position
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.mapping.state_dict_parts import Partition, partition
from dist_checkpointing.planning.recipe import Derivation, Recipe, derive
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.strategies.base import handles_objects
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy
from dist_checkpointing.strategies.selection import (
    LoadStrategies,
    open_checkpoint,
)
from dist_checkpointing.threads import paused_collector

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
        >>> print(preview_recipe(Recipe(Rename("w", to="weight")), "ckpt"))
        rule 1: rename 'w', to='weight': 1 matched
        weight  float32[4] <- w
        1 tensors: 1 by rules, 0 as stored; 0 stored ones left out; 0 of 1 rules match nothing
    """
    folder = as_local_folder(checkpoint_dir)
    found = open_checkpoint(folder)
    index = _planned(found).make_reader(folder).read_metadata()
    parts = None if template is None else partition(template)
    return _derived(recipe, index, _objects(found, folder), parts)


def object_keys(found: LoadStrategies, folder: Location, comm: Comm) -> set[str]:
    """Keys of the sharded objects of a checkpoint, listed by rank 0. Collective."""
    return comm.from_rank0("listing the sharded objects", lambda: _objects(found, folder))


def _objects(found: LoadStrategies, folder: Location) -> set[str]:
    strategy = found.sharded if handles_objects(found.sharded) else found.common
    metadata = strategy.load_sharded_metadata(folder)
    return {leaf.key for leaf in metadata.values() if isinstance(leaf, ShardedObject)}


def _planned(found: LoadStrategies) -> PlannedLoadStrategy:
    if isinstance(found.sharded, PlannedLoadStrategy):
        return found.sharded
    finding = Finding("its strategy makes no plans", found=type(found.sharded).__name__)
    raise UnsupportedFormatError("this checkpoint cannot be loaded by a recipe", [finding])


def _derived(
    recipe: Recipe, index: Index, objects: Iterable[str], parts: Partition | None
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


def made_state(recipe: Recipe | None, stored: StoredState) -> StoredState:
    """What a recipe makes of what is stored, for an object that makes its template of that."""
    if recipe is None:
        return stored
    index = Index.of(
        StoredTensor.undivided(key, tensor_memory.from_torch(dtype, key=key), shape)
        for key, (shape, dtype) in stored.tensors.items()
    )
    made = derive(recipe, index).tensors
    return replace(
        stored,
        tensors={key: (own.shape, own.dtype.torch) for key, own in made.items()},
        sources={key: own.sources for key, own in made.items()},
    )


def apply_recipe(
    recipe: Recipe | None,
    found: LoadStrategies,
    index: Index | None,
    parts: Partition,
    folder: Location,
    comm: Comm,
) -> RecipeLoad | None:
    """Apply a recipe to what is stored, for a template that was taken apart. Collective."""
    if recipe is None:
        return None
    objects = object_keys(found, folder, comm)
    with comm.agreed("applying the recipe"), paused_collector():
        _planned(found)
        assert index is not None
        made = _derived(recipe, index, objects, parts)
        to_read = {
            path: replace(leaf, key=made.objects[leaf.key])
            for path, leaf in parts.objects.items()
            if leaf.key in made.objects
        }
        kept = {
            path: leaf.data for path, leaf in parts.objects.items() if leaf.key in made.kept_objects
        }
    return RecipeLoad(made, to_read, kept)


@dataclass(frozen=True, slots=True, eq=False)
class RecipeLoad:
    """A load of what a recipe makes of a checkpoint.

    Attributes:
        made: What the recipe makes of it.
        objects: Sharded objects to read, by path, with the keys that they have in the checkpoint.
        kept: Values of sharded objects that stay as they are in the template, by path.
    """

    made: Derivation
    objects: Mapping[TreePath, ShardedObject]
    kept: Mapping[TreePath, Any]

    @property
    def keys(self) -> set[str]:
        """Keys of all that there is for the template."""
        return {*self.made.tensors, *self.made.objects, *self.made.kept_objects}

    @property
    def shapes(self) -> dict[str, tuple[Ints, torch.dtype]]:
        """Global shape and dtype of each tensor."""
        return {key: (own.shape, own.dtype.torch) for key, own in self.made.tensors.items()}

    @contextmanager
    def checking(
        self,
        tensors: Mapping[TreePath, ShardedTensor],
        objects: Mapping[TreePath, ShardedObject],
    ) -> Iterator[None]:
        """Let the body compare the template; say more if it does not fit."""
        findings = [
            Finding("not in the checkpoint", leaf.key, remedy=_REMEDY_OF_OBJECTS)
            for path, leaf in objects.items()
            if path not in self.objects and path not in self.kept
        ]
        for leaf in tensors.values():
            own = self.made.tensors.get(leaf.key)
            fills = () if own is None or leaf.data is not None else own.parts(leaf.box)
            if any(piece.key is None and piece.fill == "template" for piece in fills):
                remedy = "Give it data, or fill with zeros."
                findings.append(
                    Finding("the template has no values to keep", leaf.key, remedy=remedy)
                )
        message = "the template does not fit what the recipe makes of the checkpoint"
        try:
            yield
        except StateMismatchError as error:
            findings = [*map(self._explained, error.findings), *findings]
        if findings:
            findings += [Finding(f"{text} matches nothing") for text in self.made.idle]
            raise StateMismatchError(message, findings)

    def _explained(self, finding: Finding) -> Finding:
        """With what the recipe makes of what is stored under nearly that name."""
        key, stored = finding.key, self.made.stored
        if key is None or key in self.made.tensors:
            return finding
        remedy = "Remove it from the template, or say with a rule (missing) what fills it."
        near = [key] if key in stored else near_names(key, stored, 1)
        for own in near:
            made = [new for new, tensor in self.made.tensors.items() if own in tensor.sources]
            if made != [own]:
                texts = ", ".join(map(repr, made[:3])) + (", ..." if len(made) > 3 else "")
                remedy = f"Stored is {own!r}, of which the recipe makes {texts or 'nothing'}."
        return replace(finding, remedy=remedy)

    def to_read(
        self, wanted: WantedLeaves, objects: Mapping[TreePath, ShardedObject], comm: Comm
    ) -> tuple[WantedLeaves, dict[TreePath, ShardedObject]]:
        """What is read into parts of the memory of wanted tensors, and for objects. Collective.

        What nothing stored fills becomes zero, unless it stays as it is.
        """
        with comm.agreed("applying the recipe"), paused_collector():
            rows = [own for leaf in wanted.tensors.leaves for own in source_leaves(self.made, leaf)]
        leaves: dict[TreePath, ShardedBase] = {
            (Position(number),): leaf for number, leaf in enumerate(rows)
        }
        cells = {path: leaf for path, leaf in self.objects.items() if path in objects}
        return WantedLeaves(leaves), cells


def source_leaves(made: Derivation, leaf: ShardedTensor) -> Iterator[ShardedTensor]:
    """The boxes of stored tensors that fill a wanted shard.

    Each has a view of the memory of the shard, if that has memory; then parts that nothing stored
    fills are set to zero on the way.
    """
    tensor = made.tensors[leaf.key]
    stored = made.stored_as(tensor)
    if stored is not None:
        renamed = shallow_copy(leaf)
        renamed.key = stored.key
        yield renamed
        return
    for box, memory in _boxes(leaf):
        for piece in tensor.parts(box):
            values = None if memory is None else memory[piece.box.relative_to(box.offset).slices()]
            if piece.key is not None:
                own = ShardedTensor.of_box(made.stored[piece.key], piece.source_box)
                if values is not None:
                    own.data, own.dtype = piece.as_source(values), values.dtype
                yield own
            elif values is not None and piece.fill == "zeros":
                values.zero_()


def _boxes(leaf: ShardedTensor) -> Iterator[tuple[Box, torch.Tensor | None]]:
    """The boxes that make up a shard, each with its memory."""
    data = None if leaf.data is None else leaf.data.detach()
    if leaf.flat_range is None:
        yield leaf.box, None if data is None else data[(None,) * leaf.prepend_axis_num]
        return
    position = 0
    for box in boxes_of_part(leaf.box, leaf.flat_range):
        count = box.num_elements
        yield box, None if data is None else data[position : position + count].view(box.shape)
        position += count

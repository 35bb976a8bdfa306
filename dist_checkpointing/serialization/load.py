"""load: open, index, partition, compare, plan, read, rebuild."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, TypeVar, overload

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.defaults import chosen_comm
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import data_folder
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import LARGE_BYTES, Index, large_tensors
from dist_checkpointing.format.leftovers import number_of_save
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedStateDict,
    ShardedStateful,
    ShardedTensor,
    StateDict,
    StoredState,
)
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.mapping.state_dict_parts import Partition, partition
from dist_checkpointing.planning.load_plan import TensorColumns
from dist_checkpointing.planning.recipe import Recipe, require_recipe
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.serialization.load_checks import (
    check_access,
    noting_filled,
    rebuilt,
    require_same_save,
)
from dist_checkpointing.serialization.load_recipe import (
    RecipeLoad,
    apply_recipe,
    made_state,
    object_keys,
)
from dist_checkpointing.serialization.load_verification import Verification
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from dist_checkpointing.strategies.selection import (
    LoadStrategies,
    Selection,
    open_checkpoint,
)
from dist_checkpointing.strategies.unplanned_strategies import (
    open_stored,
    read_wanted,
    replaced,
    split_objects,
    stored_shapes,
)
from dist_checkpointing.threads import paused_collector
from dist_checkpointing.validation.load_errors import (
    Cast,
    StoredTensors,
    clear_partly_stored,
    compare,
    handle_strictly,
    with_memory,
)
from dist_checkpointing.validation.save_errors import check_filled, refuse_distributed
from dist_checkpointing.validation.strictness import StrictHandling, parse_strict_flag

T = TypeVar("T", bound=ShardedBase)

Verify = bool | Literal["restored"]

_ReturningFlag = Literal[
    StrictHandling.RETURN_UNEXPECTED,
    StrictHandling.RETURN_ALL,
    "return_unexpected",
    "return_all",
]


@overload
def load(  # type: ignore[overload-overlap]  # any other flag returns one value
    sharded_state_dict: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = ...,
    common_strategy: Selection[LoadCommonStrategy] = ...,
    validate_access_integrity: bool = ...,
    *,
    strict: _ReturningFlag,
    comm: Comm | None = ...,
    recipe: Recipe | None = ...,
    cast: Cast = ...,
    trusted: bool = ...,
    verify: Verify = ...,
    progress: ProgressOption | None = ...,
) -> tuple[StateDict, set[str], set[str]]: ...


@overload
def load(
    sharded_state_dict: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = ...,
    common_strategy: Selection[LoadCommonStrategy] = ...,
    validate_access_integrity: bool = ...,
    strict: StrictHandling | str = ...,
    *,
    comm: Comm | None = ...,
    recipe: Recipe | None = ...,
    cast: Cast = ...,
    trusted: bool = ...,
    verify: Verify = ...,
    progress: ProgressOption | None = ...,
) -> StateDict: ...


def load(
    sharded_state_dict: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    common_strategy: Selection[LoadCommonStrategy] = None,
    validate_access_integrity: bool = False,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    comm: Comm | None = None,
    recipe: Recipe | None = None,
    cast: Cast = "error",
    trusted: bool = False,
    verify: Verify = False,
    progress: ProgressOption | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load what a template asks for, however it was sharded when it was saved. Collective.

    The template itself is not changed, but tensors in it are filled in place, on their device;
    memory is allocated (on the CPU) only where data is None. Everything that does not fit is found
    before the first byte is read.

    Args:
        sharded_state_dict: sharded leaves say what is wanted; of other values those of the
            checkpoint are returned, and tensors among them must have one there. Or a
            ShardedStateful, such as ``interop.TorchState``, which is restored in place.
        checkpoint_dir: a committed checkpoint: a folder, or a URL such as ``s3://bucket/run/1000``
            (an ``ObjectPath`` says how its store is reached).
        sharded_strategy: backend name (that of the checkpoint means the version which the
            checkpoint has, any other its newest), (name, version), or a strategy; by default the
            one that the checkpoint names.
        common_strategy: likewise, for common state.
        validate_access_integrity: also demand that the shards of all ranks make up each global
            tensor exactly once. Without it a template may be partial or overlap.
        strict: what to do about keys that only one side has; see StrictHandling. By default rank 0
            logs one warning if there are stored tensors, such as ``optimizer.…``, with a first name
            that no rank asks for; ``"raise_unexpected"`` does the same without a warning.
        comm: the ranks that load together; by default all of torch.distributed, or this process.
        recipe: what to make of the tensors of the checkpoint before the template asks for them:
            other names, shapes and dtypes. Shapes, dtypes and ``strict`` mean the result.
        cast: what to do where stored and wanted dtype differ: raise ("error"), convert if no
            value can change ("widen"), or convert always ("any").
        trusted: unpickle anything in common state and objects. Lets the checkpoint run any code.
        verify: compare everything that is wanted with the seal and the checksums of the save.
            Stored parts that are wanted whole are read once and compared in memory. Parts that are
            wanted in part or converted are read twice, the first time whole; so is everything if
            the strategy has a planner of its own. What seal and checksums do not speak of is an
            error. A checkpoint without a seal is verified as far as its checksums go, with a
            warning. ``"restored"`` compares what lies in memory after the load with the
            fingerprints of the save, see ``fingerprint``, whatever the sharding. Fingerprints that
            the save did not keep are computed from what is stored, which is read once more. Where
            the ranks do not hold all of a tensor in its stored dtype and shape there is nothing to
            compare, and a warning names it.
        progress: called with a Progress, from any thread, whenever there is something to report;
            or ``"bar"``: rank 0 shows its own part on the standard error.

    Returns:
        The state dict, nested as the template, with all common state of the checkpoint. With a
        RETURN flag of ``strict``: (state dict, missing keys, unexpected keys).

    Raises:
        CheckpointNotFoundError: nothing is committed there.
        InvalidShardingError: the template holds sharded tensors of torch that are not wrapped.
        StateMismatchError: keys, shapes, dtypes or nesting differ; all findings at once. Also if
            a tensor of the template would be left as it is.
        CorruptCheckpointError: something the checkpoint says it holds is missing or damaged. A note
            names the given tensors that may be filled with parts of it.
        UnsupportedFormatError: a format or a pickled class that is not read; a URL of a scheme that
            is not known.
        StrategyNotFoundError: the backend is unknown here.
        RankFailedError: anything else that failed, on the ranks it names.
        ValueError: for a ``strict``, ``cast`` or ``verify`` that does not exist.
        TypeError: for a ``recipe`` that is no Recipe.

    Example:
        >>> whole = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
        >>> save({"w": whole, "step": 1000}, "ckpt/1000")
        >>> second_half = ShardedTensor.from_rank_offsets("w", torch.empty(2), (0, 1, 2))
        >>> load({"w": second_half}, "ckpt/1000")
        {'w': tensor([2., 3.]), 'step': 1000}
    """
    comm = chosen_comm(comm)
    meter = Meter("load", comm.rank, progress)
    flag = parse_strict_flag(strict)
    _require_known(cast, verify, recipe)
    template, restored = _template_of(
        sharded_state_dict, checkpoint_dir, sharded_strategy, common_strategy, recipe, comm,
        trusted=trusted,
    )  # fmt: skip
    with meter.phase("planning"), comm.agreed("opening the checkpoint"), paused_collector():
        folder = data_folder(checkpoint_dir)
        save_number = number_of_save(folder)
        found = _trusting(open_checkpoint(folder, sharded_strategy, common_strategy), trusted)
        parts = _take_apart(template)
        common = found.common.load_common(folder)
    require_same_save(comm.all_same(save_number), folder)
    if validate_access_integrity:
        check_access(parts, comm)

    reader, index, stored, stored_keys = open_stored(
        found, folder, parts, comm, is_kept=bool(verify), is_whole=recipe is not None
    )
    made = apply_recipe(recipe, found, index, parts, folder, comm)
    stored = stored if made is None else made.shapes
    missing, unexpected = _compare_keys(parts, stored_keys, found, folder, made, flag, comm)
    with comm.agreed("comparing template and checkpoint"), paused_collector():
        tensors = _asked(parts.tensors, unexpected)
        wanted_objects = _asked(parts.objects, unexpected)
        wanted = TensorColumns.of(tensors.values())
        own_planner = getattr(found.sharded, "planner", None) is not None
        with nullcontext() if made is None else made.checking(tensors, wanted_objects):
            alike = compare(
                tensors,
                wanted,
                stored,
                cast,
                # A planner of a user may know other names.
                planner_knows_keys=own_planner and made is None,
                stored_keys=stored_keys if made is None else None,
                common=common,
            )
        check_filled(parts, common, flag)
        filled = wanted
        # Copies of the leaves are for others than our own planner, who may change them.
        if own_planner or not (alike and wanted.are_ready):
            filled = TensorColumns.of(_with_memory(wanted, stored, reader, index, made))
        to_fill = WantedLeaves(replaced(tensors, filled.leaves), filled)
    # Only now that all ranks agree may a tensor of the caller be touched.
    if filled is not wanted:
        clear_partly_stored(wanted.leaves, stored)
    to_read = to_fill
    if made is not None:
        to_read, wanted_objects = made.to_read(to_fill, wanted_objects, comm)
    verification = Verification(
        to_read, [*wanted_objects.values()], found, folder, index, reader, meter, comm
    )
    to_verify = verification.begin() if verify is True else None
    cells, of_common = split_objects(wanted_objects, found, parts, folder, comm)
    with (
        noting_filled(wanted),
        verification.of_restored(is_wanted=verify == "restored"),
        verification.finding_damage(to_verify),
        meter.phase("reading"),
    ):
        loaded, of_strategy = read_wanted(to_read, cells, found.sharded, reader, index, comm, meter)
    of_objects = {**(of_strategy or of_common), **({} if made is None else made.kept)}
    if made is not None:
        loaded = replaced(tensors, [leaf.data for leaf in filled.leaves])

    @paused_collector()
    def rebuild() -> Any:
        require_same_save(number_of_save(folder) == save_number, folder)
        return restored(parts.rebuild(common, loaded, of_objects))

    is_asked = not own_planner and made is None and flag is StrictHandling.ASSUME_OK_UNEXPECTED
    state_dict = rebuilt(rebuild, wanted.keys if is_asked else (), stored_keys, comm)
    meter.log()
    if StrictHandling.requires_returning_mismatch_keys(flag):
        return state_dict, missing, unexpected
    return state_dict


def _template_of(
    state: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy],
    common_strategy: Selection[LoadCommonStrategy],
    recipe: Recipe | None,
    comm: Comm,
    *,
    trusted: bool,
) -> tuple[ShardedStateDict, Callable[[StateDict], StateDict]]:
    """The template, and what takes the loaded state dict and returns it. Collective."""
    if not isinstance(state, ShardedStateful):
        return state, lambda loaded: loaded
    with comm.agreed("opening the checkpoint"):
        folder = data_folder(checkpoint_dir)
        found = _trusting(open_checkpoint(folder, sharded_strategy, common_strategy), trusted)
        common = found.common.load_common(folder)
    stored = made_state(recipe, StoredState(stored_shapes(found, folder, comm), common))
    template, restore = state.template_for(stored, comm)

    def restored(loaded: StateDict) -> StateDict:
        restore(loaded)
        return loaded

    return template, restored


def _require_known(cast: str, verify: object, recipe: Recipe | None) -> None:
    if recipe is not None:
        require_recipe(recipe)
    if cast not in ("error", "widen", "any"):
        raise ValueError(f"cast must be 'error', 'widen' or 'any', not {cast!r}")
    if verify not in (True, False, "restored"):
        raise ValueError(f"verify must be True, False or 'restored', not {verify!r}")


def _trusting(found: LoadStrategies, trusted: bool) -> LoadStrategies:
    if not trusted:
        return found
    return replace(found, sharded=found.sharded.trusting(), common=found.common.trusting())


def _take_apart(template: ShardedStateDict) -> Partition:
    parts = partition(template)
    refuse_distributed(parts, {})
    return parts


def _compare_keys(
    parts: Partition,
    stored_keys: Callable[[], Iterable[str]],
    found: LoadStrategies,
    folder: Location,
    made: RecipeLoad | None,
    flag: StrictHandling,
    comm: Comm,
) -> tuple[set[str], set[str]]:
    """Keys that only the checkpoint, and that only the template has, if anybody wants to know."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(flag):
        return set(), set()
    known = made.keys if made is not None else {*stored_keys(), *object_keys(found, folder, comm)}
    return handle_strictly(parts, known, flag, comm)


def _asked(leaves: Mapping[TreePath, T], unexpected: set[str]) -> Mapping[TreePath, T]:
    """The leaves without those whose keys are not in the checkpoint."""
    if not unexpected:
        return leaves
    return {path: leaf for path, leaf in leaves.items() if leaf.key not in unexpected}


def _with_memory(
    wanted: TensorColumns,
    stored: Mapping[str, tuple[Ints, torch.dtype]],
    reader: StorageReader | None,
    index: Index | None,
    made: RecipeLoad | None,
) -> list[ShardedTensor]:
    """Copies of the leaves, all with memory to fill."""
    if reader is not None and index is not None:
        # Shapes of a template may be those that the checkpoint says it has.
        large = {leaf.key for leaf in wanted.leaves if leaf.data is None and _is_large(leaf)}
        if made is not None:
            large = {key for own in large for key in made.made.tensors[own].sources}
        reader.require_stored(large_tensors(index, large.intersection(index)), index)
    if isinstance(stored, StoredTensors):
        stored = stored.of(wanted.keys)
    return [with_memory(leaf, stored) for leaf in wanted.leaves]


def _is_large(leaf: ShardedTensor) -> bool:
    return math.prod(leaf.local_shape) * leaf.dtype.itemsize > LARGE_BYTES

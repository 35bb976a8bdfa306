"""``load``: its parameters, and the whole line from the folder to the state dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeVar, overload

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.format.index import LARGE_BYTES, large_tensors
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedStateDict,
    ShardedStateful,
    ShardedTensor,
    StateDict,
    StoredState,
)
from dist_checkpointing.mapping.nested_dicts import Path as TreePath, put_at
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.planning.recipe import Derivation, Recipe, require_recipe
from dist_checkpointing.serialization import recipes
from dist_checkpointing.serialization.fingerprint_of_state import verify_restored
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from dist_checkpointing.strategies.selection import OpenedCheckpoint, Selection, replaced
from dist_checkpointing.strategies.verification import Verifier
from dist_checkpointing.threads import paused_collector
from dist_checkpointing.validation.load_errors import (
    Cast,
    StagedTensor,
    StrictHandling,
    check_access,
    clear_partly_stored,
    compare,
    fill_staged,
    filling,
    first_names,
    handle_strictly,
    hash_of_names,
    parse_strict_flag,
    plain_tensors,
    require_same_save,
    set_apart,
    warn_of_unasked,
    with_memory,
)
from dist_checkpointing.validation.save_errors import refuse_distributed, walk

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
        sharded_state_dict: sharded leaves say what is wanted. A tensor that is not wrapped is
            filled with the one that the common state of the checkpoint has at this place, and must
            have its shape and dtype. Of other values those of the checkpoint are returned. Or a
            ShardedStateful, such as ``interop.TorchState``, which is restored in place.
        checkpoint_dir: a committed checkpoint: a folder, or a URL such as ``s3://bucket/run/1000``
            (an ``ObjectPath`` says how its store is reached). ``RUN@1000`` and ``RUN@latest`` are
            steps of a run, which rank 0 looks for.
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
            a tensor of the template would be left as it is, or if it shares memory with another one
            for which other values are stored.
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
    flag = _checked_options(strict, cast, verify, recipe)

    # Open the checkpoint, and take the template apart.
    restore = None
    stateful = sharded_state_dict if isinstance(sharded_state_dict, ShardedStateful) else None
    given: Any = sharded_state_dict if stateful is None else {}
    with meter.phase("planning"):
        opened, parts = OpenedCheckpoint.open(
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            comm,
            trusted=trusted,
            split=partial(_split, given),
        )
    require_same_save(comm.all_same(opened.save_number), opened.folder)
    if stateful is not None:
        stored = StoredState(opened.stored_shapes(), opened.common)
        template, restore = stateful.template_for(recipes.derived_state(recipe, stored), comm)
        with comm.agreed("taking the template apart"):
            parts = _split(template)
    if validate_access_integrity:
        check_access(parts, comm)

    # Read the index, and apply the recipe to it.
    opened.read_index(parts, is_kept=bool(verify), is_whole=recipe is not None)
    made = None if recipe is None else recipes.apply_recipe(recipe, opened, parts)
    index = opened.index if made is None else recipes.derived_index(made)

    # Compare the template with it, and make memory where there is none.
    missing, unexpected = _compare_keys(opened, parts, made, flag)
    with comm.agreed("comparing template and checkpoint"), paused_collector():
        wanted = filled = WantedTable(_without_keys(parts.tensors, unexpected))
        objects = _without_keys(parts.objects, unexpected)
        user_planner = opened.strategies.sharded.planner is not None
        plain, misfits = plain_tensors(parts, opened.common, cast, flag)
        with (
            nullcontext()
            if made is None
            else recipes.explaining(made, wanted.tensors, objects.values())
        ):
            alike = compare(
                wanted,
                index,
                cast,
                # A planner of a user may know other names.
                planner_knows_keys=user_planner and made is None,
                stored_keys=opened.stored_keys if made is None else index.keys,
                common=opened.common,
                misfits=misfits,
            )
        apart = set_apart(wanted, plain, partial(recipes.keeps_values, made))
        # Copies of the leaves are for others than our own planner, who may change them.
        if user_planner or apart or made is not None or not (alike and wanted.are_ready):
            filled = WantedTable(replaced(wanted.leaves, _with_memory(wanted, opened, made, apart)))
    # Only now that all ranks agree may a tensor of the caller be touched.
    if filled is not wanted:
        clear_partly_stored(filled.tensors, index)
    to_read, objects, steps = (
        (filled, objects, []) if made is None else recipes.sources_of(made, filled, objects, comm)
    )

    # Verify what is not read whole; then read, and compare what memory holds.
    stored_parts = (opened, to_read, [*objects.values()], meter)
    verifier = Verifier(*stored_parts).start() if verify is True else None
    cells, values = opened.read_objects(objects, parts)
    with filling(wanted, lambda: opened.has_read):
        with verifier.comparing_memory() if verifier else nullcontext(), meter.phase("reading"):
            _, of_cells = opened.read(to_read, cells, meter)
        if verify == "restored":
            with meter.phase("verifying"):
                verify_restored(to_read.tensors, opened.folder, opened.index, opened.reader, comm)

    # Rebuild the state dict.
    values = {**(of_cells or values), **recipes.kept_values(made, parts.objects)}
    loaded = replaced(
        wanted.leaves,
        [apart[n].given if n in apart else leaf.data for n, leaf in enumerate(filled.tensors)],
    )
    is_asked = not user_planner and made is None and flag is StrictHandling.ASSUME_OK_UNEXPECTED
    staged, asked_keys = [*apart.values(), *plain], wanted.keys if is_asked else ()
    state_dict = _rebuilt(opened, parts, loaded, values, steps, staged, restore, asked_keys)
    meter.log()
    returns_keys = StrictHandling.requires_returning_mismatch_keys(flag)
    return (state_dict, missing, unexpected) if returns_keys else state_dict


def _checked_options(
    strict: StrictHandling | str, cast: str, verify: object, recipe: Recipe | None
) -> StrictHandling:
    flag = parse_strict_flag(strict)
    if recipe is not None:
        require_recipe(recipe)
    if cast not in ("error", "widen", "any"):
        raise ValueError(f"cast must be 'error', 'widen' or 'any', not {cast!r}")
    if verify not in (True, False, "restored"):
        raise ValueError(f"verify must be True, False or 'restored', not {verify!r}")
    return flag


def _split(template: ShardedStateDict) -> StateDictParts:
    parts = StateDictParts.of(template)
    refuse_distributed(walk(parts.common), parts.tensors, {})
    return parts


def _compare_keys(
    opened: OpenedCheckpoint, parts: StateDictParts, made: Derivation | None, flag: StrictHandling
) -> tuple[set[str], set[str]]:
    """Keys that only the checkpoint, and that only the template has, if anybody wants to know."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(flag):
        return set(), set()
    if made is None:
        known = {*opened.stored_keys(), *opened.object_keys()}
    else:
        known = {*made.tensors, *made.objects, *made.kept_objects}
    return handle_strictly(parts, known, flag, opened.comm)


def _without_keys(leaves: Mapping[TreePath, T], keys: set[str]) -> Mapping[TreePath, T]:
    if not keys:
        return leaves
    return {path: leaf for path, leaf in leaves.items() if leaf.key not in keys}


def _with_memory(
    wanted: WantedTable,
    opened: OpenedCheckpoint,
    made: Derivation | None,
    apart: Mapping[int, StagedTensor],
) -> list[ShardedTensor]:
    """Copies of the leaves, all with memory to fill."""
    # Shapes of a template may be those that the checkpoint says it has.
    large = {
        leaf.key
        for leaf in wanted.tensors
        if leaf.data is None and math.prod(leaf.local_shape) * leaf.dtype.itemsize > LARGE_BYTES
    }
    if made is not None:
        large = {key for new in large for key in made.tensors[new].sources}
    large.intersection_update(opened.index)
    opened.reader.require_stored(large_tensors(opened.index, large), opened.index)
    leaves = [*map(with_memory, wanted.tensors)]
    for row, part in apart.items():
        leaves[row].data = part.value
    return leaves


def _rebuilt(
    opened: OpenedCheckpoint,
    parts: StateDictParts,
    tensors: Mapping[TreePath, Any],
    objects: Mapping[TreePath, Any],
    steps: Iterable[Callable[[], None]],
    staged: Sequence[StagedTensor],
    restore: Callable[[StateDict], object] | None,
    asked_keys: Iterable[str],
) -> StateDict:
    """The state dict, with the plain tensors of the template, which are filled. Collective.

    Rank 0 warns of tensors that no rank asks for.
    """
    state_dict: StateDict = {}

    @paused_collector()
    def rebuild() -> tuple[str, ...] | None:
        nonlocal state_dict
        require_same_save(opened.is_unchanged(), opened.folder)
        for step in steps:
            step()
        if staged:
            fill_staged(staged)
        state_dict = parts.rebuild(opened.common, tensors, objects)
        for part in staged:
            if part.path:
                put_at(state_dict, part.path, part.given)
        if restore is not None:
            restore(state_dict)
        return first_names(asked_keys)

    asked = opened.comm.exchange("rebuilding the state dict", rebuild, hash_of_names)
    if opened.comm.rank == 0:
        warn_of_unasked(asked, opened.stored_keys)
    return state_dict

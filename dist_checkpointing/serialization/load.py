"""load: open, index, partition, compare, plan, read, rebuild."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.filesystem.paths import local_folder
from dist_checkpointing.format.claims import LARGE_BYTES, large_tensors
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import number_of_save
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedStateful,
    ShardedTensor,
    StateDict,
    StoredState,
)
from dist_checkpointing.mapping.nesting import AtPaths, joined, value_at
from dist_checkpointing.mapping.nesting import Path as TreePath
from dist_checkpointing.mapping.partition import Partition, partition
from dist_checkpointing.mapping.tensor_columns import TensorColumns
from dist_checkpointing.planning.wanted import WantedLeaves
from dist_checkpointing.serialization.load_checks import (
    check_access,
    noting_filled,
    require_one_save,
)
from dist_checkpointing.serialization.load_verification import Verification
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.progress import Meter, ProgressCallback
from dist_checkpointing.storage.protocol import StorageReader
from dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from dist_checkpointing.strategies.planned import PlannedLoadStrategy, share_index
from dist_checkpointing.strategies.selection import (
    LoadStrategies,
    Selection,
    handles_objects,
    open_checkpoint,
)
from dist_checkpointing.validation.compare import (
    Cast,
    StoredTensors,
    clear_partly_stored,
    compare,
    handle_strictly,
    with_memory,
)
from dist_checkpointing.validation.strictness import StrictHandling, parse_strict_flag
from dist_checkpointing.validation.unwrapped import check_filled, refuse_distributed

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
    cast: Cast = ...,
    trusted: bool = ...,
    verify: Verify = ...,
    progress: ProgressCallback | None = ...,
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
    cast: Cast = ...,
    trusted: bool = ...,
    verify: Verify = ...,
    progress: ProgressCallback | None = ...,
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
    cast: Cast = "error",
    trusted: bool = False,
    verify: Verify = False,
    progress: ProgressCallback | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load what a template asks for, however it was sharded when it was saved. Collective.

    The template itself is not changed, but tensors in it are filled in place, on their device;
    memory is allocated (on the CPU) only where data is None. Everything that does not fit is found
    before the first byte is read.

    Args:
        sharded_state_dict: sharded leaves say what is wanted; of other values those of the
            checkpoint are returned, and tensors among them must have one there. Or a
            ShardedStateful, such as ``interop.TorchState``, which is restored in place.
        checkpoint_dir: a committed checkpoint.
        sharded_strategy: backend name (that of the checkpoint means the version which the
            checkpoint has, any other its newest), (name, version), or a strategy; by default the
            one that the checkpoint names.
        common_strategy: likewise, for common state.
        validate_access_integrity: also demand that the shards of all ranks make up each global
            tensor exactly once. Without it a template may be partial or overlap.
        strict: what to do about keys that only one side has; see StrictHandling.
        comm: the ranks that load together; by default all of torch.distributed, or this process.
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
        progress: called with a Progress, from any thread, whenever there is something to report.

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
        UnsupportedFormatError: a format or a pickled class that is not read; a URL for a path.
        StrategyNotFoundError: the backend is unknown here.
        RankFailedError: anything else that failed, on the ranks it names.
        ValueError: for a ``strict``, ``cast`` or ``verify`` that does not exist.

    Example:
        >>> whole = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
        >>> save({"w": whole, "step": 1000}, "ckpt/1000")
        >>> second_half = ShardedTensor.from_rank_offsets("w", torch.empty(2), (0, 1, 2))
        >>> load({"w": second_half}, "ckpt/1000")
        {'w': tensor([2., 3.]), 'step': 1000}
    """
    comm = default_comm() if comm is None else comm
    meter = Meter("load", comm.rank, progress)
    flag = parse_strict_flag(strict)
    _require_known(cast, verify)
    template, restored = _template_of(
        sharded_state_dict, checkpoint_dir, sharded_strategy, common_strategy, comm, trusted=trusted
    )
    with meter.phase("planning"), comm.agreed("opening the checkpoint"), paused_collector():
        folder = local_folder(checkpoint_dir)
        save_number = number_of_save(folder)
        found = open_checkpoint(folder, sharded_strategy, common_strategy)
        if trusted:
            found = replace(found, sharded=found.sharded.trusting(), common=found.common.trusting())
        parts = _take_apart(template)
        common = found.common.load_common(folder)
    require_one_save(comm.all_same(save_number), folder)
    if validate_access_integrity:
        check_access(parts, comm)

    reader, index, stored, stored_keys = _read_index(
        found, folder, parts, comm, is_kept=bool(verify)
    )
    missing, unexpected = set[str](), set[str]()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(flag):
        objects = comm.from_rank0(
            "listing the sharded objects",
            lambda: {leaf.key for leaf in _stored_objects(found, folder)},
        )
        missing, unexpected = handle_strictly(parts, {*stored_keys()} | objects, flag, comm)
    with comm.agreed("comparing template and checkpoint"), paused_collector():
        tensors = _asked(parts.tensors, unexpected)
        wanted_objects = _asked(parts.objects, unexpected)
        wanted = TensorColumns.of(tensors.values())
        own_planner = getattr(found.sharded, "planner", None) is not None
        alike = compare(tensors, wanted, stored, cast, planner_knows_keys=own_planner)
        check_filled(parts, common, flag)
        filled = wanted
        # Copies of the leaves are for others than our own planner, who may change them.
        if own_planner or reader is None or not (alike and wanted.are_ready):
            filled = TensorColumns.of(_with_memory(wanted, stored, reader, index))
        to_fill = WantedLeaves(_replaced(tensors, filled.leaves), filled)
    # Only now that all ranks agree may a tensor of the caller be touched.
    if filled is not wanted:
        clear_partly_stored(wanted.leaves, stored)
    verification = Verification(
        to_fill, [*wanted_objects.values()], found, folder, index, reader, meter, comm
    )
    to_verify = verification.begin() if verify is True else None
    cells: Mapping[TreePath, ShardedObject] = {}
    of_common: Mapping[TreePath, Any] = {}
    if handles_objects(found.sharded):
        cells = _replaced(wanted_objects, [leaf.without_data() for leaf in wanted_objects.values()])
    else:
        of_common = _read_objects(wanted_objects, found.common, parts, folder, comm)
    with (
        noting_filled(wanted),
        verification.of_restored(is_wanted=verify == "restored"),
        verification.finding_damage(to_verify),
        meter.phase("reading"),
    ):
        loaded, of_strategy = _read(
            to_fill, cells, found.sharded, reader, index, parts, folder, comm, meter
        )
    with comm.agreed("rebuilding the state dict"), paused_collector():
        require_one_save(number_of_save(folder) == save_number, folder)
        state_dict = restored(parts.rebuild(common, loaded, of_strategy or of_common))
    meter.log()
    if StrictHandling.requires_returning_mismatch_keys(flag):
        return state_dict, missing, unexpected
    return state_dict


def _template_of(
    state: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy],
    common_strategy: Selection[LoadCommonStrategy],
    comm: Comm,
    *,
    trusted: bool,
) -> tuple[ShardedStateDict, Callable[[StateDict], StateDict]]:
    """The template, and what takes the loaded state dict and returns it. Collective."""
    if not isinstance(state, ShardedStateful):
        return state, lambda loaded: loaded
    with comm.agreed("opening the checkpoint"):
        folder = local_folder(checkpoint_dir)
        found = open_checkpoint(folder, sharded_strategy, common_strategy)
        common = (found.common.trusting() if trusted else found.common).load_common(folder)
    tensors = comm.from_rank0(
        "reading the index", lambda: found.sharded.load_tensors_metadata(folder)
    )
    described = {key: (tuple(leaf.global_shape), leaf.dtype) for key, leaf in tensors.items()}
    template, restore = state.template_for(StoredState(described, common), comm)

    def restored(loaded: StateDict) -> StateDict:
        restore(loaded)
        return loaded

    return template, restored


def _require_known(cast: str, verify: object) -> None:
    if cast not in ("error", "widen", "any"):
        raise ValueError(f"cast must be 'error', 'widen' or 'any', not {cast!r}")
    if verify not in (True, False, "restored"):
        raise ValueError(f"verify must be True, False or 'restored', not {verify!r}")


def _take_apart(template: ShardedStateDict) -> Partition:
    parts = partition(template)
    refuse_distributed(parts, {})
    return parts


def _read_index(
    found: LoadStrategies,
    checkpoint_dir: str | PathLike[str],
    parts: Partition,
    comm: Comm,
    *,
    is_kept: bool,
) -> tuple[
    StorageReader | None,
    Index | None,
    Mapping[str, tuple[Ints, torch.dtype]],
    Callable[[], Iterable[str]],
]:
    """What is stored: a reader and its index, for planned strategies; global shapes and dtypes.

    The index may hold no more than what ``parts`` asks for; the last value gives the keys of all
    tensors. ``is_kept`` says that the reader is used more than once.
    """
    if isinstance(found.sharded, PlannedLoadStrategy):
        reader = found.sharded.make_reader(Path(checkpoint_dir))
        reader.is_kept = is_kept
        shared = share_index(reader, comm)
        index = shared.whole
        if index is None:
            asked = {leaf.key for leaf in (*parts.tensors.values(), *parts.objects.values())}
            index = shared.index(found.sharded.needed_keys(asked))
        stored: Mapping[str, tuple[Ints, torch.dtype]] = StoredTensors(index)
        return reader, index, stored, shared.keys
    metadata = comm.from_rank0(
        "reading the index", lambda: found.sharded.load_tensors_metadata(checkpoint_dir)
    )
    stored = {key: (tuple(t.global_shape), t.dtype) for key, t in metadata.items()}
    return None, None, stored, stored.keys


def _asked(leaves: Mapping[TreePath, T], unexpected: set[str]) -> Mapping[TreePath, T]:
    """The leaves without those whose keys are not in the checkpoint."""
    if not unexpected:
        return leaves
    return {path: leaf for path, leaf in leaves.items() if leaf.key not in unexpected}


def _replaced(leaves: Mapping[TreePath, Any], others: Sequence[Any]) -> Mapping[TreePath, Any]:
    """Other values at the same paths."""
    if isinstance(leaves, AtPaths):
        return leaves.replaced(others)
    return dict(zip(leaves, others, strict=True))


def _with_memory(
    wanted: TensorColumns,
    stored: Mapping[str, tuple[Ints, torch.dtype]],
    reader: StorageReader | None,
    index: Index | None,
) -> list[ShardedTensor]:
    """Copies of the leaves, all with memory to fill."""
    if reader is not None and index is not None:
        # Shapes of a template may be those that the checkpoint says it has.
        large = {leaf.key for leaf in wanted.leaves if leaf.data is None and _is_large(leaf)}
        reader.require_stored(large_tensors(index, large.intersection(index)), index)
    if isinstance(stored, StoredTensors):
        stored = stored.of(wanted.keys)
    return [with_memory(leaf, stored) for leaf in wanted.leaves]


def _is_large(leaf: ShardedTensor) -> bool:
    return math.prod(leaf.local_shape) * leaf.dtype.itemsize > LARGE_BYTES


def _stored_objects(
    found: LoadStrategies, checkpoint_dir: str | PathLike[str]
) -> list[ShardedObject]:
    strategy = found.sharded if handles_objects(found.sharded) else found.common
    metadata = strategy.load_sharded_metadata(checkpoint_dir)
    return [leaf for leaf in metadata.values() if isinstance(leaf, ShardedObject)]


def _read_objects(
    objects: Mapping[TreePath, ShardedObject],
    common: LoadCommonStrategy,
    parts: Partition,
    checkpoint_dir: Path,
    comm: Comm,
) -> Mapping[TreePath, Any]:
    with comm.agreed("reading the sharded objects"):
        values = common.load_sharded_objects(parts.nested(objects), checkpoint_dir)
        return {path: value_at(values, path) for path in objects}


def _read(
    tensors: WantedLeaves,
    cells: Mapping[TreePath, ShardedObject],
    strategy: LoadShardedStrategy,
    reader: StorageReader | None,
    index: Index | None,
    parts: Partition,
    checkpoint_dir: Path,
    comm: Comm,
    meter: Meter,
) -> tuple[Mapping[TreePath, Any], Mapping[TreePath, Any]]:
    """Read tensors, and the objects that lie among them; the values of both."""
    if reader is not None and index is not None:
        reader.report = meter.add
        meter.expect(int(tensors.tensors.num_bytes.sum()))
        assert isinstance(strategy, PlannedLoadStrategy)
        leaves = WantedLeaves(joined(tensors.by_path, cells), tensors.tensors)
        read(leaves, index, strategy.planner, reader, comm, strategy.plan_reader)
        own, others = tensors.tensors.leaves, cells.values()
        return (
            _replaced(tensors.by_path, [leaf.data for leaf in own]),
            _replaced(cells, [leaf.data for leaf in others]),
        )
    with comm.agreed("reading"):
        result = strategy.load(parts.nested({**tensors, **cells}), checkpoint_dir)
        of_tensors, of_cells = (
            {path: value_at(result, path) for path in own} for own in (tensors, cells)
        )
        return of_tensors, of_cells

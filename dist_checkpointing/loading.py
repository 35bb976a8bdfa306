"""load: open, index, partition, compare, plan, read, rebuild."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from dist_checkpointing.catalog import concatenate, describe
from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.commit import CheckpointingConfig, read_config
from dist_checkpointing.dtypes import is_lossless
from dist_checkpointing.errors import CheckpointingException, Finding, StateMismatchError
from dist_checkpointing.geometry import Ints
from dist_checkpointing.index import Index
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from dist_checkpointing.partition import Partition, partition
from dist_checkpointing.storage import StorageReader
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    PlannedLoadStrategy,
)
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import Selection, handles_objects, select
from dist_checkpointing.tree import Path as TreePath
from dist_checkpointing.tree import path_text, value_at
from dist_checkpointing.validation import StrictHandling, check_coverage, parse_strict_flag

logger = logging.getLogger(__name__)

Cast = Literal["error", "widen", "any"]


@dataclass(frozen=True, slots=True)
class LoadStrategies:
    """The strategies that read one checkpoint."""

    config: CheckpointingConfig
    sharded: LoadShardedStrategy
    common: LoadCommonStrategy


def open_checkpoint(
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    common_strategy: Selection[LoadCommonStrategy] = None,
) -> LoadStrategies:
    """Find the strategies for a committed checkpoint.

    Raises:
        CheckpointNotFoundError: if there is none.
        StrategyNotFoundError: if nobody reads its backend.
        UnsupportedFormatError: if the strategy that the caller asked for does not.
    """
    config = read_config(checkpoint_dir)
    backend, version = config.sharded_backend, config.sharded_backend_version
    sharded: LoadShardedStrategy = select(
        StrategyAction.LOAD_SHARDED, sharded_strategy, (backend, version)
    )
    sharded.check_backend_compatibility(backend)
    sharded.check_version_compatibility(version)
    backend, version = config.common_backend, config.common_backend_version
    common: LoadCommonStrategy = select(
        StrategyAction.LOAD_COMMON, common_strategy, (backend, version)
    )
    common.check_backend_compatibility(backend)
    common.check_version_compatibility(version)
    return LoadStrategies(config, sharded, common)


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    common_strategy: Selection[LoadCommonStrategy] = None,
    validate_access_integrity: bool = False,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    comm: Comm | None = None,
    cast: Cast = "error",
    trusted: bool = False,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load what a template asks for, however it was sharded when it was saved. Collective.

    The template itself is not changed, but tensors in it are filled in place, on their device;
    memory is allocated (on the CPU) only where data is None. Everything that does not fit is found
    before the first byte is read.

    Args:
        sharded_state_dict: sharded leaves say what is wanted; other values are ignored.
        checkpoint_dir: a committed checkpoint.
        sharded_strategy: backend name (its newest version), (name, version), or a strategy; by
            default the one that the checkpoint names.
        common_strategy: likewise, for common state.
        validate_access_integrity: also demand that the shards of all ranks make up each global
            tensor exactly once. Without it a template may be partial or overlap.
        strict: what to do about keys that only one side has; see StrictHandling.
        comm: the ranks that load together; by default all of torch.distributed, or this process.
        cast: what to do where stored and wanted dtype differ: raise ("error"), convert if no
            value can change ("widen"), or convert always ("any").
        trusted: unpickle anything in common state and objects. Lets the checkpoint run any code.

    Returns:
        The state dict, nested as the template, with all common state of the checkpoint. With a
        RETURN flag of ``strict``: (state dict, missing keys, unexpected keys).

    Raises:
        CheckpointNotFoundError: nothing is committed there.
        StateMismatchError: keys, shapes, dtypes or nesting differ; all findings at once.
        CorruptCheckpointError: something the checkpoint says it holds is missing or damaged.
        UnsupportedFormatError: a format or a pickled class that is not read.
        StrategyNotFoundError: the backend is unknown here.
        RankFailedError: anything else that failed, on the ranks it names.
    """
    comm = default_comm() if comm is None else comm
    with comm.agreed("opening the checkpoint"):
        flag = parse_strict_flag(strict)
        if cast not in ("error", "widen", "any"):
            raise ValueError(f"cast must be 'error', 'widen' or 'any', not {cast!r}")
        found = open_checkpoint(checkpoint_dir, sharded_strategy, common_strategy)
        common_reader = found.common.trusting() if trusted else found.common
        parts = partition(sharded_state_dict)
        common = common_reader.load_common(checkpoint_dir)
    if validate_access_integrity:
        _check_access(parts, comm)

    reader, index = None, None
    if isinstance(found.sharded, PlannedLoadStrategy):
        reader = found.sharded.make_reader(Path(checkpoint_dir))
        index = comm.from_rank0("reading the index", reader.read_metadata)
        stored: Mapping[str, tuple[Ints, torch.dtype]] = _StoredTensors(index)
    else:
        metadata = comm.from_rank0(
            "reading the index", lambda: found.sharded.load_tensors_metadata(checkpoint_dir)
        )
        stored = {key: (tuple(t.global_shape), t.dtype) for key, t in metadata.items()}

    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(flag):
        objects = comm.from_rank0(
            "listing the sharded objects",
            lambda: {leaf.key for leaf in _stored_objects(found, checkpoint_dir)},
        )
        missing, unexpected = _handle_strictly(parts, {*stored} | objects, flag, comm)
    with comm.agreed("comparing template and checkpoint"):
        wanted = {p: t for p, t in parts.tensors.items() if t.key not in unexpected}
        _compare(wanted, stored, cast)
        wanted_objects = {p: o for p, o in parts.objects.items() if o.key not in unexpected}
        leaves: dict[TreePath, ShardedBase] = {
            path: _with_memory(leaf, stored[leaf.key][0]) for path, leaf in wanted.items()
        }
    loaded: dict[TreePath, Any] = {}
    if handles_objects(found.sharded):
        leaves |= {path: leaf.without_data() for path, leaf in wanted_objects.items()}
    else:
        with comm.agreed("reading the sharded objects"):
            values = common_reader.load_sharded_objects(
                parts.nested(wanted_objects), checkpoint_dir
            )
            loaded = {path: value_at(values, path) for path in wanted_objects}
    loaded |= _read(leaves, found.sharded, reader, index, parts, checkpoint_dir, comm)
    with comm.agreed("rebuilding the state dict"):
        state_dict: StateDict = parts.rebuild(common, loaded)
    if StrictHandling.requires_returning_mismatch_keys(flag):
        return state_dict, missing, unexpected
    return state_dict


class _StoredTensors(Mapping[str, tuple[Ints, torch.dtype]]):
    """Key -> global shape and dtype, looked up in the index only when asked for."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def __getitem__(self, key: str) -> tuple[Ints, torch.dtype]:
        tensor = self._index[key]
        return tensor.global_shape, tensor.dtype.torch

    def __iter__(self) -> Any:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def _stored_objects(
    found: LoadStrategies, checkpoint_dir: str | PathLike[str]
) -> list[ShardedObject]:
    strategy = found.sharded if handles_objects(found.sharded) else found.common
    metadata = strategy.load_sharded_metadata(checkpoint_dir)
    return [leaf for leaf in metadata.values() if isinstance(leaf, ShardedObject)]


def _check_access(parts: Partition, comm: Comm) -> None:
    leaves: list[ShardedBase] = [*parts.tensors.values(), *parts.objects.values()]
    tables = comm.exchange("describing the template", lambda: describe(leaves, comm.rank))
    with comm.agreed("checking the template"):
        catalog = concatenate(tables)
        check_coverage(catalog, catalog.take(catalog.main & (catalog.num_elements > 0)))


def _handle_strictly(
    parts: Partition, stored_keys: set[str], flag: StrictHandling, comm: Comm
) -> tuple[set[str], set[str]]:
    """Report keys that only one side has, as the flag says: (missing, unexpected)."""
    own = {leaf.key for leaf in (*parts.tensors.values(), *parts.objects.values())}
    unexpected = own - stored_keys
    missing: set[str] = set()
    if StrictHandling.requires_global_app_metadata(flag):
        missing = stored_keys.difference(*comm.all_gather(own))
    if flag in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        with comm.agreed("comparing keys"):
            if missing or unexpected:
                findings = [
                    Finding("asked for, but not in the checkpoint", k) for k in sorted(unexpected)
                ]
                findings += [
                    Finding("in the checkpoint, but asked for by no rank", k)
                    for k in sorted(missing)
                ]
                raise StateMismatchError(_mismatch_text(missing, unexpected), findings)
    if flag in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL) and (missing or unexpected):
        logger.warning("%s", _mismatch_text(missing, unexpected))
    if flag == StrictHandling.IGNORE_ALL:
        missing = set()
    return missing, unexpected


def _mismatch_text(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    text = ""
    if missing:
        text += "Some keys found in the checkpoint are missing in the provided sharded state dict. "
    if unexpected:
        text += (
            "Unexpected keys (not found in the checkpoint) encountered in the provided sharded "
            "state dict. "
        )
    return text.strip()


def _compare(
    wanted: Mapping[TreePath, ShardedTensor],
    stored: Mapping[str, tuple[Ints, torch.dtype]],
    cast: Cast,
) -> None:
    findings = []
    for path, leaf in wanted.items():
        if leaf.key not in stored:
            findings.append(
                Finding(
                    f"not in the checkpoint (asked for at {path_text(path)})",
                    leaf.key,
                    remedy="Remove it from the template, or pass strict=.",
                )
            )
            continue
        shape, dtype = stored[leaf.key]
        own_shape = tuple(leaf.global_shape)
        if shape != own_shape and not (leaf.allow_shape_mismatch and len(shape) == len(own_shape)):
            findings.append(
                Finding(
                    "global shape differs",
                    leaf.key,
                    expected=own_shape,
                    found=shape,
                    remedy="Only allow_shape_mismatch=True takes another extent.",
                )
            )
        own_dtype = leaf.dtype if leaf.data is None else leaf.data.dtype
        fits = cast == "any" or (cast == "widen" and is_lossless(dtype, own_dtype))
        if dtype != own_dtype and not fits:
            remedy = "cast='any' converts" if cast == "widen" else "cast='widen' or 'any' converts"
            findings.append(
                Finding(
                    "dtype differs", leaf.key, expected=own_dtype, found=dtype, remedy=f"{remedy}."
                )
            )
        if leaf.data is not None and leaf.data.is_meta:
            findings.append(
                Finding(
                    "the tensor to fill is on the meta device",
                    leaf.key,
                    remedy="Materialise it, or pass data=None.",
                )
            )
    if findings:
        raise StateMismatchError("the template does not fit the checkpoint", findings)


def _with_memory(leaf: ShardedTensor, stored_shape: Ints) -> ShardedTensor:
    """A copy of the leaf that has memory to fill; what is not stored of it is zero."""
    partly = tuple(leaf.global_shape) != stored_shape
    copied = leaf.without_data()
    if leaf.data is None:
        copied.init_data("cpu", torch.zeros if partly else torch.empty)
    else:
        copied.data = leaf.data
        if partly:
            leaf.data.detach().zero_()
    return copied


def _read(
    leaves: dict[TreePath, ShardedBase],
    strategy: LoadShardedStrategy,
    reader: StorageReader | None,
    index: Index | None,
    parts: Partition,
    checkpoint_dir: str | PathLike[str],
    comm: Comm,
) -> dict[TreePath, Any]:
    try:
        if reader is not None and index is not None:
            assert isinstance(strategy, PlannedLoadStrategy)
            strategy.read(leaves, index, reader, comm)
            return {path: leaf.data for path, leaf in leaves.items()}
        with comm.agreed("reading"):
            result = strategy.load(parts.nested(leaves), checkpoint_dir)
            return {path: value_at(result, path) for path in leaves}
    except CheckpointingException as error:
        given = sorted(
            {
                leaf.key
                for path, leaf in leaves.items()
                if path in parts.tensors and parts.tensors[path].data is not None
            }
        )
        if given:
            error.add_note(
                f"The given tensors of {len(given)} keys may be partly filled: "
                f"{', '.join(given[:20])}{', ...' if len(given) > 20 else ''}"
            )
        raise

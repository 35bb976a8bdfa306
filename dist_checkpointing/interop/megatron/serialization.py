"""Save, load and the small readers, with Megatron's parameters and the defaults of this layer."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dist_checkpointing import serialization as ours
from dist_checkpointing.comm import SingleProcess, default_comm
from dist_checkpointing.errors import StateMismatchError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.format import commit
from dist_checkpointing.format.commit import (
    CONTENT_METADATA_KEY as _CONTENT_METADATA_KEY,  # noqa: F401 - a name that Megatron has here
    CheckpointingConfig,
    read_config,
)
from dist_checkpointing.format.leftovers import CONFIG_FNAME, attempt_of, leftovers, note_attempt
from dist_checkpointing.interop.megatron import import_hook, state_dicts
from dist_checkpointing.interop.megatron.strategies import get_default_strategy
from dist_checkpointing.interop.megatron.validation import _validate_common_state_dict
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, StateDict
from dist_checkpointing.mapping.nested_dicts import mapped
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.torch_dist.metadata import read_dcp_metadata
from dist_checkpointing.validation.load_errors import StrictHandling, parse_strict_flag

CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]
Folder = str | PathLike[str]

# Whether a folder holds a checkpoint.


def maybe_load_config(checkpoint_dir: Folder) -> CheckpointingConfig | None:
    """The content of ``metadata.json``; None for no folder, and for one without the file."""
    if not checkpoint_dir or not location.is_file(Path(checkpoint_dir) / CONFIG_FNAME):
        return None
    return read_config(checkpoint_dir)


def check_is_distributed_checkpoint(checkpoint_dir: Folder) -> bool:
    """Whether there is a ``metadata.json`` that can be read."""
    # Plain checkpoints of torch DCP have none, and Megatron's training has its own code for them.
    is_there = bool(checkpoint_dir) and location.is_file(Path(checkpoint_dir) / CONFIG_FNAME)
    return is_there and commit.check_is_distributed_checkpoint(checkpoint_dir)


def save_config(config: CheckpointingConfig, checkpoint_dir: Folder) -> None:
    content = json.dumps(asdict(config)).encode()
    local_folder.write_atomic(Path(checkpoint_dir) / CONFIG_FNAME, content)


_DATA = re.compile(r".*__\d+_\d+\.distcp")
_FILES = re.compile(r"metadata\.json|common\.pt|\.metadata(\.tmp|\.bck)?")
_PARTS = re.compile(r"\.zarray|shard_.*\.pt")
"""What lies in the folder of a tensor of zarr, of its locks, or of a sharded object."""


def adopt(folder: Path) -> None:
    """Note what Megatron has left in a folder as what a save may replace.

    That is a checkpoint, or the data files and what belongs to them of a save that did not come to
    its end. Nothing is deleted: a checkpoint that is there stays one. CheckpointExistsError if a
    save is writing there.
    """
    if not location.is_folder(folder):
        return
    with FolderLock.acquire(folder):
        known, theirs = leftovers(folder), _made_by_megatron(folder)
        if theirs - known:
            attempt, names = attempt_of(folder) or uuid.uuid4().hex, sorted(theirs | known)
            local_folder.make_dckpt_folder(folder)
            note_attempt(folder, attempt, names, local_folder.Durability.FSYNC)


def _made_by_megatron(folder: Path) -> set[str]:
    is_whole = commit.check_is_distributed_checkpoint(folder)
    paths = [path for path in folder.iterdir() if not path.is_symlink()]
    data = {path.name for path in paths if _DATA.fullmatch(path.name)}
    if not is_whole and not data:
        return set()
    found = data | {path.name for path in paths if _FILES.fullmatch(path.name)}
    if is_whole and read_config(folder).sharded_backend == "zarr":
        # Each array in such a checkpoint is a tensor of it; elsewhere one may be anybody's.
        folders = (path for path in paths if path.is_dir())
        found |= {p.name for p in folders if any(_PARTS.fullmatch(q.name) for q in p.iterdir())}
    return found


# Save and load.


class TemplateMismatchError(StateMismatchError, CheckpointException):
    """The template asks for something else than the checkpoint holds, as torch's error too."""

    def __init__(self, *args: Any) -> None:
        StateMismatchError.__init__(self, *args)
        self._failures = {}


def save(
    sharded_state_dict: StateDict,
    checkpoint_dir: Folder,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> Any:
    """See ``dist_checkpointing.save``; the request to schedule if ``async_sharded_save``."""
    if common_strategy is not None:
        raise NotImplementedError("the only common strategy is torch")
    if sharded_strategy is None:
        sharded_strategy = import_hook.in_use.backend
    if isinstance(sharded_strategy, tuple):
        sharded_strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *sharded_strategy)
    if validate_access_integrity:
        preprocess = preprocess_common_before_consistancy_check or (lambda state: state)
        with default_comm().agreed("preparing the save"):
            plain = state_dicts.extract_nonpersistent(sharded_state_dict)[1]
            common = preprocess(dict(state_dicts.extract_sharded_base(plain)[1]))
        _validate_common_state_dict(common)
    base = getattr(sharded_strategy, "base_strategy", sharded_strategy)
    folder = as_local_folder(checkpoint_dir)
    return save_with_hooks(
        # The plan stands by then.
        SaveHooks(before_claim=lambda _: adopt(folder)),
        sharded_state_dict,
        folder,
        async_sharded_save=async_sharded_save,
        sharded_strategy=sharded_strategy,
        validate_access_integrity=validate_access_integrity,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        overwrite=True,
        plan_cache=getattr(base, "plan_cache", None),
        trusted=import_hook.in_use.trusted,
    )


def load(
    sharded_state_dict: StateDict,
    checkpoint_dir: Folder,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> Any:
    """See ``dist_checkpointing.load``.

    Tensors that are not wrapped are returned, not filled; nothing is logged about keys that are not
    asked for.
    """
    flag = parse_strict_flag(strict)
    if flag is StrictHandling.ASSUME_OK_UNEXPECTED:
        flag = StrictHandling.RAISE_UNEXPECTED  # the same, without the warning
    state_dicts.force_all_tensors_to_non_fp8(sharded_state_dict)
    template = mapped(sharded_state_dict, lambda v: None if isinstance(v, torch.Tensor) else v)
    try:
        return ours.load(
            template,
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            validate_access_integrity,
            flag,
            cast="any",  # as Megatron does
            trusted=import_hook.in_use.trusted,
        )
    except StateMismatchError as error:
        raise TemplateMismatchError(*error.args) from error


def load_common_state_dict(checkpoint_dir: Folder) -> StateDict:
    return ours.load_common_state_dict(checkpoint_dir, trusted=import_hook.in_use.trusted)


def load_tensors_metadata(checkpoint_dir: Folder, sharded_strategy: Any = None) -> Any:
    """Each stored tensor as one shard. What torch_dist stores flattened is loaded flattened."""
    found = ours.load_tensors_metadata(checkpoint_dir, sharded_strategy)
    if read_config(checkpoint_dir).sharded_backend == "torch_dist":
        for key, tensor in read_dcp_metadata(as_local_folder(checkpoint_dir)).tensors.items():
            if tensor.flattened_from is not None:
                whole = slice(0, math.prod(tensor.flattened_from))
                found[key] = replace(found[key], flattened_range=whole)
    return found


def load_plain_tensors(checkpoint_dir: Folder) -> Any:
    template = load_tensors_metadata(checkpoint_dir)
    return load(template, checkpoint_dir, validate_access_integrity=False)


def remove_sharded_tensors(checkpoint_dir: Folder, key_prefix: str) -> None:
    """See ``dist_checkpointing.remove_sharded_tensors``. For one rank alone: not collective."""
    ours.remove_sharded_tensors(checkpoint_dir, key_prefix, comm=SingleProcess())


def get_default_save_sharded_strategy(backend: str | None = None, version: int = 1) -> Any:
    chosen = import_hook.in_use.backend if backend is None else (backend, version)
    return get_default_strategy(StrategyAction.SAVE_SHARDED, *chosen)


def get_default_load_sharded_strategy(checkpoint_dir: Folder) -> Any:
    config = read_config(checkpoint_dir)
    chosen = config.sharded_backend, config.sharded_backend_version
    return get_default_strategy(StrategyAction.LOAD_SHARDED, *chosen)

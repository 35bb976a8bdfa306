"""Save, load and the small readers, with Megatron's parameters and the defaults of this layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dist_checkpointing import serialization as ours
from dist_checkpointing.comm import SingleProcess, default_comm
from dist_checkpointing.errors import StateMismatchError
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.format.commit import CONTENT_METADATA_KEY, read_config
from dist_checkpointing.interop.megatron.import_hook import adopt, defaults
from dist_checkpointing.interop.megatron.modules import utils
from dist_checkpointing.interop.megatron.modules.strategies.base import get_default_strategy
from dist_checkpointing.interop.megatron.modules.validation import _validate_common_state_dict
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, StateDict
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_steps import SaveHooks
from dist_checkpointing.strategies.base import LoadShardedStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.torch_dist.metadata import read_dcp_metadata
from dist_checkpointing.validation.strictness import StrictHandling

CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]
Folder = str | PathLike[str]
_CONTENT_METADATA_KEY = CONTENT_METADATA_KEY

load_content_metadata = ours.load_content_metadata
load_sharded_metadata = ours.load_sharded_metadata
get_default_save_common_strategy = ours.get_default_save_common_strategy


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
        sharded_strategy = defaults().backend
    if isinstance(sharded_strategy, tuple):
        sharded_strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *sharded_strategy)
    if validate_access_integrity:
        preprocess = preprocess_common_before_consistancy_check or (lambda state: state)
        with default_comm().agreed("preparing the save"):
            plain = utils.extract_nonpersistent(sharded_state_dict)[1]
            common = preprocess(dict(utils.extract_sharded_base(plain)[1]))
        _validate_common_state_dict(common)
    base = getattr(sharded_strategy, "base_strategy", sharded_strategy)
    folder, overwrite = as_local_folder(checkpoint_dir), defaults().overwrite
    return save_with_hooks(
        # The plan stands by then.
        SaveHooks(before_claim=lambda _: adopt(folder) if overwrite else None),
        sharded_state_dict,
        folder,
        async_sharded_save=async_sharded_save,
        sharded_strategy=sharded_strategy,
        validate_access_integrity=validate_access_integrity,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        overwrite=overwrite,
        plan_cache=getattr(base, "plan_cache", None),
        trusted=defaults().trusted,
    )


def load(
    sharded_state_dict: StateDict,
    checkpoint_dir: Folder,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool | None = None,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> Any:
    """See ``dist_checkpointing.load``."""
    utils.force_all_tensors_to_non_fp8(sharded_state_dict)
    chosen = defaults()
    validate = chosen.validate if validate_access_integrity is None else validate_access_integrity
    try:
        return ours.load(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            validate,
            strict,
            cast=chosen.cast,
            trusted=chosen.trusted,
        )
    except StateMismatchError as error:
        raise TemplateMismatchError(*error.args) from error


def load_common_state_dict(checkpoint_dir: Folder) -> StateDict:
    return ours.load_common_state_dict(checkpoint_dir, trusted=defaults().trusted)


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


def get_default_save_sharded_strategy(
    backend: str | None = None, version: int = 1
) -> SaveShardedStrategy:
    """The save strategy of a backend, by default that of this layer."""
    chosen = defaults().backend if backend is None else (backend, version)
    strategy: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *chosen)
    return strategy


def get_default_load_sharded_strategy(checkpoint_dir: Folder) -> LoadShardedStrategy:
    """The load strategy for a checkpoint."""
    config = read_config(checkpoint_dir)
    chosen = config.sharded_backend, config.sharded_backend_version
    strategy: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *chosen)
    return strategy

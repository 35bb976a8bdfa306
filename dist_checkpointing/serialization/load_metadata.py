"""The small readers, and the removal of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.location import as_location, require_local
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.format.commit import CONTENT_METADATA_KEY, data_folder, read_config
from dist_checkpointing.format.leftovers import PlannedRemoval, clear_temporaries
from dist_checkpointing.format.seal import read_seal, resealing
from dist_checkpointing.mapping import CommonStateDict, ShardedStateDict, ShardedTensor, StateDict
from dist_checkpointing.serialization.load import load
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    handles_objects,
)
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import (
    DEFAULT_COMMON,
    DEFAULT_SHARDED,
    LoadStrategies,
    Selection,
    common_reader,
    open_checkpoint,
    select_strategy,
)
from dist_checkpointing.strategies.unplanned_strategies import ForeignLoadStrategy


def load_common_state_dict(
    checkpoint_dir: str | PathLike[str], *, trusted: bool = False
) -> CommonStateDict:
    """The common state of a checkpoint. Not collective.

    Args:
        checkpoint_dir: folder or URL of a committed checkpoint.
        trusted: unpickle anything, see ``load``.

    Example:
        >>> from dist_checkpointing import load_common_state_dict, save
        >>> save({"step": 100}, "ckpt")
        >>> load_common_state_dict("ckpt")
        {'step': 100}
    """
    folder = data_folder(checkpoint_dir)
    return common_reader(read_config(folder), trusted=trusted).load_common(folder)


def load_tensors_metadata(
    checkpoint_dir: str | PathLike[str], sharded_strategy: Selection[LoadShardedStrategy] = None
) -> dict[str, ShardedTensor]:
    """Every stored tensor by key, as one whole shard without data. Not collective.

    The result is a template: ``load`` takes it.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, load_tensors_metadata, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> save(state, "ckpt")
        >>> load_tensors_metadata("ckpt")["w"].global_shape
        (6,)
    """
    folder = data_folder(checkpoint_dir)
    return open_checkpoint(folder, sharded_strategy).sharded.load_tensors_metadata(folder)


def load_sharded_metadata(
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    common_strategy: Selection[LoadCommonStrategy] = None,
) -> ShardedStateDict:
    """Every stored tensor by key and every stored object by unique key. Not collective.

    Example:
        >>> from dist_checkpointing import ShardedObject, load_sharded_metadata, save
        >>> save({"rng": ShardedObject("rng", [1, 2], (1,), (0,))}, "ckpt")
        >>> list(load_sharded_metadata("ckpt"))
        ['rng/shard_0_1']
    """
    checkpoint_dir = data_folder(checkpoint_dir)
    found = open_checkpoint(checkpoint_dir, sharded_strategy, common_strategy)
    metadata = dict(found.sharded.load_sharded_metadata(checkpoint_dir))
    if not handles_objects(found.sharded):
        metadata |= found.common.load_sharded_metadata(checkpoint_dir)
    return metadata


def load_plain_tensors(
    checkpoint_dir: str | PathLike[str], *, comm: Comm | None = None
) -> StateDict:
    """Every stored tensor whole, by key, and the common state. Collective: all ranks get all.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, load_plain_tensors, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> save(state, "ckpt")
        >>> load_plain_tensors("ckpt")
        {'w': tensor([0., 1., 2., 3., 4., 5.]), 'step': 100}
    """
    template: Any = load_tensors_metadata(checkpoint_dir)
    return load(template, checkpoint_dir, comm=comm)


def load_content_metadata(
    checkpoint_dir: str | PathLike[str] | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
) -> dict[str, Any] | None:
    """The ``content_metadata`` that was passed to ``save``; None if there was none.

    Args:
        checkpoint_dir: folder of a committed checkpoint.
        preloaded_state_dict: an already loaded state dict to take it from instead.

    Raises:
        ValueError: if neither is given.

    Example:
        >>> from dist_checkpointing import load_content_metadata, save
        >>> save({"step": 100}, "ckpt", content_metadata={"model": "gpt"})
        >>> load_content_metadata("ckpt")
        {'model': 'gpt'}
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("give either checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(CONTENT_METADATA_KEY)


_REMEDY: Final = "Convert it into a new one without them: dckpt convert --exclude PATTERN."


def remove_sharded_tensors(
    checkpoint_dir: str | PathLike[str], key_prefix: str, *, comm: Comm | None = None
) -> None:
    """Delete all tensors whose key begins with ``key_prefix``, for good. Collective.

    A crash in between leaves a checkpoint with the tensors or without them, never with damaged
    ones.

    Raises:
        UnsupportedFormatError: if tensors cannot be removed from this backend, or it is in an
            object store.
        CheckpointExistsError: if another removal, or a save, is going on there.

    Example:
        >>> import torch
        >>> from dist_checkpointing import Checkpoint, ShardedTensor, remove_sharded_tensors, save
        >>> shard = ShardedTensor.from_rank_offsets
        >>> save({k: shard(k, torch.ones(2)) for k in ("model.w", "optim.w")}, "ckpt")
        >>> remove_sharded_tensors("ckpt", "optim.")
        >>> list(Checkpoint.open("ckpt"))
        ['model.w']
    """
    comm = chosen_comm(comm)
    with comm.agreed("removing tensors"):
        if comm.rank == 0:
            folder = _local_folder(checkpoint_dir)
            open_checkpoint(folder)  # it says what is wrong with a folder that is not a checkpoint
            with FolderLock.acquire(folder):
                # Only now nobody changes it.
                found = open_checkpoint(folder)
                clear_temporaries(folder)
                with resealing(folder), _removing(found, folder):
                    found.sharded.remove_sharded_tensors(folder, key_prefix)


def preview_removal(checkpoint_dir: str | PathLike[str], key_prefix: str) -> PlannedRemoval:
    """What ``remove_sharded_tensors`` would do. Not collective, touches nothing.

    Raises:
        UnsupportedFormatError: see ``remove_sharded_tensors``.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> preview_removal("ckpt", "w").keys
        ('w',)
    """
    folder = _local_folder(checkpoint_dir)
    found = open_checkpoint(folder)
    with _removing(found, folder):
        planned = found.sharded.plan_removal(folder, key_prefix)
    seal = read_seal(folder)
    # A removal that was cut off at its very end has left no more than an open seal.
    return replace(planned, is_unfinished=True) if seal is not None and seal.is_open else planned


def _local_folder(checkpoint_dir: str | PathLike[str]) -> Path:
    return require_local(as_location(checkpoint_dir), "removing single tensors", _REMEDY)


@contextmanager
def _removing(found: LoadStrategies, checkpoint_dir: str | PathLike[str]) -> Iterator[None]:
    """Say in words what a strategy that does not remove tensors says with NotImplementedError."""
    try:
        yield
    except NotImplementedError:
        finding = Finding(
            "its strategy does not remove tensors",
            found=f"{found.config.sharded_backend} {found.config.sharded_backend_version}",
            path=str(checkpoint_dir),
            remedy=_REMEDY,
        )
        message = "tensors cannot be removed from this checkpoint"
        raise UnsupportedFormatError(message, [finding]) from None


def get_default_save_sharded_strategy(
    backend: str = DEFAULT_SHARDED[0], version: int = DEFAULT_SHARDED[1]
) -> SaveShardedStrategy:
    """The save strategy of a backend and version.

    Example:
        >>> get_default_save_sharded_strategy().backend
        'tensorstore'
    """
    strategy: SaveShardedStrategy = select_strategy(StrategyAction.SAVE_SHARDED, (backend, version))
    return strategy


def get_default_save_common_strategy(
    backend: str = DEFAULT_COMMON[0], version: int = DEFAULT_COMMON[1]
) -> SaveCommonStrategy:
    """The save strategy for common state of a backend and version.

    Example:
        >>> get_default_save_common_strategy().backend
        'torch'
    """
    strategy: SaveCommonStrategy = select_strategy(StrategyAction.SAVE_COMMON, (backend, version))
    return strategy


def get_default_load_sharded_strategy(
    checkpoint_dir: str | PathLike[str] | None = None,
) -> LoadShardedStrategy:
    """The load strategy for a checkpoint; without one, that of the default backend.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> strategy = get_default_load_sharded_strategy("ckpt")
        >>> strategy.load_tensors_metadata("ckpt")["w"].global_shape
        (4,)
    """
    if checkpoint_dir is None:
        strategy: LoadShardedStrategy = select_strategy(StrategyAction.LOAD_SHARDED, None)
        return strategy
    found = open_checkpoint(data_folder(checkpoint_dir)).sharded
    return found.base_strategy if isinstance(found, ForeignLoadStrategy) else found

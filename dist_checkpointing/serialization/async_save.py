"""async_save: one call, with the saver that this process keeps for its ranks."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from os import PathLike
from typing import Final, Unpack

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.default_comm import chosen_comm
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful
from dist_checkpointing.serialization.async_saver import AsyncSaver
from dist_checkpointing.serialization.save_handle import SaveHandle
from dist_checkpointing.serialization.save_options import AsyncSaveOptions, require_known
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection

_KEPT_AS: Final = "async saver"
_EXIT_PATIENCE_SECONDS: Final = 1.0

_kept: weakref.WeakKeyDictionary[AsyncSaver, int] = weakref.WeakKeyDictionary()
"""Savers to close, and the process that made each."""


def async_save(
    sharded_state_dict: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[SaveShardedStrategy] = None,
    common_strategy: Selection[SaveCommonStrategy] = None,
    *,
    saver: AsyncSaver | None = None,
    comm: Comm | None = None,
    **options: Unpack[AsyncSaveOptions],
) -> SaveHandle:
    """Save like ``save``, but write behind the training. Collective.

    Args:
        sharded_state_dict: see ``save``.
        checkpoint_dir: see ``save``.
        sharded_strategy: see ``save``. A strategy of a third party runs in the thread as a whole,
            and must not use the process groups of the training there.
        common_strategy: see ``save``.
        saver: has buffers, plans and the ranks' own channel; by default one with the default
            options, which this process makes on the first call for a set of ranks and keeps until
            it ends. A save waits for the one before it with the same saver. Threads take turns, in
            the same order on all ranks.
        comm: see ``save``; not together with ``saver``, which has its own.
        options: see ``AsyncSaveOptions``.

    Returns:
        A handle. The checkpoint exists once its ``result()`` returns, and not before.

    Raises:
        CheckpointingException: what ``save`` raises before it writes; later errors are raised by
            the handle, and by the next save of the same ``saver``, on all ranks.
        ValueError: for a choice that does not exist, or ``comm`` together with ``saver``.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, async_save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> handle = async_save(state, "ckpt")
        >>> handle.result()
    """
    require_known("async_save", options)
    if saver is not None and comm is not None:
        raise ValueError("the saver has its own comm")
    saver = _saver_for(chosen_comm(comm)) if saver is None else saver
    return saver.save(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        **options,
    )


def _saver_for(comm: Comm) -> AsyncSaver:
    """The saver that is kept for these ranks."""
    # One lock a process and rank: ranks may be threads, and making a saver is collective.
    lock = comm.kept.setdefault(f"{_KEPT_AS}: lock of {os.getpid()}", threading.Lock())
    with lock:
        saver: AsyncSaver | None = comm.kept.get(_KEPT_AS)
        if saver is None or not saver.is_here:
            saver = comm.kept[_KEPT_AS] = AsyncSaver(comm=comm)
            _kept[saver] = os.getpid()
        saver.talk_over(comm)
    return saver


@atexit.register
def _close_kept() -> None:
    # Saves under way have been waited for by now, see ``background``.
    for saver, owner in list(_kept.items()):
        if owner == os.getpid():  # and not one forked from it, which has none of its threads
            saver.close_alone(_EXIT_PATIENCE_SECONDS)

"""What a process group leaves behind, taken away once its comm is gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)


def forget_keys(store: Any, keys: Sequence[str], owner: int) -> None:
    """Delete keys of this rank from the store of torch.distributed.

    Args:
        store: the connection to it.
        keys: that nobody reads any more.
        owner: the process that wrote them; one forked from it leaves them alone.
    """
    if os.getpid() != owner or not dist.is_initialized():
        return
    try:
        for key in keys:
            store.delete_key(key)
    except RuntimeError as error:
        logger.debug("keys stay in the store: %s", error)


def end_group(group: dist.ProcessGroup, owner: int) -> None:
    """Destroy a group, and what this rank has told the others about it. Not collective.

    Args:
        group: that this rank has no more use for.
        owner: the process that made it; one forked from it has none of its threads.
    """
    if os.getpid() != owner or not dist.is_initialized():
        return
    try:
        name, rank = group.group_name, dist.get_rank(group)
        dist.destroy_process_group(group)
    except ValueError as error:
        # With the world that it belonged to, it has gone already.
        logger.debug("nothing to close: %s", error)
        return
    # Where to connect to, which torch leaves in the store. Once a comm has been made, all have.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way to it
    forget_keys(store, [f"{name}//cpu//0/{rank}"], owner)

"""How writers and readers are called that take what the protocol says, or less."""

from __future__ import annotations

from typing import Any

import torch

from dist_checkpointing.format.index import Index
from dist_checkpointing.planning import Metadata
from dist_checkpointing.planning.user_planner import call_hook
from dist_checkpointing.storage.protocol import StorageReader, StorageWriter


def result_of(future: Any) -> Any:
    """The result of a future of ``concurrent.futures`` or of torch, when it is there."""
    return future.wait() if isinstance(future, torch.futures.Future) else future.result()


def set_up_writer(writer: StorageWriter, *, rank: int, world_size: int) -> None:
    """Call ``set_up_storage_writer``, whatever of the protocol it takes."""
    call_hook(
        writer.set_up_storage_writer, is_coordinator=rank == 0, rank=rank, world_size=world_size
    )


def set_up_reader(reader: StorageReader, index: Index, *, rank: int, world_size: int) -> None:
    """Call ``set_up_storage_reader``, whatever of the protocol it takes."""
    call_hook(
        reader.set_up_storage_reader,
        # One that is more than an Index is what the reader made of its own.
        Metadata.from_index(index) if type(index) is Index else index,
        is_coordinator=rank == 0,
        rank=rank,
        world_size=world_size,
    )

"""Memory that another process can map."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from typing import Any

import torch

logger: logging.Logger = logging.getLogger(__name__)


class SharedMemory:
    """Pages without a name: gone with the last process that has them, however that ends.

    A limit on ``/dev/shm`` does not count here, the memory limit of the job does.

    Args:
        num_bytes: size of the memory, at least 1.
        pinned: lock the pages, where CUDA can do that.

    Attributes:
        descriptor: File descriptor of the pages; another process that gets it can map them.
        tensor: The bytes, as a 1-D uint8 tensor.

    Raises:
        OSError: if there is not so much memory.
    """

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        self.descriptor: int = os.memfd_create("dist_checkpointing")
        weakref.finalize(self, os.close, self.descriptor)
        # Pages that are missing later would be a SIGBUS, and not an error that can be told.
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.tensor: Any = mapped(self.descriptor, num_bytes)
        if pinned:
            self._pin()

    def _pin(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0))
        if code:
            logger.warning("CUDA cannot lock shared memory (error %d): copies are slower", code)
            return
        weakref.finalize(self, _unlock, self.tensor.untyped_storage())


def _unlock(storage: torch.UntypedStorage) -> None:
    # It is handed over so that the pages stay mapped until here.
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(storage.data_ptr())


def mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The bytes behind a descriptor, as a 1-D uint8 tensor; they stay mapped as long as it lives.

    Every page is made present at once, since that takes a fault for each otherwise.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes, flags), dtype=torch.uint8)
